"""The trainers over a pipeline log what they log without one, and leave what they leave."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncpipe.errors import OptionError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from thread_helpers import threads_of_asyncpipe  # noqa: E402
from transformers_models import VOCABULARY, make_model  # noqa: E402

from asyncpipe.integrations.transformers import PipelineTrainer, PipelineTraining  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

DEVICES = {"devices": ["cpu:0", "cpu:1"], "microbatches": 4}
EVERY_STEP = {"logging_steps": 1, "logging_strategy": "steps", "report_to": [], "disable_tqdm": True, "use_cpu": True}


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    """Of 4 to 11 tokens, in one of three classes."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (40,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist(), "class": n % 3} for n in lengths
    ]


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def classes(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {**padded(rows), "labels": torch.tensor([row["class"] for row in rows])}


def with_adapters(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class Events(transformers.TrainerCallback):  # type: ignore[misc]
    """The names of all that callbacks are told, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.seen.append(name)
        return super().__getattribute__(name)


def trainer(kind: Any, model: nn.Module, folder: Path, data: Any, **given: Any) -> Any:
    options = {"max_steps": 12, "learning_rate": 3e-3, "per_device_train_batch_size": 4, "save_strategy": "no"}
    own = {name: given.pop(name) for name in list(given) if name in ("pipeline", "compute_metrics", "callbacks")}
    collate = given.pop("data_collator", padded)
    args = transformers.TrainingArguments(
        str(folder), **{**EVERY_STEP, "remove_unused_columns": False, **options, **given}
    )
    return kind(model, args, data_collator=collate, train_dataset=data, eval_dataset=data[:10], **own)


def figures(history: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What was logged, without what clocks say."""
    return [
        {name: value for name, value in each.items() if "runtime" not in name and "per_second" not in name}
        for each in history
    ]


def compare(found: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """Raise unless two trainers have logged the same and have the same weights, within ``tolerance``."""
    one, other = figures(found.state.log_history), figures(plain.state.log_history)
    assert [each.keys() for each in one] == [each.keys() for each in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=tolerance)
    for (name, value), wanted in zip(found.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.promise(
    "Right results", "The trainers log the losses, norms, rates and evaluations of the trainers without a pipeline."
)
@pytest.mark.parametrize(
    ("name", "wrap", "options"),
    [
        ("LlamaForCausalLM", None, {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3}),
        ("GPT2LMHeadModel", None, {"max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 8}),
        ("LlamaForCausalLM", None, {"label_smoothing_factor": 0.1, "eval_strategy": "steps", "eval_steps": 11}),
        ("LlamaForCausalLM", with_adapters, {"gradient_checkpointing": True, "weight_decay": 0.1}),
    ],
    ids=["accumulation", "evaluation", "smoothing", "adapters"],
)
def test_the_curves_are_those_of_the_trainer(
    name: str, wrap: Any, options: dict[str, Any], samples: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = make_model(name).float()
    model = model if wrap is None else wrap(model)
    events = Events(), Events()
    metrics = {"compute_metrics": accuracy} if "eval_steps" in options and "GPT2" in name else {}
    given = [{**options, **metrics, "callbacks": [each]} for each in events]
    plain = trainer(transformers.Trainer, deepcopy(model), tmp_path / "plain", samples, **given[0])
    piped = trainer(PipelineTrainer, model, tmp_path / "piped", samples, pipeline=DEVICES, **given[1])
    plain.train()
    piped.train()
    compare(piped, plain)
    assert events[0].seen == events[1].seen
    assert len(piped.pipe.stages) == 2
    piped.close()
    assert not threads_of_asyncpipe()


def test_accumulated_classes_count_alike(samples: Any, tmp_path: Path) -> None:
    """transformers adds up the means of accumulated mini-batches where a model's loss knows no number of items."""
    torch.manual_seed(0)
    model = make_model("LlamaForSequenceClassification").float()
    plain = trainer(
        *(transformers.Trainer, deepcopy(model), tmp_path / "plain", samples),
        max_steps=3,
        data_collator=classes,
        per_device_train_batch_size=12,
    )
    piped = trainer(
        *(PipelineTrainer, model, tmp_path / "piped", samples),
        max_steps=3,
        data_collator=classes,
        gradient_accumulation_steps=3,
        pipeline=DEVICES,
    )
    plain.train()
    piped.train()
    piped.close()
    for mine, theirs in zip(piped.state.log_history[:3], plain.state.log_history[:3], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.promise(
    "Killed and resumed",
    "A run of `PipelineTrainer` that is interrupted and resumed is bit-identical to an undisturbed one.",
)
def test_a_run_that_resumes_is_the_undisturbed_one(samples: Any, tmp_path: Path) -> None:
    """With dropout, and a learning rate that falls; the snapshots are transformers' own."""

    def run(folder: Path, **how: Any) -> Any:
        torch.manual_seed(0)
        model = make_model("GPT2LMHeadModel", resid_pdrop=0.2).float()
        saving = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
        made = trainer(PipelineTrainer, model, folder, samples, pipeline=DEVICES, **saving)
        made.train(**how)
        made.close()
        return made

    whole = run(tmp_path / "whole")
    again = run(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    wanted = figures(whole.state.log_history)
    assert len(wanted) == 13
    assert figures(again.state.log_history)[:12] == wanted[:12]
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "again" / "checkpoint-12")
    for one, other in zip(loaded.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_dispatched_model_needs_no_options(samples: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model: Any = make_model("LlamaForCausalLM").float()
    reference = trainer(transformers.Trainer, deepcopy(model), tmp_path / "plain", samples, max_steps=3)
    reference.train()
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    last = ("model.layers.2", "model.norm", "lm_head")
    model.hf_device_map = {"": "cpu:0"} | dict.fromkeys(last, "cpu:1")
    piped = trainer(PipelineTrainer, model, tmp_path / "piped", samples, max_steps=3)
    piped.train()
    compare(piped, reference)
    assert [stage.device.name for stage in piped.pipe.stages] == ["cpu:0", "cpu:1"]
    assert piped.pipe.microbatches == 4
    unlabelled = [{"input_ids": sample["input_ids"]} for sample in samples[:6]]
    for each in (piped, reference):
        each.data_collator = lambda rows: {name: value for name, value in padded(rows).items() if name != "labels"}
    found, wanted = (each.predict(unlabelled).predictions for each in (piped, reference))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-4)
    piped.close()


def test_autocast_is_entered_in_tasks(samples: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make_model("LlamaForCausalLM").float()
    losses = []
    for name, kind, options in (
        ("plain", transformers.Trainer, {"bf16": True}),
        ("piped", PipelineTrainer, {"bf16": True, "pipeline": DEVICES}),
        ("whole", transformers.Trainer, {}),
    ):
        made = trainer(kind, deepcopy(model), tmp_path / name, samples, max_steps=1, **options)
        made.train()
        losses.append(made.state.log_history[0]["loss"])
        # An image of the model that has its forward would compute all of it.
        assert ("forward" in vars(made.model)) == (name == "plain")
    plain, piped, whole = losses
    assert piped == pytest.approx(plain, abs=1e-3)
    assert abs(piped - whole) > 1e-6


class OwnLoss(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not called")


class OwnLossPiped(PipelineTraining, OwnLoss):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "pipeline", "says"),
    [
        (OwnLossPiped, {}, {}, "OwnLoss computes a loss of its own"),
        (PipelineTrainer, {"bf16_full_eval": True}, {}, "load it in that type"),
        (PipelineTrainer, {"torch_compile": True}, {}, "'compile': True"),
        (PipelineTrainer, {}, {"optimizer": torch.optim.SGD}, "the optimizer is the trainer's"),
        (PipelineTrainer, {}, {"workers": "processes"}, "leave workers= out"),
    ],
    ids=["own loss", "bf16_full_eval", "torch_compile", "optimizer", "workers"],
)
def test_what_a_pipeline_would_do_otherwise_is_refused(
    kind: Any, options: Any, pipeline: Any, says: str, samples: Any, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=says):
        trainer(kind, make_model("LlamaForCausalLM"), tmp_path, samples, pipeline={**DEVICES, **pipeline}, **options)
