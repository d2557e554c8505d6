"""A program for torchgpipe runs here after changing only its imports."""

from __future__ import annotations

# After torchgpipe's README and user guide; devices are given, since there may be no GPU.
TORCHGPIPE = """
import torch
from torch import nn, optim
import torch.nn.functional as F

from torchgpipe import GPipe
from torchgpipe.balance import balance_by_size
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables


@skippable(stash=["1to3"])
class Layer1(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width))

    def forward(self, input):
        yield stash("1to3", input)
        return super().forward(input)


@skippable(pop=["1to3"])
class Layer3(nn.Module):
    def forward(self, input):
        skip = yield pop("1to3")
        return F.relu(input) + skip


def block(width):
    namespace = Namespace()
    return [Layer1(width).isolate(namespace), nn.BatchNorm1d(width), Layer3().isolate(namespace)]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), *block(16), *block(16), nn.Linear(16, 4))
verify_skippables(model)
partitions = 3
balance = balance_by_size(partitions, model, torch.empty(32, 8).normal_(), chunks=4, param_scale=4.0, device="cpu")
model = GPipe(model, balance, devices=["cpu"] * partitions, chunks=4, checkpoint="always", deferred_batch_norm=True)
in_device, out_device = model.devices[0], model.devices[-1]
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []
inputs, targets = torch.randn(32, 8), torch.randint(4, (32,))
for _ in range(30):
    optimizer.zero_grad()
    output = model(inputs.to(in_device, non_blocking=True))
    loss = F.cross_entropy(output, targets.to(out_device, non_blocking=True))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    evaluated = F.cross_entropy(model(inputs.to(in_device)), targets.to(out_device)).item()
"""


def run(program, ancestor, ours):
    assert f"from {ancestor} import" in program
    names = {}
    exec(compile(program.replace(f"from {ancestor}", f"from {ours}"), ancestor, "exec"), names)
    return names


def test_a_program_for_torchgpipe():
    names = run(TORCHGPIPE, "torchgpipe", "asyncpipe.compat.torchgpipe")
    assert sum(names["balance"]) == len(names["model"]) == 8
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert abs(names["evaluated"] - names["losses"][-1]) < 1
    assert names["model"][2].num_batches_tracked == 30
