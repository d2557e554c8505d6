"""Uses of autograd around ``y = pipe(x)`` that work as around the bare model, and those that are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from dropin_helpers import assert_equal, gradients, pipeline, rows
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from asyncpipe.errors import BackwardError

MODES = ("always", "except_last", "selective", "never")
mse = nn.functional.mse_loss


@pytest.mark.parametrize("mode", MODES)
def test_several_calls_before_a_backward(workload, mode):
    bare, model = workload.model().append(nn.Linear(8, 6).double()), workload.model().append(nn.Linear(8, 6).double())
    model.load_state_dict(bare.state_dict())
    x, y = rows(7).requires_grad_(), rows(5).requires_grad_()
    ours, theirs = [x, y, *model.parameters()], [x, y, *bare.parameters()]

    def both_in_one_loss(f):
        return f(x).sum() * f(y).sum()

    def one_behind_the_other(f):
        return f(f(x)).square().sum()

    def beside_each_other(f):
        return (f(x) * f(x[:, [1, 0, 2, 3, 4, 5]])).sum()

    with pipeline(model, checkpoint=mode).sync() as pipe:
        for loss in (both_in_one_loss, one_behind_the_other, beside_each_other):
            assert_equal(gradients(loss(pipe), ours), gradients(loss(bare), theirs), loss)
        first, second = pipe(x).square().sum(), pipe(y).square().sum()
        first.backward()
        assert_equal(gradients(second, ours), gradients(bare(x).square().sum() + bare(y).square().sum(), theirs))
        second, first = pipe(y).sum(), pipe(x).square().sum()
        got = gradients(first, ours)
        assert_equal(got, gradients(bare(x).square().sum(), theirs))
        assert_equal(gradients(second, ours), gradients(bare(y).sum(), theirs))


def test_gradients_accumulate_in_place_until_they_are_zeroed(workload):
    model = workload.model()
    with pipeline(model).sync() as pipe:
        for set_to_none in (True, False):
            mse(pipe(workload.x), workload.target).backward()
            made = [p.grad for p in model.parameters()]
            mse(pipe(workload.x), workload.target).backward()
            for parameter, grad, wanted in zip(model.parameters(), made, workload.gradients, strict=True):
                assert parameter.grad is grad
                assert (grad - 2 * wanted).abs().max() < 1e-10
            model.zero_grad(set_to_none=set_to_none)
        mse(pipe(workload.x), workload.target).backward()
    assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("mode", MODES)
def test_a_retained_graph_goes_backward_again(workload, mode):
    bare, model, x = workload.model(), workload.model(), rows(7).requires_grad_()
    ours, theirs = [x, *model.parameters()], [x, *bare.parameters()]
    with pipeline(model, 3, checkpoint=mode).sync() as pipe:
        output, expected = pipe(x), bare(x)
        for loss in (lambda y: y.square().sum(), lambda y: y[5:].sin().sum()):
            loss(output).backward(retain_graph=True)
            loss(expected).backward(retain_graph=True)
            assert_equal([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs])
            for leaf in (*ours, *theirs):
                leaf.grad = None
        assert_equal(gradients(output.sum(), ours), gradients(expected.sum(), theirs))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_chosen_tensors(workload, mode):
    bare, model, x = workload.model(), workload.model(), rows(7).requires_grad_()
    ours, theirs = list(model.parameters()), list(bare.parameters())
    with pipeline(model, 3, checkpoint=mode).sync() as pipe:
        for choose in (
            lambda leaves: leaves,
            lambda leaves: [x],
            lambda leaves: [leaves[3], x],
            lambda leaves: leaves[-1:],
        ):
            for kept in (None, torch.ones_like(ours[3])):
                ours[3].grad = kept
                got = torch.autograd.grad(pipe(x).square().sum(), choose(ours))
                assert_equal(got, torch.autograd.grad(bare(x).square().sum(), choose(theirs)))
                assert ours[3].grad is kept
                assert kept is None or torch.equal(kept, torch.ones_like(kept))
                assert all(leaf.grad is None for leaf in (x, *ours[:3], *ours[4:]))
                ours[3].grad = None
        pipe(x).square().sum().backward(inputs=[ours[2], x])
        bare_x = x.detach().clone().requires_grad_()
        bare(bare_x).square().sum().backward()
        assert_equal([x.grad, ours[2].grad], [bare_x.grad, theirs[2].grad])
        assert all(leaf.grad is None for leaf in (*ours[:2], *ours[3:]))
        output = pipe(x)
        (of_output,) = torch.autograd.grad(output.square().sum(), output, retain_graph=True)
        assert torch.equal(of_output, 2 * output)


@pytest.mark.promise(
    "Your own program", "In `pipe(x)`, hooks of a parameter without a gradient are called with `None`, as torch does."
)
def test_hooks_of_parameters_without_a_gradient_get_none():
    model, seen = nn.Sequential(nn.Linear(6, 6)).double(), []
    model[0].unused = nn.Parameter(torch.ones(2))
    model[0].unused.register_hook(seen.append)
    model[0].unused.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    with pipeline(model, devices=1).sync() as pipe:
        pipe(rows(8)).sum().backward()
    assert seen == [None, None]


@pytest.mark.promise("Your own program", "In `pipe(x)`, hooks of parameters run once for each backward of yours.")
@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_parameters_see_the_whole_gradient_once(workload, mode):
    """Also if a hook changes it, or runs the optimizer."""
    made = {}
    for name, model in (("ours", workload.model()), ("theirs", workload.model())):
        seen = made[name] = []
        first, second, *_ = model.parameters()
        optimizer = torch.optim.SGD([second], lr=0.5)

        def update(parameter, optimizer=optimizer, seen=seen):
            seen.append(parameter.grad.clone())
            optimizer.step()
            optimizer.zero_grad()

        handles = [
            first.register_hook(lambda grad, seen=seen: seen.append(grad.clone())),
            first.register_hook(lambda grad: grad * 2),
            second.register_post_accumulate_grad_hook(update),
        ]
        with pipeline(model, checkpoint=mode).sync() as pipe:
            call = pipe if name == "ours" else model
            for _ in range(2):
                call(workload.x).square().sum().backward()
                seen.sort(key=torch.Tensor.dim)
            for handle in handles:
                handle.remove()
            call(workload.x).square().sum().backward()
        seen += [parameter.grad for parameter in model.parameters()]
    assert len(made["ours"]) == 4 + 8
    assert_equal(made["ours"], made["theirs"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint_of_the_caller(workload, reentrant):
    """The pipeline's forward and backward run inside a node of the caller's backward."""
    bare, model, x = workload.model(), workload.model(), rows(7).requires_grad_()
    with pipeline(model, checkpoint="except_last").sync() as pipe:
        output = torch_checkpoint(lambda part: pipe(part).sin(), x, use_reentrant=reentrant)
        got = gradients(output.square().sum(), [x, *model.parameters()])
    assert_equal(got, gradients(bare(x).sin().square().sum(), [x, *bare.parameters()]))


def test_forward_and_backward_on_threads_of_the_caller(workload):
    """Each on a different thread, neither of which opened the pipeline."""
    model, made = workload.model(), []
    with pipeline(model).sync() as pipe:
        for work in (
            lambda: made.append(mse(pipe(workload.x), workload.target)),
            lambda: made.append(made.pop().backward()),
        ):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert made == [None]
    assert workload.worst(model) < 1e-10


async def test_with_a_loop_of_its_own(workload):
    model = workload.model()
    async with pipeline(model) as pipe:
        mse(pipe(workload.x), workload.target).backward()
        assert workload.worst(model) < 1e-10
        assert not pipe.eval().training


def test_a_loop_with_a_gradient_scaler(workload):
    """One batch overflows: its update is skipped, and the scale goes down."""
    model, bare = workload.model(), workload.model()
    with pipeline(model, 3, checkpoint="except_last").sync() as pipe:
        finals = []
        for call, owner in ((pipe, model), (bare, bare)):
            optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
            for number in range(6):
                factor = float("inf") if number == 2 else 1.0
                loss = mse(call(workload.x), workload.target) * factor
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(owner.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            finals.append([torch.tensor(scaler.get_scale()), *(p.detach() for p in owner.parameters())])
    assert finals[0][0] == 2048.0
    assert_equal(*finals)


# What autograd cannot have


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward(workload, mode):
    model = workload.model()
    with pipeline(model, checkpoint=mode).sync() as pipe:
        output = pipe(workload.x)
        mse(output, workload.target).backward()
        for _ in range(2):
            with pytest.raises(BackwardError, match="retain_graph=True, or call the pipeline again"):
                mse(output, workload.target).backward()
    assert workload.worst(model) < 1e-10


@pytest.mark.parametrize("mode", MODES)
def test_double_backward(workload, mode):
    model = workload.model()
    with pipeline(model, checkpoint=mode).sync() as pipe:
        loss = mse(pipe(workload.x), workload.target)
        with pytest.raises(BackwardError, match="use the bare model for double backward"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
    assert workload.worst(model) < 1e-10
