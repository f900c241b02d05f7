"""Attaches a heartbeat to what makes the steps of a training; a failure ends the heartbeat alone."""

from __future__ import annotations

from typing import Any

from dshealthd.training import engine as engines
from dshealthd.training import model as models
from dshealthd.training import optimizer as optimizers
from dshealthd.training.heartbeat import Heartbeat, never_raise


@never_raise
def follow_engine(heartbeat: Heartbeat, engine: Any) -> None:
    """Report the steps of a DeepSpeed engine."""
    engines.follow(heartbeat, engine)


@never_raise
def follow_optimizer(heartbeat: Heartbeat, optimizer: Any, scaler: Any = None) -> None:
    """Report the steps of a torch optimizer, or those of the scaler that steps it."""
    optimizers.follow(heartbeat, optimizer, scaler)


@never_raise
def follow_model(heartbeat: Heartbeat, model: Any) -> None:
    """Report the stages of steps by the forward passes of a torch module."""
    models.follow(heartbeat, model)
