"""Zero bubble: backwards in halves, so that weight gradients fill what would be a bubble (Qi et al., arXiv 2401.10241).

Only the input gradient I of a backward has somebody waiting for it. Its other half, the weight gradient W, may run
any time later, so each device puts some of its W off until the end, where 1F1B is idle between two backwards. ZB-H1,
p = 3, m = 4, and t_F = t_I = t_W::

    device 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1     F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

The later a device is, the fewer forwards it runs ahead and the more W it owes. It pays one as soon as it would
otherwise hold too many micro-batches: what the forward kept is dropped by W, not by I. This is all there is to the
three schedules; they differ in how many forwards run ahead, and in how many micro-batches a device may hold.

**The bubble** of the paper is (p-1)(t_F + t_I - k t_W), where k is 1, and 2 for ZB-H2: what a device idles between its
own first and last action, as long as t_W is at most t_F and t_I. That of a whole step, which ends with a barrier, is at
any times, with enough micro-batches, (p-1) times the largest of

- t_F + t_I - k t_W, the paper's;
- t_F, since the last device waits so long for its first input, and then has all its work still before it;
- t_I - (k-1) t_F, since in the end a W that is longer than an F stands before an I that other devices wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncpipe.core.schedules.interleaved import LoopSchedule, rounds
from asyncpipe.core.schedules.protocol import Action, F, I, OrderedSchedule, Shape, W

__all__ = ["ZBH1", "ZBH2", "InterleavedZeroBubble"]


class ZBH1(OrderedSchedule):
    """The memory of 1F1B's first device on every device, for a third of its bubble (arXiv 2401.10241).

    Bubble (p-1)(t_F + t_I - t_W) where m is at least p and t_W at most t_F and t_I; for other times see this module.
    Below, each of the p - m missing micro-batches leaves a W less to fill it with: t_W more. p micro-batches (at most
    m) held on every device until their W; p - r of them on device r, as with 1F1B, still before their I. Any m,
    also m < p; one stage a device.
    """

    name = "zb-h1"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p = shape.devices
        passes = [(i, device) for i in range(shape.microbatches)]
        return _split_backward(passes, passes, ahead=p - device, held=p)


class ZBH2(OrderedSchedule):
    """No device idle between its first action and its last, for twice the memory (arXiv 2401.10241).

    **Where it falls short of the paper.** The paper's (p-1)(t_F + t_I - 2 t_W), which is 0 at equal times, is what a
    device idles between its own first and last action, and so it is here. Device p-1 starts (p-1) t_F late all the
    same and, never idle, ends as much later than device 0. The paper hides that by letting the next step begin on
    device 0 meanwhile, with an optimizer step that does not wait for the other devices (norms and overflows are
    checked afterwards, and the update rolled back if need be). That is left out: a step here ends with a barrier, and
    its bubble is (p-1) t_F at least. So it is shorter than ZB-H1's only where t_I > t_W, and the same at equal times.

    Bubble, from the start of the step, (p-1) max(t_F, t_F + t_I - 2 t_W) where m is at least 2p - 1 and t_W at most
    t_F and t_I; for other times see this module. Below, each missing micro-batch leaves a W less to fill it
    with. 2p - 1 micro-batches (at most m) held on every device until their W; 2(p-r) - 1 of them on device r, as with
    eager 1F1B, still before their I. Any m, also m < p, where it is no worse than ZB-H1; one stage a device.
    """

    name = "zb-h2"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p = shape.devices
        passes = [(i, device) for i in range(shape.microbatches)]
        return _split_backward(passes, passes, ahead=2 * (p - device) - 1, held=2 * p - 1)


class InterleavedZeroBubble(LoopSchedule):
    """ZB-H1 over v virtual stages a device: ZB1P as torch.distributed.pipelining ships it (arXiv 2401.10241).

    Forwards and input gradients go in the rounds of ``interleaved``, with p - r - 1 fewer forwards ahead. Bubble
    (p-1)(t_F + t_I - t_W)/v where p divides m and t_W is at most t_F and t_I, with the times of all v virtual stages of
    a device; for other times see this module. p micro-batches held on every device until their W, each of them v
    times; p - r/v of them on device r still before their I. Where p does not divide m, the order is that of the next
    multiple with the surplus micro-batches left out: more bubble, but the step is no longer than that of the next
    multiple nor, at equal times, than that of ``interleaved``. Any m, any v; with v = 1 and m at least p this is ZB-H1.
    """

    name = "interleaved-zb"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p, v = shape.devices, shape.stages // shape.devices
        forwards = list(rounds(device, shape, range(v)))
        backwards = list(rounds(device, shape, range(v)[::-1]))
        padded = _split_backward(forwards, backwards, ahead=v * p - device, held=v * p)
        return (action for action in padded if action.microbatch < shape.microbatches)


def _split_backward(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], *, ahead: int, held: int
) -> Iterator[Action]:
    """1F1B of F and I over (micro-batch, stage) pairs, with W put off for as long as memory allows.

    ``ahead`` forwards come before the first I, and at most ``held`` pairs are between their F and their W.
    """
    held = min(held, len(forwards))
    ahead = min(ahead, held)
    deferred = held - ahead
    yield from (F(i, j) for i, j in forwards[:ahead])
    for done, pair in enumerate(backwards):
        yield I(*pair)
        if done >= deferred:
            yield W(*backwards[done - deferred])
        if done + ahead < len(forwards):
            yield F(*forwards[done + ahead])
    yield from (W(i, j) for i, j in backwards[len(backwards) - deferred :])
