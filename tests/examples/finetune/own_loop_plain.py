"""Fine-tunes a model by a loop of one's own."""

from typing import Any

import torch
from tiny import batches, make_model
from transformers import get_cosine_schedule_with_warmup


def train(model: Any, data: list[Any]) -> list[float]:
    """The loss of each step."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=len(data))
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str = "runs/own_loop", steps: int = 60) -> list[float]:
    """Train, and write the model to ``folder``."""
    model, data = make_model(), batches(steps)
    losses = train(model, data)
    model.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    print(main()[-1])
