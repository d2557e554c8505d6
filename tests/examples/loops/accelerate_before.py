# accelerate launch --num_processes 2 loop.py
import torch
from accelerate import Accelerator
from task import batches, layers
from torch import nn

accelerator = Accelerator()
model = nn.Sequential(*layers())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for x, target in batches():
    loss = nn.functional.cross_entropy(model(x), target)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss:.5f}")
