"""Heartbeats of a training, told to the agent of the node, which never wait and never fail.

    from dshealthd.training import attach

    attach(engine)                              # a DeepSpeed engine
    attach(optimizer=optimizer, model=model)    # plain torch; scaler=scaler with a GradScaler

    with attach(optimizer=optimizer, model=model) as heartbeat:
        …
        heartbeat.loss(loss)              # optional
        with heartbeat.phase("evaluation"):
            …

Without a change to the script: `DSHEALTHD_HEARTBEAT=1` in its environment where the distribution
`dshealthd-training` is installed, or `python -m dshealthd.training script.py`; see
`dshealthd.training.watch` for what that can see. `DSHEALTHD_HEARTBEAT=0` turns every heartbeat off,
`DSHEALTHD_HEARTBEAT_SOCKET` says where the agent listens.

This package needs Python 3.9 and nothing but the standard library; torch is used where the training
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
    socket: str | None = None,
) -> Heartbeat:
    """Report every step of a DeepSpeed engine, or of a torch optimizer, to the agent, until the
    heartbeat is closed.

    `model` is the outermost module whose forward pass a step calls (the DDP or FSDP wrapper, what
    `torch.compile` returned): with it, the stage of a step is reported, and how long input and
    forward pass take. `scaler` is the `torch.amp.GradScaler` that steps the optimizer: with it,
    skipped steps and the loss scale are reported. `step` is how many steps were made before, of an
    optimizer (a resumed training); an engine knows. `socket` is where the agent listens.

    What cannot be attached to is said once, by `logging`, and training goes on without: nothing is
    raised but TypeError for a call that names neither engine nor optimizer, or both.
    """
    from dshealthd.training import attachment
    from dshealthd.training.heartbeat import Heartbeat

    if (engine is None) == (optimizer is None) or (engine is not None and model is not None):
        message = "attach(engine) for DeepSpeed, or attach(optimizer=optimizer) for torch"
        raise TypeError(message)
    heartbeat = Heartbeat(step=step, socket=socket)
    if engine is not None:
        attachment.follow_engine(heartbeat, engine)
    else:
        attachment.follow_optimizer(heartbeat, optimizer, scaler)
        if model is not None:
            attachment.follow_model(heartbeat, model)
    return heartbeat
