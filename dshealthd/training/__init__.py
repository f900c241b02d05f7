"""Heartbeats that a training job sends to the node's agent. They never block and never raise.

    from dshealthd.training import attach

    attach(engine)                              # a DeepSpeed engine
    attach(optimizer=optimizer, model=model)    # plain torch; scaler=scaler with a GradScaler

    with attach(optimizer=optimizer, model=model) as heartbeat:
        …
        heartbeat.loss(loss)              # optional
        with heartbeat.phase("evaluation"):
            …

To leave the script unchanged, install the distribution `dshealthd-training` and set
`DSHEALTHD_HEARTBEAT=1` in the job's environment, or run `python -m dshealthd.training script.py`;
`dshealthd.training.watch` describes what that can see. `DSHEALTHD_HEARTBEAT=0` turns every
heartbeat off.

This package needs Python 3.9 or newer and only the standard library. It uses torch if the script
has imported it.
"""

from __future__ import annotations

from typing import Any

TYPE_CHECKING = (
    False  # typing's own costs an import in every process that starts with DSHEALTHD_HEARTBEAT
)
if TYPE_CHECKING:
    from dshealthd.training.heartbeat import Heartbeat

__all__ = ["attach"]


def attach(
    engine: Any = None,
    *,
    optimizer: Any = None,
    model: Any = None,
    scaler: Any = None,
    step: int = 0,
    report: bool = False,
) -> Heartbeat:
    """Report every step of a DeepSpeed engine or a torch optimizer to the agent until the heartbeat
    is closed.

    `model` is the outermost module whose forward pass a step calls: the DDP or FSDP wrapper, or the
    result of `torch.compile`. It adds the stage of a step and the time of its input.
    `scaler` is the `torch.amp.GradScaler` that steps the optimizer. It adds skipped steps and the
    loss scale. `step` is the number of steps before this run, for a resumed job; an engine keeps
    its own count. A process has one heartbeat: for its next training, attach again; that closes the
    heartbeat before. `report` makes rank 0 print at its exit where its time went, as
    `DSHEALTHD_REPORT=1` does.

    If something cannot be attached to, one warning is logged and training goes on without it. The
    only exception raised is TypeError, for a call that names neither engine nor optimizer, names
    both, or passes `model` with an engine.
    """
    from dshealthd.training.engine import follow as follow_engine
    from dshealthd.training.heartbeat import Heartbeat
    from dshealthd.training.model import follow as follow_model
    from dshealthd.training.optimizer import follow as follow_optimizer

    if (engine is None) == (optimizer is None) or (engine is not None and model is not None):
        raise TypeError("attach(engine) for DeepSpeed, or attach(optimizer=optimizer) for torch")
    heartbeat = Heartbeat(step=step, reports=report)
    if engine is not None:
        follow_engine(heartbeat, engine)
    else:
        follow_optimizer(heartbeat, optimizer, scaler)
        if model is not None:
            follow_model(heartbeat, model, heartbeat.installed)
    return heartbeat
