import torch
from task import batches, layers
from torch import nn

model = nn.Sequential(*layers())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, target in batches():
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss:.5f}")
