"""The GPUs of this node, from NVML, which is queried in a separate process because it may hang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Gpus:
    """Names and memory of the GPUs, by index."""

    names: tuple[str, ...]
    memory: tuple[int, ...]
    """Bytes of each."""

    @property
    def count(self) -> int:
        """How many GPUs this node has."""
        return len(self.names)


def read() -> dict[str, Any]:
    """Return names and memory of the GPUs as JSON; ValueError if NVML fails."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return {
            "names": [_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles],
            "memory": [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles],
        }
    except pynvml.NVMLError as error:
        raise ValueError(str(error)) from error


def from_json(document: Mapping[str, Any]) -> Gpus:
    """Return the GPUs of a JSON document."""
    return Gpus(tuple(document["names"]), tuple(document["memory"]))


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name
