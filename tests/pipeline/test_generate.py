"""``pipe.generate``: the tokens of the unsplit model, whatever the cut, the search and the padding."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from samples import each_value
from torch import nn

import asyncpipe
from asyncpipe.errors import OptionError, TaskError

transformers = pytest.importorskip("transformers")

from transformers_models import make_model  # noqa: E402

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "without a cache": {"do_sample": False, "use_cache": False},
}
GEMMA = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}


def prompts(name: str) -> dict[str, torch.Tensor]:
    """Five prompts of different lengths, padded at the left; an encoder's at the right."""
    draws = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 48, (5, 6), generator=draws)
    mask = (torch.arange(6) >= torch.tensor([0, 2, 4, 1, 3])[:, None]).long()
    mask = mask.flip(1) if name.startswith("T5") else mask
    return {"input_ids": ids * mask, "attention_mask": mask}


def opened(name: str, balance: list[int], microbatches: int = 3, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make_model(name, **options)
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.dim() > 1 else 1)  # So that tokens depend on all that attention has seen.
    # So that some requests end early: by tokens that they would have in the middle.
    free = model.eval().generate(**prompts(name), max_new_tokens=9, do_sample=False, eos_token_id=None)
    model.train().generation_config.update(eos_token_id=[int(free[0, -6]), int(free[3, -3])], pad_token_id=0)
    devices = [f"cpu:{k}" for k in range(len(balance))]
    batch = prompts(name) | {"labels": prompts(name)["input_ids"]}
    return model, asyncpipe.from_transformers(model, batch, devices=devices, microbatches=microbatches, balance=balance)


@pytest.mark.promise("Right results", "`pipe.generate` returns the tokens of the unsplit model.")
@each_value(
    ("search", [*SEARCHES]),
    (
        "name, balance, options",
        [
            ("GPT2LMHeadModel", [1, 2], {}),
            ("LlamaForCausalLM", [1, 3, 1], {}),
            ("Qwen2ForCausalLM", [1, 1, 1], {}),
            ("Gemma2ForCausalLM", [2, 1], GEMMA),
            ("T5ForConditionalGeneration", [2, 3, 1, 1], {}),
            ("T5ForConditionalGeneration", [4, 3], {}),
            ("Gemma2ForCausalLM", [2, 1], GEMMA),
        ],
    ),
)
def test_tokens_are_those_of_the_unsplit_model(name: str, balance: list[int], options: Any, search: str) -> None:
    """A search with beams goes on until all of its batch are over, so there it is the model's of each micro-batch."""
    model, pipe = opened(name, balance, **options)
    asked = {"max_new_tokens": 9, **SEARCHES[search]}
    sizes = [2, 2, 1] if search == "beams" else [5]
    ids, masks = (each.split(sizes) for each in prompts(name).values())
    pieces = [{"input_ids": i, "attention_mask": mask} for i, mask in zip(ids, masks, strict=True)]
    made = [model.eval().generate(**piece, **asked) for piece in pieces]
    longest = max(tokens.shape[1] for tokens in made)
    expected = torch.cat([nn.functional.pad(tokens, (0, longest - tokens.shape[1])) for tokens in made])
    model.train()
    with pipe.sync() as open_pipe:
        assert torch.equal(open_pipe.generate(prompts(name), **asked), expected)
        assert all(module.training for module in model.modules())


def test_requests_end_at_different_lengths() -> None:
    model, pipe = opened("LlamaForCausalLM", [1, 2], microbatches=5)
    expected = model.eval().generate(**prompts("Llama"), max_new_tokens=9, do_sample=False)
    ends = {int((row != 0).nonzero().max()) for row in expected}
    assert len(ends) > 1
    with pipe.sync() as open_pipe:
        found = open_pipe.generate(transformers.BatchEncoding(prompts("Llama")), max_new_tokens=9, do_sample=False)
    assert torch.equal(found, expected)


