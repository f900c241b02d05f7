"""Attachment of heartbeats to what makes a job's steps: engines, optimizers and models."""

from __future__ import annotations

from typing import Any

from dshealthd.training import engine as engines
from dshealthd.training import model as models
from dshealthd.training import optimizer as optimizers
from dshealthd.training.heartbeat import Heartbeat, never_raise


@never_raise
def follow_engine(heartbeat: Heartbeat, engine: Any) -> None:
    """Attach a heartbeat to the steps of a DeepSpeed engine."""
    engines.follow(heartbeat, engine)


@never_raise
def follow_optimizer(heartbeat: Heartbeat, optimizer: Any, scaler: Any = None) -> None:
    """Attach a heartbeat to the steps of a torch optimizer, or to the scaler that steps it."""
    optimizers.follow(heartbeat, optimizer, scaler)


@never_raise
def follow_model(heartbeat: Heartbeat, model: Any) -> None:
    """Attach a heartbeat to the forward passes of a torch module, which mark a step's stages."""
    models.follow(heartbeat, model)
