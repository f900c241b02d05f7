"""A small training in one of the parallel modes, in which one rank is slow: `python training.py MODE`.

Torchrun starts its ranks. A layer takes `UNIT` seconds forward and twice that backward, asleep or,
with `BURN`, on the CPU. The rank in the file `FAULT` ("RANK FACTOR") takes FACTOR times as long
from the moment at which the file is there. Each rank writes its steps to `LOG`.RANK.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

MODE = sys.argv[1]
FAULT = Path(os.environ["FAULT"])
UNIT = float(os.environ["UNIT"])
BURN = os.environ.get("BURN") == "1"
WIDTH, LAYERS, ROWS = 64, 4, 8
RANK = int(os.environ["RANK"])
EVERY_STEP = 10**9
torch.set_num_threads(1)


class Fault:
    """How many times as long this rank takes; the file is looked at once in a step."""

    factor = 1.0

    @classmethod
    def look(cls) -> None:
        """Read the file."""
        cls.factor = 1.0
        with contextlib.suppress(FileNotFoundError):
            rank, factor = FAULT.read_text().split()
            cls.factor = float(factor) if int(rank) == RANK else 1.0


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
        result: torch.Tensor = Slow.apply(torch.relu(self.layer(batch)))  # type: ignore[no-untyped-call]
        return result


def network() -> torch.nn.Sequential:
    """Return the model."""
    return torch.nn.Sequential(*(Block() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 1))


def batches() -> Iterator[torch.Tensor]:
    """Yield one batch after another."""
    while True:
        Fault.look()
        time.sleep(0.003)
        yield torch.randn(ROWS, WIDTH)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return (output - target).square().mean()


def log(step: int) -> None:
    """Write that a step has ended."""
    with Path(f"{os.environ['LOG']}.{RANK}").open("a") as file:
        file.write(f"{step} {time.time():.3f}\n")


def deepspeed_config(stage: int, *, prefetch: bool = True) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a stage of ZeRO."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
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
    }


def with_engine(stage: int, *, prefetch: bool = True) -> None:
    """Train with DeepSpeed's ZeRO."""
    import deepspeed  # type: ignore[import-untyped]

    from dshealthd.training import attach

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    config = deepspeed_config(stage, prefetch=prefetch)
    engine, *_ = deepspeed.initialize(model=network(), config=config)
    attach(engine)
    for step, batch in enumerate(batches(), 1):
        engine.backward(loss_of(engine(batch), batch.sum(1, keepdim=True)))
        engine.step()
        log(step)


def with_pipeline(stages: int) -> None:
    """Train with DeepSpeed's pipelines; the ranks that are left are replicas."""
    import deepspeed
    from deepspeed.pipe import PipelineModule  # type: ignore[import-untyped]

    from dshealthd.training import attach

    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    model = PipelineModule(
        layers=list(network()), num_stages=stages, loss_fn=loss_of, partition_method="uniform"
    )
    config = {**deepspeed_config(0), "gradient_accumulation_steps": 4}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    attach(engine)
    data = ((batch, batch.sum(1, keepdim=True)) for batch in batches())
    for step in itertools.count(1):
        Fault.look()
        engine.train_batch(data_iter=data)
        log(step)


def with_torch(*, sharded: bool) -> None:
    """Train with FSDP 2, or with DistributedDataParallel."""
    from dshealthd.training import attach

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
    for step, batch in enumerate(batches(), 1):
        loss = loss_of(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        heartbeat.loss(loss)
        optimizer.step()
        log(step)


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

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            output = self.network(x)
            return {"loss": loss_of(output, labels), "logits": output}

    class Log(transformers.TrainerCallback):  # type: ignore[misc]
        """Writes each step."""

        def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_: Any) -> None:
            log(state.global_step)

    config = None
    if stage is not None:
        import deepspeed

        deepspeed.ops.__compatible_ops__ = {}
        config = {**deepspeed_config(stage), "train_micro_batch_size_per_gpu": "auto"}
        config |= {"gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True}
        del config["optimizer"]
    arguments = transformers.TrainingArguments(
        output_dir=os.environ["LOG"], per_device_train_batch_size=ROWS, max_steps=EVERY_STEP, save_strategy="no",
        report_to=[], use_cpu=True, logging_steps=EVERY_STEP, disable_tqdm=True, deepspeed=config, ddp_backend="gloo",
        optim="adamw_torch",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Model(transformers.PretrainedConfig()), args=arguments, train_dataset=Rows(), callbacks=[Log()]
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
        log(step)


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
            log(self.global_step)

    lightning.Trainer(
        accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", max_steps=EVERY_STEP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    ).fit(Model(), torch.utils.data.DataLoader(Rows(), batch_size=ROWS))  # fmt: skip


MODES = {
    "ddp": lambda: with_torch(sharded=False),
    "fsdp2": lambda: with_torch(sharded=True),
    "zero1": lambda: with_engine(1),
    "zero2": lambda: with_engine(2),
    "zero3": lambda: with_engine(3),
    "zero3-no-prefetch": lambda: with_engine(3, prefetch=False),
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
