"""Trains torchvision's vision transformer on handwritten digits, in a loop of one's own.

The digits are those of scikit-learn, which come with its package: nothing is downloaded.
"""

from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.models import VisionTransformer

import asyncpipe

HELD_OUT = 360


def digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 3, 8, 8) of 0 to 1, and the digits that they show."""
    images, labels = load_digits(return_X_y=True)
    pictures = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return pictures.expand(-1, 3, -1, -1), torch.from_numpy(labels).long()


def make_model() -> Any:
    """Small, so that a CPU trains it; a large one is ``torchvision.models.vit_b_16()``."""
    torch.manual_seed(0)
    sizes = {"num_layers": 4, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    return VisionTransformer(image_size=8, patch_size=2, num_classes=10, **sizes)


def accuracy(pipe: asyncpipe.SyncPipeline, images: Tensor, labels: Tensor) -> float:
    """The share of images that are told right."""
    pipe.eval()
    right = pipe.step(images).outputs.argmax(dim=1) == labels
    pipe.train()
    return float(right.float().mean())


def main(folder: Path, epochs: int = 5, batch_size: int = 64) -> tuple[list[Any], list[float]]:
    """The loss of each step, and the accuracy on held-out digits after each epoch; weights are saved in ``folder``."""
    images, labels = digits()
    model, draws = make_model(), torch.Generator().manual_seed(0)
    # The model is no sequence: it is traced, and cut in front of its third layer.
    stages = asyncpipe.trace(model, images[:4], split=["encoder.layers.encoder_layer_2"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    losses: list[Any] = []
    accuracies = []
    loss_fn = nn.functional.cross_entropy
    with asyncpipe.Pipeline(stages, ["cpu:0", "cpu:1"], microbatches=4, loss_fn=loss_fn).sync() as pipe:
        for _ in range(epochs):
            order = torch.randperm(len(images) - HELD_OUT, generator=draws)
            for chosen in torch.split(order, batch_size):
                losses.append(pipe.step(images[chosen], labels[chosen]).loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            accuracies.append(accuracy(pipe, images[-HELD_OUT:], labels[-HELD_OUT:]))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "weights.pt")  # the names of torchvision's own
    return losses, accuracies


if __name__ == "__main__":
    print(main(Path("runs/vision"))[1])
