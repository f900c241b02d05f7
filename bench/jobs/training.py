"""A small training in one of the parallel modes, to which things happen: `python training.py MODE`.

Torchrun starts its ranks. A layer takes `UNIT` seconds forward and twice that backward, asleep or,
for the rank `BURN`, on the CPU. What happens stands in the JSON of the file `FAULT`, which each
rank reads at every step:

- `ranks` take `factor` times as long;
- `do`: `starve`, their loader gives nothing; `skip`, they leave out the collective that ends every
  step of a training with `SIDE`;
- `pause`: `checkpoint` or `evaluation`, for `seconds`, on all ranks after step `at`.

Each rank writes its steps to `LOG`.RANK. With `SITE`, not a line is ours in any mode.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MODE = sys.argv[1]
FAULT = Path(os.environ["FAULT"])
UNIT = float(os.environ["UNIT"])
RANK = int(os.environ["RANK"])
BURN = os.environ["BURN"] == str(RANK)
SIDE = os.environ["SIDE"] == "1"
SITE = os.environ["SITE"] == "1"
WIDTH, LAYERS, ROWS = 64, 4, 8
EVERY_STEP = 10**9
STARVED_LOOK = 0.2
"""Seconds between two looks at whether a starved loader gives something again."""
torch.set_num_threads(1)


class Fault:
    """What happens to this rank; the file is read once in a step."""

    factor = 1.0
    do = ""
    pause = ""
    seconds = 0.0
    at = 0

    @classmethod
    def look(cls) -> None:
        """Read the file."""
        found = json.loads(FAULT.read_text()) if FAULT.exists() else {}
        mine = RANK in found.get("ranks", ())
        cls.factor = found["factor"] if mine else 1.0
        cls.do = found["do"] if mine else ""
        if found.get("pause"):
            cls.pause, cls.seconds, cls.at = found["pause"], found["seconds"], found["at"]

    @classmethod
    def take_pause(cls, step: int) -> str:
        """Return the pause that begins after a step, at most once; empty if there is none."""
        if not cls.pause or step < cls.at:
            return ""
        pause, cls.pause = cls.pause, ""
        return pause if step == cls.at else ""


def compute(seconds: float) -> None:
    """Take as long as a layer of a large model would."""
    seconds *= Fault.factor
    if not BURN:
        time.sleep(seconds)
        return
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Slow(torch.autograd.Function):
    """The identity, which takes its time in both directions."""

    @staticmethod
    def forward(_context: Any, batch: torch.Tensor) -> torch.Tensor:
        """Take the time of a layer."""
        compute(UNIT)
        return batch.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Take twice the time of a layer."""
        compute(2 * UNIT)
        return gradient


