"""A DDP training that keeps its own clock: script_goodput.py STEPS FAILS.

Rank 1 takes longer, so that rank 0 waits for it. In its first attempt it makes FAILS steps, of
which a checkpoint has half, then its rank 1 fails; it makes the rest in its second.
"""

import json
import os
import sys
import time
from collections import defaultdict

import torch
import torch.distributed as dist

from dshealthd.training import attach
from dshealthd.training.report import age

steps, fails = map(int, sys.argv[1:])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# torchrun's own, which still has the addresses of the attempt before
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
served = dist.TCPStore(*place, is_master=False)  # type: ignore[attr-defined] # it is public
store = dist.PrefixStore(f"attempt-{attempt}", served)  # type: ignore[attr-defined]
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
torch.set_num_threads(1)


class Slow(torch.nn.Linear):
    """A layer whose forward pass takes a while."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the outputs, some time later."""
        time.sleep(0.10 + 0.06 * rank)
        return super().forward(batch)


model = torch.nn.parallel.DistributedDataParallel(Slow(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
first = attempt * fails // 2
heartbeat = attach(optimizer=optimizer, model=model, step=first)
spent: defaultdict[str, float] = defaultdict(float)
for step in range(first + 1, steps + 1):
    began = time.monotonic()
    time.sleep(0.04)
    batch = torch.ones(8, 4)
    loaded = time.monotonic()
    loss = model(batch).mean()
    computed = time.monotonic()
    loss.backward()
    waited = time.monotonic()
    optimizer.step()
    optimizer.zero_grad()
    now = time.monotonic()
    if step == first + 1:
        spent["start"] = age()
        continue
    spent["input"] += loaded - began
    spent["work"] += computed - loaded + now - waited
    spent["wait"] += waited - computed
    if attempt == 0 and step == fails:
        print(f"rank {rank} attempt {attempt} spent {json.dumps(spent)}", flush=True)
        if rank == 1:
            os._exit(3)
        time.sleep(600)
    # Whole numbers of the agent's reads, two a second: others are right on average only.
    for phase, every, seconds in (("evaluation", 40, 1.5), ("checkpoint", 20, 1.0)):
        if step % every == 0:
            with heartbeat.phase(phase):
                time.sleep(seconds)
            spent[phase] += time.monotonic() - now
            now = time.monotonic()
print(f"rank {rank} attempt {attempt} spent {json.dumps(spent)}", flush=True)
dist.barrier()
time.sleep(2.0)  # until rank 1 has seen the barrier, too
heartbeat.close()  # which prints the report: what torch does at its exit is no training
os._exit(0)
