# deepspeed --num_gpus 2 loop.py
import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from task import batches, layers
from torch import nn

deepspeed.init_distributed()
model = PipelineModule(layers(), num_stages=2, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
pieces = ((x, target) for batch in batches() for x, target in zip(*(each.split(4) for each in batch), strict=True))
for _ in range(4):
    loss = engine.train_batch(pieces)
    print(f"loss {loss:.5f}")
