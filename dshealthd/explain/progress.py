"""Lines that show a training job's progress."""

from __future__ import annotations

import re

_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|global[_ ]step|batch)\b['\"]?[\s=:#\[]{0,4}(?P<step>\d{1,9})\b"
    r"(?!\.\d)"  # a step of Slurm's is 4711.0
    r"|\bit[\s=:#\[]{1,8}\d{1,9}/\d"
    r"|\bepochs?\b['\"]?[\s=:#\[]{0,4}\d"
    r"|\b\d+/\d+ \[\d+:\d\d|\b(?:it/s|s/it)\b|\bloss\W{1,6}-?\d",
    re.IGNORECASE,
)
FINITE_LOSS = re.compile(r"\bloss['\"]?\s*[:=|]?\s*\[?(?:tensor\()?-?\d", re.IGNORECASE)
_FINISHED = re.compile(
    r"\b[Tt]rain(?:ing)? (?:is |has |was )?"
    r"(?:completed|complete|finished|done|succeeded|SUCCESS)\b"
    r"|['\"]train_runtime['\"]"
    r"|\breached (?:the )?(?:max(?:imum|\.)?[ _](?:train[ _])?(?:steps|iters|iterations|epochs)\b"
    r"|\d{1,9} (?:steps|iterations|epochs)\b)"
    r"|\bmax[ _](?:steps|iters|epochs) reached\b"
    r"|`Trainer\.fit` stopped: |exits successfully|\b[Ff]inished training\b"
    r"|\bexiting program (?:after|at) (?:iteration )?\d"  # Megatron-LM
    r"|^\d+(?:_\d+)?\s(?:.*\s)?COMPLETED\s+0:0\b"  # a whole job's row of Slurm's `sacct`
    r"|\bJobState=COMPLETED\b"  # scontrol
    r"|\b[Jj]ob \S{1,80} succeeded$"  # Ray, and Kubernetes' controllers
)
_OF_PROGRESS = ("step", "iter", "loss", "epoch", "batch")
_OF_AN_END = ("rain", "exit", "COMPLETED", "succeeded", "reached")
_NCCL_TRACE = re.compile(r"NCCL INFO \S{1,255}:\d+ (?:\(\w{1,80}\) )?-> \d")
"""Where an error was passed up within NCCL."""


def is_end(text: str) -> bool:
    """Return whether a line says that the training has ended well."""
    is_likely = any(word in text for word in _OF_AN_END)
    return is_likely and _FINISHED.search(text) is not None


def is_nccl_at_work(text: str) -> bool:
    """Return whether NCCL reports something else than an error."""
    return "NCCL INFO" in text and _NCCL_TRACE.search(text) is None


def find(text: str) -> re.Match[str] | None:
    """Return the match that shows progress in a line; its group `step` is the step, if any.

    A search for a few words first spares most lines the expression.
    """
    low = text.lower()
    is_likely = any(word in low for word in _OF_PROGRESS) or (
        "/" in low and ("it" in low or "[" in low)
    )
    return _PROGRESS.search(text) if is_likely else None
