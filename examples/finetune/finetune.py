"""Fine-tunes a small Llama as a pipeline: transformers' tokenizer, collator and scheduler, clipping and evaluation."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM
from transformers import get_cosine_schedule_with_warmup as cosine

from asyncpipe import from_transformers


async def main(text: str, folder: Path, epochs: int = 2) -> list[Any]:
    """The held-out loss after each epoch; the model is written to ``folder``."""
    tokenizer = ByT5Tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    samples: Any = [tokenizer(line, truncation=True, max_length=64) for line in text.splitlines() if line]
    options = {"batch_size": 8, "collate_fn": DataCollatorForLanguageModeling(tokenizer, mlm=False)}
    train, held_out = DataLoader(samples[8:], shuffle=True, **options), DataLoader(samples[:8], **options)
    pipe = from_transformers(model, next(iter(held_out)), devices=["cpu:0", "cpu:1"], microbatches=4)
    losses, optimizer = [], torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    scheduler = cosine(optimizer, num_warmup_steps=5, num_training_steps=epochs * len(train))
    async with pipe:
        for _ in range(epochs):
            for batch in train:
                await pipe.train().step(batch)
                torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            losses += [(await pipe.eval().step(batch)).loss for batch in held_out]
    pipe.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    print(asyncio.run(main(Path("README.md").read_text(), Path("runs/finetune"))))
