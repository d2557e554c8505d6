"""Zero bubble: backwards are split, and weight gradients fill what would be a bubble (Qi et al., arXiv 2401.10241).

Other stages wait only for the input gradient I of a backward. Its other half, the weight gradient W, may run at any
later time, so each device defers some W to the end of the step, where 1F1B is idle between two backwards. ZB-H1 with
p = 3, m = 4 and t_F = t_I = t_W::

    device 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    device 1     F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    device 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

A later device runs fewer forwards ahead and defers more W. It runs a deferred W when it would otherwise hold too many
micro-batches, because W, not I, drops what the forward kept. The three schedules differ only in how many forwards run
ahead and in how many micro-batches a device may hold.

**The bubble** in the paper is (p-1)(t_F + t_I - k t_W), where k is 1, and 2 for ZB-H2. It is the idle time of a device
between its own first and last action, and holds while t_W is at most t_F and t_I. A step by itself ends with a barrier.
Its bubble is, for any times and with enough micro-batches, (p-1) times the largest of

- t_F + t_I - k t_W, as in the paper;
- t_F: the last device waits that long for its first input, and its whole work comes after;
- t_I - (k-1) t_F: near the end, a W that is longer than an F delays an I that other devices wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncpipe.core.schedules.interleaved import LoopSchedule, rounds
from asyncpipe.core.schedules.protocol import Action, F, I, OrderedSchedule, Shape, W

__all__ = ["ZBH1", "ZBH2", "InterleavedZeroBubble"]


class ZBH1(OrderedSchedule):
    """The memory of 1F1B's first device on every device, for a third of its bubble (arXiv 2401.10241).

    Bubble (p-1)(t_F + t_I - t_W) where m is at least p and t_W at most t_F and t_I; for other times see the module's
    docstring. With m < p, each of the p - m missing micro-batches is one W less to fill the bubble: t_W more. Every
    device holds p micro-batches (at most m) until their W; on device r, p - r of them are before their I, as with 1F1B.
    Any m, also m < p; one stage a device.
    """

    name = "zb-h1"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p = shape.devices
        passes = [(i, device) for i in range(shape.microbatches)]
        return _split_backward(passes, passes, ahead=p - device, held=p)


class ZBH2(OrderedSchedule):
    """No device idle between its first action and its last, for twice the memory (arXiv 2401.10241).

    **Difference from the paper.** The paper's bubble, (p-1)(t_F + t_I - 2 t_W), which is 0 at equal times, is the idle
    time of a device between its own first and last action, and it is the same here. But device p-1 starts (p-1) t_F
    late and ends as much later than device 0. The paper hides this delay: the next step begins on device 0 meanwhile,
    with an optimizer step that does not wait for the other devices (norms and overflows are checked afterwards, and
    the update is rolled back if necessary). So it is here where steps overlap: at equal times there is no bubble from
    the end of one step to the end of the next. A step by itself has one of at least (p-1) t_F, which is shorter than
    that of ZB-H1 only where t_I > t_W, and the same at equal times.

    Bubble, from the start of the step, (p-1) max(t_F, t_F + t_I - 2 t_W) where m is at least 2p - 1 and t_W at most
    t_F and t_I; for other times see the module's docstring. With fewer micro-batches, each missing one is one W less to
    fill the bubble. Every device holds 2p - 1 micro-batches (at most m) until their W; on device r, 2(p-r) - 1 of them
    are before their I, as with eager 1F1B. Any m, also m < p, where it is no worse than ZB-H1; one stage a device.
    """

    name = "zb-h2"

    def order(self, device: int, shape: Shape) -> Iterator[Action]:
        p = shape.devices
        passes = [(i, device) for i in range(shape.microbatches)]
        return _split_backward(passes, passes, ahead=2 * (p - device) - 1, held=2 * p - 1)


class InterleavedZeroBubble(LoopSchedule):
    """ZB-H1 over v virtual stages a device: ZB1P as torch.distributed.pipelining ships it (arXiv 2401.10241).

    Forwards and input gradients run in the rounds of ``interleaved``, with p - r - 1 fewer forwards ahead. Bubble
    (p-1)(t_F + t_I - t_W)/v where p divides m and t_W is at most t_F and t_I, with the times of all v virtual stages of
    a device; for other times see the module's docstring. Every device holds p micro-batches, at each of its v stages,
    until their W; on device r, p - r/v of them are before their I. For other m the order is that of the next multiple
    of p without the surplus micro-batches: more bubble, but the step is no longer than that of the next multiple nor,
    at equal times, than that of ``interleaved``. Any m, any v; with v = 1 and m at least p this is ZB-H1.
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
    """1F1B of F and I over (micro-batch, stage) pairs, with W deferred for as long as memory allows.

    ``ahead`` forwards run before the first I, and at most ``held`` pairs are between their F and their W.
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
