"""The dump of PyTorch's flight recorder, unpickled without trust and digested.

A pickle, read without letting it name anything, and what it says of one rank's collectives.

The file belongs to whoever trains. It is taken apart in a process of nobody's, with little memory
and time, and what comes out is JSON. The format is that of
`torch/csrc/distributed/c10d/FlightRecorder.hpp`: dicts, lists, strings and numbers, so that no name
is ever needed.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, NoReturn

from dshealthd.evidence.libraries import is_library

MAX_GROUPS = 64
MAX_ENTRIES = 20_000
MAX_PENDING = 8
"""Operations of one group that are listed, the first ones that are not completed."""
MAX_TEXT = 200
MAX_RANKS_TEXT = 1 << 20
"""Characters of the members of all groups together: those of one that is cut would be wrong."""
_RANKS = re.compile(r"\[?(?:\d{1,7}(?:, ?\d{1,7})*)?\]?")
_STATES = ("scheduled", "started", "completed")


class MalformedDump(Exception):
    """The bytes are no dump of a flight recorder."""


class _Unpickler(pickle.Unpickler):
    """Reads plain values and nothing else."""

    # Naming things is how a pickle runs code.
    def find_class(self, module: str, name: str) -> NoReturn:
        message = f"it names {module[:MAX_TEXT]}.{name[:MAX_TEXT]}; a dump names nothing"
        raise MalformedDump(message)

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002 - of the protocol
        message = "it refers to something outside"
        raise MalformedDump(message)


def load(data: bytes) -> Any:
    """Return the plain values that a dump's pickle holds.

    `MalformedDump` if it holds anything else, MemoryError.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except MalformedDump:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
    ) as error:
        message = f"no pickle of plain values: {type(error).__name__}: {str(error)[:MAX_TEXT]}"
        raise MalformedDump(message) from error


def digest(data: bytes) -> dict[str, Any]:
    """Return what a dump says, as a bounded JSON document.

    For each process group how far this rank is, and what it waits for.
    """
    document = load(data)
    if not isinstance(document, dict) or not isinstance(
        entries := document.get("entries", []), list
    ):
        message = "it is no dictionary with a list of entries"
        raise MalformedDump(message)
    members, completed = _members(document.get("pg_config")), _completed(document.get("pg_status"))
    groups: dict[str, dict[str, Any]] = {}
    for entry in entries[-MAX_ENTRIES:]:
        if (
            isinstance(entry, dict)
            and entry.get("is_p2p") is not True
            and (operation := _operation(entry)) is not None
        ):
            key = _name(entry.get("process_group"))
            if key not in groups and len(groups) >= MAX_GROUPS:
                continue
            group = groups.setdefault(
                key,
                {
                    "name": key,
                    "ranks": members.get(key.partition(" ")[0], ""),
                    "entered": -1,
                    "completed": -1,
                },
            )
            group["completed"] = max(
                group["completed"], completed.get(_text(entry.get("pg_id")), -1)
            )
            group.setdefault("operations", []).append(operation)
            group["entered"] = max(group["entered"], operation["number"])
            if operation["state"] == "completed":
                group["completed"] = max(group["completed"], operation["number"])
    for group in groups.values():
        operations = sorted(group.pop("operations"), key=lambda operation: operation["number"])
        group["pending"] = [
            operation
            for operation in operations
            if operation["state"] != "completed" and operation["number"] > group["completed"]
        ][:MAX_PENDING]
        group["last"] = operations[-MAX_PENDING:]
    return {
        "version": _text(document.get("version", "")),
        "entries": len(entries),
        "groups": list(groups.values()),
    }


def _operation(entry: dict[Any, Any]) -> dict[str, Any] | None:
    number, state = entry.get("collective_seq_id"), entry.get("state")
    if not _is_count(number) or state not in _STATES:
        return None
    return {
        "number": number,
        "name": _text(entry.get("profiling_name", "")).rpartition(":")[2],
        "state": state,
        "sizes": _text(_sizes(entry.get("input_sizes"))),
        "at": _place(entry.get("frames")),
    }


def _sizes(value: Any) -> str:
    """Write the shapes of a dumped operation's input."""
    if not isinstance(value, list):
        return ""
    shapes = [shape for shape in value[:4] if isinstance(shape, list)]
    return " ".join(
        "x".join(str(size) for size in shape[:8] if _is_count(size)) or "scalar" for shape in shapes
    )


def _place(frames: Any) -> str:
    """Return where in the training's own code an operation of the dump was called.

    The innermost frame that is not a library's.
    """
    if not isinstance(frames, list):
        return ""
    found = [
        frame
        for frame in frames[:64]
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str)
    ]
    own = [frame for frame in found if not is_library(frame["filename"])]
    for frame in (own or found)[:1]:
        return f"{_text(frame['filename'])}:{_text(frame.get('line', '?'))} {_text(frame.get('name', ''))}"
    return ""


def _members(value: Any) -> dict[str, str]:
    """Return the ranks of each group of the dump by its name, as text."""
    if not isinstance(value, dict):
        return {}
    found = [
        group
        for _, group in zip(range(MAX_GROUPS), value.values(), strict=False)
        if isinstance(group, dict)
    ]
    told, left = {}, MAX_RANKS_TEXT
    for group in found:
        ranks = group.get("ranks", "")
        whole = isinstance(ranks, str) and len(ranks) <= left and _RANKS.fullmatch(ranks)
        told[_text(group.get("name", ""))] = ranks if whole else ""
        left -= len(ranks) if whole else 0
    return told


def _completed(value: Any) -> dict[str, int]:
    """Return by group the last operation of the dump that is known to be complete.

    Of gloo, whose entries never say so, nothing else tells.
    """
    if not isinstance(value, dict):
        return {}
    found = {
        _text(name): status.get("last_completed_collective")
        for name, status in value.items()
        if isinstance(status, dict)
    }
    return {
        name: number
        for name, number in found.items()
        if isinstance(number, int) and _is_count(number)
    }


def _name(value: Any) -> str:
    """Return how a process group of the dump is called: its name and what it is for."""
    return " ".join(_text(part) for part in value[:2]) if isinstance(value, tuple | list) else ""


def _text(value: Any) -> str:
    """Return a plain value of the dump as one short line."""
    text = (
        value
        if isinstance(value, str)
        else str(value)
        if isinstance(value, float) or _is_count(value)
        else ""
    )
    return "".join(character if character.isprintable() else "�" for character in text[:MAX_TEXT])


def _is_count(value: Any) -> bool:
    """Tell whether a value of the dump is a number that C++ could have counted.

    One of a million digits takes Python hours to write.
    """
    return type(value) is int and 0 <= value < 1 << 63
