"""A training that keeps its own clock: script_shares.py (ddp | fsdp2 | zero3 | stages) STEPS.

Rank 1 takes longer, so that rank 0 waits for it. Each has input, evaluations and checkpoints; that
of DDP knows of no heartbeat.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from dshealthd.training import attach
from tests.training.own_clock import OwnClock, SlowLinear

Pauses = Mapping[str, tuple[int, Callable[[], object]]]
"""How often the training pauses, and what it does."""


class SlowToWrite:
    """A part of a checkpoint that takes a while to write."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Return nothing of value, some time later."""
        time.sleep(1.0)
        return dict, ()


def loader() -> torch.Tensor:
    """Return a batch, which takes a while."""
    clock.sleep("input", 0.06)
    return torch.ones(8, 8)


def net() -> torch.nn.Sequential:
    """Return the model of each rank."""
    seconds = 0.04 + 0.02 * rank
    return torch.nn.Sequential(*(SlowLinear(8, 8, clock, seconds) for _ in range(2)))


def train(step: Callable[[], object], pauses: Pauses) -> None:
    """Make the steps, with pauses in between."""
    for number in range(1, steps + 1):
        step()
        if number == 1:
            clock.restart()
        for every, stop in pauses.values():
            if number % every == 0:
                stop()


def plain(model: torch.nn.Module, *, told: bool = True) -> None:
    """Train a model of plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    heartbeat = attach(optimizer=optimizer, model=model) if told else None

    def step() -> None:
        batch = loader()
        with clock("wait"):
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def marked(part: str) -> AbstractContextManager[None]:
        return heartbeat.phase(part) if heartbeat else contextlib.nullcontext()

    def evaluate() -> None:
        with marked("evaluation"), clock("evaluation"), torch.no_grad():
            model.eval()
            for _ in range(5):
                clock.sleep("evaluation", 0.1)
                model(torch.ones(8, 8))
            model.train()

    def save() -> None:
        with marked("checkpoint"), clock("checkpoint", 1.0):
            torch.save({"step": 1}, f"{os.environ['CHECKPOINTS']}/{rank}.pt")

    train(step, {"evaluation": (20, evaluate)} | ({"checkpoint": (30, save)} if told else {}))


def ddp() -> None:
    """Train with DDP, untouched."""
    plain(torch.nn.parallel.DistributedDataParallel(net()), told=False)


def fsdp2() -> None:
    """Train with FSDP 2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    plain(model)


def zero3() -> None:
    """Train with DeepSpeed's ZeRO 3."""
    import deepspeed  # type: ignore[import-untyped] # it has no types

    # else it compiles an operator for collectives on the CPU at its first start
    deepspeed.ops.__compatible_ops__ = {}
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 1000,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3},
        },
    )
    attach(engine)

    def step() -> None:
        for _ in range(2):
            batch = loader().bfloat16()
            with clock("wait"):
                engine.backward(engine(batch).float().square().mean())
                engine.step()

    def evaluate() -> None:
        with clock("evaluation"), torch.no_grad():
            engine.eval()
            for _ in range(10):
                clock.sleep("evaluation", 0.1)
                engine(torch.ones(8, 8).bfloat16())
            engine.train()

    def save() -> None:
        with clock("checkpoint"):
            state = {"slow": SlowToWrite()}
            engine.save_checkpoint(os.environ["CHECKPOINTS"], client_state=state)

    train(step, {"evaluation": (20, evaluate), "checkpoint": (15, save)})


def stages() -> None:
    """Train a pipeline of two stages, of which the second takes longer."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(net(), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda outputs, _: outputs.square().mean())
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    heartbeat = attach(optimizer=optimizer, model=stage.submod)

    def step() -> None:
        with clock("wait"):
            if rank == 0:
                schedule.step(loader())
            else:
                schedule.step(target=torch.ones(8, 8))
        optimizer.step()
        optimizer.zero_grad()

    def save() -> None:
        with heartbeat.phase("checkpoint"), clock("checkpoint", 1.0):
            pass

    train(step, {"checkpoint": (20, save)})


how, steps = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
clock = OwnClock()
dist.init_process_group("gloo")
rank = dist.get_rank()
{"ddp": ddp, "fsdp2": fsdp2, "zero3": zero3, "stages": stages}[how]()
print(f"rank {rank} attempt 0 spent {clock.line()}", flush=True)
os._exit(0)  # what torch does at its exit is no training