class Block(torch.nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of a batch."""
        hidden = torch.relu(self.layer(batch))
        result: torch.Tensor = Slow.apply(hidden)  # type: ignore[no-untyped-call]
        return result


def network() -> torch.nn.Sequential:
    """Return the model."""
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 1))


def batches() -> Iterator[torch.Tensor]:
    """Yield one batch after another."""
    while True:
        Fault.look()
        while Fault.do == "starve":
            time.sleep(STARVED_LOOK)
            Fault.look()
        time.sleep(0.003)
        yield torch.randn(ROWS, WIDTH)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return (output - target).square().mean()


def stepped(
    step: int, checkpoint: Callable[[float], None], evaluation: Callable[[int], None]
) -> None:
    """Write that a step has ended, and do what comes after it.

    `checkpoint` takes so many seconds, `evaluation` so many forward passes.
    """
    if SIDE and Fault.do != "skip":
        dist.all_reduce(torch.zeros(1), group=side_group())
    with Path(f"{os.environ['LOG']}.{RANK}").open("a") as file:
        file.write(f"{step} {time.time():.3f}\n")
    match Fault.take_pause(step):
        case "checkpoint":
            checkpoint(Fault.seconds)
        case "evaluation":
            evaluation(round(Fault.seconds / (LAYERS * UNIT)))


@functools.cache
def side_group() -> Any:
    """Return a group of its own for the collective that ends a step."""
    return dist.new_group()


def save(seconds: float) -> None:
    """Write a checkpoint on rank 0, for which the others wait."""
    if RANK == 0:
        time.sleep(seconds)
    dist.barrier()


def evaluate(model: Any, passes: int) -> None:
    """Evaluate a model."""
    model.eval()
    with torch.no_grad():
        for _ in range(passes):
            model(torch.randn(ROWS, WIDTH))
    model.train()


def deepspeed_config(stage: int, *, prefetch: bool = True, offload: bool = False) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a stage of ZeRO."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    if not prefetch:
        zero |= {
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": EVERY_STEP,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


def save_engine(engine: Any, seconds: float) -> None:
    """Save an engine's checkpoint, of which rank 0 writes each file for so long."""
    writer = engine.checkpoint_engine
    write = writer.save

    def slow(*arguments: Any, **named: Any) -> Any:
        if RANK == 0:
            time.sleep(seconds)
            writer.save = write
        return write(*arguments, **named)

    writer.save = slow
    engine.save_checkpoint(f"{os.environ['LOG']}.checkpoint")
    writer.save = write


def attach(engine: Any = None, **named: Any) -> Any:
    """Attach a heartbeat, and return it; None where the script has none."""
    if SITE:
        return None
    from dshealthd.training import attach as attach_heartbeat

    return attach_heartbeat(engine, **named)


def with_engine(stage: int, *, prefetch: bool = True, offload: bool = False) -> None:
    """Train with DeepSpeed's ZeRO."""
    import deepspeed  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    config = deepspeed_config(stage, prefetch=prefetch, offload=offload)
    engine, *_ = deepspeed.initialize(model=network(), config=config)
    attach(engine)
    for step, batch in enumerate(batches(), 1):
        engine.backward(loss_of(engine(batch), batch.sum(1, keepdim=True)))
        engine.step()
        stepped(step, functools.partial(save_engine, engine), functools.partial(evaluate, engine))


def with_pipeline(stages: int) -> None:
    """Train with DeepSpeed's pipelines; the ranks that are left are replicas."""
    import deepspeed
    from deepspeed.pipe import PipelineModule  # type: ignore[import-untyped]

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    *parts, last, head = network()
    layers = [*parts, torch.nn.Sequential(last, head)]  # stages of equal work
    model = PipelineModule(
        layers=layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform"
    )
    config = {**deepspeed_config(0), "gradient_accumulation_steps": 4}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    attach(engine)
    data = ((batch, batch.sum(1, keepdim=True)) for batch in batches())

    def evaluate_pipeline(passes: int) -> None:
        for _ in range(passes // 4):  # each of as many micro-batches as a step
            engine.eval_batch(data_iter=data)

    for step in itertools.count(1):
        Fault.look()
        engine.train_batch(data_iter=data)
        stepped(step, functools.partial(save_engine, engine), evaluate_pipeline)


def with_torch(*, sharded: bool) -> None:
    """Train with FSDP 2, or with DistributedDataParallel."""
    dist.init_process_group("gloo")
    model: torch.nn.Module = network()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in model.children():
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    heartbeat = attach(optimizer=optimizer, model=model)

    def phase(name: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if heartbeat is None else heartbeat.phase(name)

    def checkpoint(seconds: float) -> None:
        with phase("checkpoint"):
            save(seconds)

    def evaluation(passes: int) -> None:
        with phase("evaluation"):
            evaluate(model, passes)

    for step, batch in enumerate(batches(), 1):
        loss = loss_of(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if heartbeat is not None:
            heartbeat.loss(loss)
        optimizer.step()
        stepped(step, checkpoint, evaluation)


class Rows(torch.utils.data.IterableDataset[Any]):
    """Batches for a trainer's own loader."""

    def __iter__(self) -> Iterator[Any]:
        """Yield rows with their labels."""
        for batch in batches():
            for row in batch:
                yield {"x": row, "labels": row.sum().view(1)}


def with_trainer(stage: int | None) -> None:
    """Train with Hugging Face's Trainer, alone or over DeepSpeed; not a line is ours."""
    import transformers

    class Model(transformers.PreTrainedModel):  # type: ignore[misc]
        """The model, as Trainer wants it."""

        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.network = network()
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            """Leave torch's."""

        def forward(
            self, x: torch.Tensor, labels: torch.Tensor | None = None
        ) -> dict[str, torch.Tensor]:
            output = self.network(x)
            if labels is None:
                return {"logits": output}
            return {"loss": loss_of(output, labels), "logits": output}

    class Log(transformers.TrainerCallback):  # type: ignore[misc]
        """Writes each step."""

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            stepped(state.global_step, save, functools.partial(evaluate, trainer.model_wrapped))

    config = None
    if stage is not None:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}
        config = {**deepspeed_config(stage), "train_micro_batch_size_per_gpu": "auto"}
        config |= {"gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True}
        del config["optimizer"]
    arguments = transformers.TrainingArguments(
        output_dir=os.environ["LOG"], per_device_train_batch_size=ROWS, max_steps=EVERY_STEP,
        save_strategy="no", report_to=[], use_cpu=True, logging_steps=EVERY_STEP,
        disable_tqdm=True, deepspeed=config, ddp_backend="gloo", optim="adamw_torch",
        accelerator_config={"dispatch_batches": False},
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Model(transformers.PretrainedConfig()), args=arguments, train_dataset=Rows(),
        callbacks=[Log()]
    )  # fmt: skip
    trainer.train()


def with_accelerate() -> None:
    """Train with Accelerate; not a line is ours."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step, batch in enumerate(batches(), 1):
        loss = loss_of(model(batch), batch.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        stepped(step, save, functools.partial(evaluate, model))


def with_lightning() -> None:
    """Train with Lightning; not a line is ours."""
    import lightning

    class Model(lightning.LightningModule):  # type: ignore[misc]
        """The model, as Lightning wants it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: Any, _number: int) -> torch.Tensor:
            return loss_of(self.network(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_end(self, *_: Any) -> None:
            stepped(self.global_step, save, functools.partial(evaluate, self.network))

    lightning.Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy="ddp", max_steps=EVERY_STEP,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    ).fit(Model(), torch.utils.data.DataLoader(Rows(), batch_size=ROWS))  # fmt: skip


MODES = {
    "ddp": lambda: with_torch(sharded=False),
    "fsdp2": lambda: with_torch(sharded=True),
    "zero1": lambda: with_engine(1),
    "zero2": lambda: with_engine(2),
    "zero3": lambda: with_engine(3),
    "zero3-no-prefetch": lambda: with_engine(3, prefetch=False),
    "zero3-offload": lambda: with_engine(3, offload=True),
    "pipeline-2x2": lambda: with_pipeline(2),
    "pipeline-4x1": lambda: with_pipeline(4),
    "trainer": lambda: with_trainer(None),
    "trainer-zero2": lambda: with_trainer(2),
    "trainer-zero3": lambda: with_trainer(3),
    "accelerate": with_accelerate,
    "lightning": with_lightning,
}

if __name__ == "__main__":
    MODES[MODE]()
