# torchrun --nproc-per-node 2 loop.py
import torch
from task import batches, layers
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

distributed.init_process_group("gloo")
rank = distributed.get_rank()
own = nn.Sequential(*(layers()[:3] if rank == 0 else layers()[3:]))
stage = PipelineStage(own, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.cross_entropy)
optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
for x, target in batches():
    if rank == 0:
        schedule.step(x)
    else:
        losses = []
        schedule.step(target=target, losses=losses)
        print(f"loss {torch.stack(losses).mean():.5f}")
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
