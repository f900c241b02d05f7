"""A loop as Lightning has it: script_loaders.py STEPS.

It keeps its own clock. The optimizer calls a closure for both passes; batches come from the workers
of a loader, slower than they are used; a sanity check precedes the training, a validation follows
each epoch of 30 batches, and a thread writes a copy of the weights every 25 steps.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dshealthd.training import attach
from tests.training.own_clock import OwnClock, SlowLinear


class Samples(Dataset[torch.Tensor]):
    """Samples that take a while to read."""

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.full((8,), float(index % 7))


def fit(steps: int) -> None:  # noqa: PLR0915 - one story
    """Train."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    clock = OwnClock()
    model: torch.nn.Module = DistributedDataParallel(
        torch.nn.Sequential(
            SlowLinear(8, 8, clock, 0.03 + 0.015 * rank), SlowLinear(8, 1, clock, 0.02)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = Samples(0.14, 120 * size)
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=DistributedSampler(data, shuffle=True),
        num_workers=2,
        persistent_workers=True,
    )
    validation = DataLoader(Samples(0.01, 24), batch_size=4)
    writer = ThreadPoolExecutor(max_workers=1)

    def validate(batches: int) -> None:
        with clock("evaluation"), torch.no_grad():
            model.eval()
            for index, batch in enumerate(validation):
                if index == batches:
                    break
                clock.sleep("evaluation", 0.2)
                model(batch)
            mean = torch.zeros(1)
            dist.all_reduce(mean)
            model.train()

    def write(state: dict[str, torch.Tensor]) -> None:
        time.sleep(1.5)
        torch.save(state, f"{os.environ['CHECKPOINTS']}/weights-{rank}.pt")

    heartbeat = attach(optimizer=optimizer, model=model)
    validate(2)
    step = 0
    while step < steps:
        batches = iter(loader)
        while step < steps:
            with clock("input"):
                batch = next(batches, None)
            if batch is None:
                validate(6)
                break

            def closure(batch: torch.Tensor = batch) -> torch.Tensor:
                loss: torch.Tensor = model(batch).square().mean()
                optimizer.zero_grad()
                with clock("wait"):
                    loss.backward()  # type: ignore[no-untyped-call] # as torch has it
                return loss

            optimizer.step(closure)
            step += 1
            if step == 1:
                clock.restart()
            if step % 25 == 0:
                with heartbeat.phase("checkpoint"), clock("checkpoint"):
                    time.sleep(0.5)  # it copies to the host
                    writer.submit(write, {k: v.clone() for k, v in model.state_dict().items()})
    print(f"rank {rank} attempt 0 spent {clock.line()}", flush=True)
    writer.shutdown()
    os._exit(0)  # what torch does at its exit is no training


if __name__ == "__main__":
    fit(int(sys.argv[1]))
