"""``PipelineSFTTrainer`` logs what TRL's trainer logs: losses, norms, entropies, accuracies and tokens."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncpipe.errors import OptionError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from asyncpipe.integrations.trl import PipelineSFTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = "some words of no sense that a tiny model can learn by heart in a few steps".split()
PIPELINE = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}


def make_trainer(kind: Any, folder: Path, model: Any, **given: Any) -> Any:
    rows = [{"text": " ".join(WORDS[i % 7 : i % 7 + 2 + i % 5])} for i in range(32)]
    data = datasets.Dataset.from_list(rows)
    own = {name: given.pop(name) for name in list(given) if name in ("pipeline", "compute_loss_func")}
    options = {"max_steps": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    logs = {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    config = trl.SFTConfig(
        *(str(folder),), **{**logs, **options, "max_length": 48, "eval_strategy": "steps", "eval_steps": 2, **given}
    )
    tokenizer = transformers.ByT5Tokenizer()
    given = {"train_dataset": data, "eval_dataset": data.select(range(6)), "processing_class": tokenizer, **own}
    return kind(model, config, **given)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 384, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **tokens, max_position_embeddings=64))


@pytest.mark.promise(
    "Right results", "The trainers log the losses, norms, rates and evaluations of the trainers without a pipeline."
)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3}, {"packing": True, "gradient_accumulation_steps": 2}],
    ids=["padding", "accumulation", "packing"],
)
def test_the_logs_are_those_of_the_trainer(options: dict[str, Any], model: Any, tmp_path: Path) -> None:
    plain = make_trainer(trl.SFTTrainer, tmp_path / "plain", deepcopy(model), **options)
    piped = make_trainer(PipelineSFTTrainer, tmp_path / "piped", model, pipeline=PIPELINE, **options)
    plain.train()
    piped.train()
    piped.close()
    found, wanted = piped.state.log_history, plain.state.log_history
    assert [each.keys() for each in found] == [each.keys() for each in wanted]
    # Entropy and accuracy are of all tokens of an update, and not the mean over its mini-batches.
    once = options.get("gradient_accumulation_steps", 1) == 1
    exact = {"loss", "eval_loss", "learning_rate", "num_tokens", "eval_num_tokens", "epoch", "step"}
    exact |= {"entropy", "mean_token_accuracy"} if once else set()
    for mine, theirs in zip(found, wanted, strict=True):
        for name in exact & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), (name, mine["step"])
        assert mine.get("grad_norm", 0.0) == pytest.approx(theirs.get("grad_norm", 0.0), rel=1e-3)
        for name in ("entropy", "mean_token_accuracy", "eval_entropy", "eval_mean_token_accuracy"):
            assert mine.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), abs=0.2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss_type": "dft"}, "loss_type='dft'"),
        ({"compute_loss_func": lambda *_, **__: None}, "compute_loss_func gets the whole batch"),
    ],
    ids=["dft", "loss function"],
)
def test_what_a_pipeline_would_do_otherwise_is_refused(options: Any, says: str, model: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=says):
        make_trainer(PipelineSFTTrainer, tmp_path, model, pipeline=PIPELINE, **options)
