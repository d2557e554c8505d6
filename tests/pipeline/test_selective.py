"""Recomputation by choice: ``checkpoint="selective"`` keeps products, ``recompute_layers`` recomputes some layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import each_value
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import asyncpipe
from asyncpipe import Pipeline
from asyncpipe.errors import OptionError, RecomputeError, StageError, TaskError
from asyncpipe.ops.autograd.checkpoint import Recomputation
from asyncpipe.ops.autograd.selective import SelectiveRuns
from asyncpipe.ops.model.byte_recorder import LiveBytes

WIDTH, LENGTH, SAMPLES = 8, 5, 8


class Block(nn.Module):
    """Attention and an MLP, with dropout; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.3)


def model(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = SAMPLES, LENGTH, WIDTH
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def trained(blocks: nn.Sequential, steps: int = 2, devices: Any = ("cpu:0", "cpu:1"), **options: Any) -> list[Tensor]:
    """The losses and weights of some steps."""
    x, y = batch()
    options = {"microbatches": 4, "schedule": "1f1b", **options}
    with Pipeline(
        blocks,
        list(devices),
        loss_fn=nn.functional.mse_loss,
        generator=torch.Generator().manual_seed(2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    ).sync() as pipe:
        losses = [pipe.step(x, y).loss for _ in range(steps)]
        return [*losses, *(value.clone() for value in pipe.state_dict().values())]


WAYS = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "zb-h1"},
    {"schedule": "interleaved", "balance": [1, 1, 1, 1]},
    {"schedule": "1f1b", "workers": "processes"},
    {"schedule": "1f1b", "devices": [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]], "microbatches": 2},
]


@each_value(
    ("way", WAYS),
    ("choice", [{"checkpoint": "selective"}, {"checkpoint": "never", "recompute_layers": [0, "3"]}]),
)
def test_bits_are_those_of_a_pipeline_that_keeps_everything(choice: dict[str, Any], way: dict[str, Any]) -> None:
    expected = trained(model(), checkpoint="never", **way)
    assert all(map(torch.equal, trained(model(), **choice, **way), expected))


@pytest.mark.parametrize("checkpoint", ["selective", "never"])
def test_a_call_has_the_same_gradients_in_each_backward(checkpoint: str) -> None:
    x, y = batch()
    blocks = model()
    options: dict[str, Any] = {"recompute_layers": ["1"]} if checkpoint == "never" else {}
    with Pipeline(blocks, ["cpu:0", "cpu:1"], microbatches=4, checkpoint=checkpoint, **options).sync() as pipe:
        loss = nn.functional.mse_loss(pipe(x), y)
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in blocks.parameters()]
        loss.backward()
        for parameter, grad in zip(blocks.parameters(), first, strict=True):
            assert torch.equal(parameter.grad, 2 * grad)


class Products(TorchDispatchMode):
    """Counts the products that are computed inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_the_second_run_computes_no_product_and_the_first_keeps_less_than_a_graph() -> None:
    weight = torch.randn(64, 64)
    x = torch.randn(32, 64, requires_grad=True)

    def layers(tensors: Any) -> list[Tensor]:
        y = tensors[0]
        for _ in range(3):
            y = (y.tanh().exp().sigmoid() @ weight).sin()
        return [y]

    held = {}
    for selective in (True, False):
        runs = SelectiveRuns()

        def run(tensors: Any, runs: SelectiveRuns = runs, selective: bool = selective) -> list[Tensor]:
            if not selective:
                return layers(tensors)
            with runs.run():
                return layers(tensors)

        with Products() as products, LiveBytes([x]) as live:
            recomputation = Recomputation(run, [x])
            recomputation.forward()
            held[selective] = live.live
            recomputation.run()
            held[selective, "graph"] = live.live
        assert products.count == (3 if selective else 6)
    assert held[False] == 0, "inputs alone"
    assert held[True] == 3 * x.nbytes, "the products"
    assert held[True] < held[True, "graph"]


def test_a_layer_is_called_once_more_where_it_is_named_and_others_are_not() -> None:
    blocks = model()
    trained(blocks, steps=1, checkpoint="never", recompute_layers=[1, "[2-3]"])
    assert [block.calls for block in blocks] == [4, 8, 8, 8]
    assert all("forward" not in vars(block) for block in blocks)


@each_value(
    ("name", ["LlamaForCausalLM", "GPT2LMHeadModel"]),
    ("choice", [{"checkpoint": "selective"}, {"checkpoint": "never", "recompute_layers": [0, 2]}]),
)
def test_models_of_transformers_choose_as_well(name: str, choice: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from tests.support.transformers_models import make_batch, make_model

    grads = []
    for options in (choice, {"checkpoint": "never"}):
        torch.manual_seed(3)
        language_model, inputs = make_model(name), make_batch(name)
        pipeline = asyncpipe.from_transformers(
            *(language_model, inputs), devices=["cpu:0", "cpu:1"], microbatches=2, **options
        )
        with pipeline.sync() as pipe:
            pipe.step(inputs)
        grads.append([parameter.grad for parameter in language_model.parameters()])
    assert all(map(torch.equal, *grads))


class LastState(nn.Module):
    """A cell of a recurrent network, which overwrites its gates, and torch does not see it."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x.flatten(0, 1))
        return (state[0] if isinstance(state, tuple) else state).view_as(x)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
        [LastState(nn.GRUCell), nn.Tanh()],
        [LastState(nn.LSTMCell), nn.Tanh()],
    ],
    ids=["product", "gru", "lstm"],
)
def test_what_is_kept_must_not_be_overwritten(layers: list[nn.Module]) -> None:
    stages = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(TaskError) as caught:
        trained(stages, checkpoint="selective", balance=[1, 3])
    assert isinstance(caught.value.__cause__, RecomputeError)
    assert "checkpoint='always'" in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit.[a-z_]*` is (deprecated|not supported)")
@pytest.mark.parametrize("scripted", [False, True], ids=["plain", "TorchScript, whose message torch loses"])
def test_an_error_of_the_stage_itself_is_not_taken_for_another(scripted: bool) -> None:
    layer: Any = nn.Linear(WIDTH + 1, WIDTH).double()
    stages = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), torch.jit.script(layer) if scripted else layer)
    with pytest.raises(TaskError) as caught:
        trained(stages, checkpoint="selective", balance=[1, 1])
    assert isinstance(caught.value.__cause__, RecomputeError) == scripted
    assert ("that checkpoint='never' shows" if scripted else "cannot be multiplied") in str(caught.value)


def test_a_layer_that_changes_buffers_is_refused() -> None:
    layers = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(WIDTH * LENGTH), nn.Unflatten(1, (LENGTH, WIDTH))).double()
    with pytest.raises(TaskError, match="BatchNorm1d changes its buffer 'num_batches_tracked'") as caught:
        trained(layers, checkpoint="never", recompute_layers=["1"], balance=[2, 1])
    assert isinstance(caught.value.__cause__, StageError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint": "selective", "compile": True}, "compiled stages do not have"),
        ({"checkpoint": "selective", "offload": 0.5}, "leave offload and compile out"),
        ({"recompute_layers": [0]}, "give checkpoint='never' with it"),
        ({"recompute_layers": [4], "checkpoint": "never"}, "has 4 layers, from 0, got 4"),
        ({"recompute_layers": ["up"], "checkpoint": "never"}, "no module 'up'"),
    ],
    ids=["compiled", "offloaded", "always", "number", "name"],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Pipeline(model(), ["cpu:0", "cpu:1"], microbatches=2, **options)