@pytest.mark.promise("Right results", "`pipe.generate` returns the tokens of the unsplit model.")
def test_sampling_draws_from_the_default_generator() -> None:
    """One micro-batch has the draws of the model itself; several have the same every time."""
    model, alone = opened("GPT2LMHeadModel", [1, 2], microbatches=1)
    asked = {"max_new_tokens": 6, "do_sample": True, "top_k": 20}
    torch.manual_seed(7)
    expected = model.eval().generate(**prompts("GPT2"), **asked)
    torch.manual_seed(7)
    with alone.sync() as pipe:
        assert torch.equal(pipe.generate(prompts("GPT2"), **asked), expected)
    _, several = opened("GPT2LMHeadModel", [1, 2])
    found = []
    with several.sync() as pipe:
        for _ in range(2):
            torch.manual_seed(7)
            found.append(pipe.generate(prompts("GPT2"), **asked))
    assert torch.equal(*found)


@pytest.mark.promise(
    "A step that fails",
    "`pipe.generate` leaves mode and gradients as they were, and an error of a stage leaves no thread behind.",
)
async def test_training_goes_on_behind_it_and_the_loop_stays_free() -> None:
    model, pipe = opened("LlamaForCausalLM", [1, 2])
    batch = prompts("Llama") | {"labels": prompts("Llama")["input_ids"]}
    threads = threading.active_count()
    expected = model.eval().generate(**prompts("Llama"), max_new_tokens=6, do_sample=False)
    model.train()
    async with pipe:
        before = (await pipe.step(batch)).loss
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        found, turns = asyncio.ensure_future(pipe.generate(prompts("Llama"), max_new_tokens=6, do_sample=False)), 0
        while not found.done():
            await asyncio.sleep(0)
            turns += 1
        assert torch.equal(await found, expected)
        assert turns > 1
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        assert torch.equal((await pipe.step(batch)).loss, before)
        late = asyncio.ensure_future(pipe.generate(prompts("Llama"), max_new_tokens=10_000, eos_token_id=None))
        await asyncio.sleep(0)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert model.training
        assert not [thread for thread in threading.enumerate() if thread.name == "asyncpipe generate"]
    assert threading.active_count() <= threads + 1  # asyncio's own, for blocking calls


@pytest.mark.promise(
    "A step that fails",
    "`pipe.generate` leaves mode and gradients as they were, and an error of a stage leaves no thread behind.",
)
def test_an_error_of_a_stage_ends_all_loops() -> None:
    model, pipe = opened("LlamaForCausalLM", [1, 2])
    seen: list[int] = []

    def fail(*_: Any) -> None:
        seen.append(1)
        if len(seen) > 4:
            raise ValueError("no more")

    model.model.layers[1].register_forward_hook(fail)
    with pipe.sync() as open_pipe:
        with pytest.raises(TaskError):
            open_pipe.generate(prompts("Llama"), max_new_tokens=9)
        assert model.training
        assert not [thread for thread in threading.enumerate() if thread.name == "asyncpipe generate"]


@pytest.mark.parametrize(
    ("model_options", "asked", "says"),
    [
        ({"compile": True}, {}, "must not be compiled"),
        ({}, {"return_dict_in_generate": True}, "leave return_dict_in_generate out"),
        ({}, {"cache_implementation": "static"}, "dynamic ones"),
    ],
)
def test_what_would_not_be_right_is_refused(model_options: Any, asked: Any, says: str) -> None:
    model = make_model("LlamaForCausalLM")
    pipe = asyncpipe.from_transformers(
        *(model, prompts("Llama")), devices=["cpu:0", "cpu:1"], microbatches=2, **model_options
    )
    with pipe.sync() as open_pipe, pytest.raises(OptionError, match=says):
        open_pipe.generate(prompts("Llama"), **asked)


def test_in_workers_it_is_refused_with_what_to_do() -> None:
    model = make_model("GPT2LMHeadModel")
    pipe = asyncpipe.from_transformers(
        *(model, prompts("GPT2")), devices=["cpu:0", "cpu:1"], microbatches=2, workers="processes"
    )
    with pytest.raises(OptionError, match="save_pretrained"):
        pipe.sync().generate(prompts("GPT2"))
