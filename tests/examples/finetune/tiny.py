"""What the scripts beside it train: a small Llama made from its config, and the README of this repository in lines."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, set_seed

README = Path(__file__).parents[3] / "README.md"
tokenizer = ByT5Tokenizer()


def make_model() -> Any:
    """Four layers that know nothing yet."""
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **tokens))


def texts() -> list[str]:
    """The lines of the README."""
    return [line for line in README.read_text().splitlines() if line]


def samples() -> list[Any]:
    """The lines as tokens, which are bytes."""
    return [tokenizer(line, truncation=True, max_length=64) for line in texts()]


def collator() -> Any:
    """What pads the samples of a batch, and makes labels of them."""
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


def batches(steps: int) -> list[Any]:
    """So many batches of 8 samples."""
    data: Any = samples()
    found = list(DataLoader(data, batch_size=8, collate_fn=collator()))
    return [found[step % len(found)] for step in range(steps)]
