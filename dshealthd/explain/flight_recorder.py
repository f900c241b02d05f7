"""The dump of PyTorch's flight recorder: safe unpickling, and a digest of one rank's collectives.

The file is a pickle that belongs to the job's user and is not trusted. It is parsed by user nobody
in a process with limits on memory and CPU time, and the result is JSON. The format is that of
`torch/csrc/distributed/c10d/FlightRecorder.hpp`: dicts, lists, strings and numbers. So a dump that
imports anything is refused.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
from typing import Any, NoReturn, TypeGuard

_PARTS = (
    *("/torch/", "/deepspeed/", "/accelerate/", "/lightning/", "/transformers/"),
    *("/dshealthd/training/", "/site-packages/", "/dist-packages/", "/lib/python"),
)
"""Frameworks are listed by name because they may run from a checkout, outside site-packages."""
MAX_GROUPS = 64
MAX_ENTRIES = 20_000
MAX_PENDING = 8
"""Operations listed of one group: the first ones that are not completed."""
MAX_TEXT = 200
MAX_RANKS_TEXT = 1 << 20
"""Characters of the member lists of all groups together; a list that exceeds it is left out, since
a cut one would be wrong.
"""
_RANKS = re.compile(r"\[?(?:\d{1,7}(?:, ?\d{1,7})*)?\]?")
_STATES = ("scheduled", "started", "completed")
MAX_EXACT = 1 << 53
"""The largest count: a million operations a second for 285 years. All readers of JSON hold it."""


def is_library(filename: str) -> bool:
    """Return whether a frame's file belongs to a library, by its path."""
    return any(part in filename for part in _PARTS)


class MalformedDump(Exception):
    """The bytes are not a flight recorder's dump."""


class _Unpickler(pickle.Unpickler):
    """An unpickler that reads only plain values."""

    # Importing names is how a pickle runs code.
    def find_class(self, module: str, name: str) -> NoReturn:
        message = f"it imports {module[:MAX_TEXT]}.{name[:MAX_TEXT]}; a dump imports nothing"
        raise MalformedDump(message)

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002 - part of the protocol
        raise MalformedDump("it refers to an external object")


def load(data: bytes) -> Any:
    """Return the plain values that a dump's pickle holds.

    `MalformedDump` if it holds anything else, MemoryError: a number in the pickle makes the
    unpickler reserve as much as it says, so call it in a process whose memory is limited.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except MalformedDump:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        ArithmeticError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        message = f"not a pickle of plain values: {type(error).__name__}: {str(error)[:MAX_TEXT]}"
        raise MalformedDump(message) from error


def digest(data: bytes) -> dict[str, Any]:
    """Return a dump as a bounded JSON document.

    It says for each process group how far this rank has got and what it waits for.
    """
    document = load(data)
    if not isinstance(document, dict) or not isinstance(
        entries := document.get("entries", []), list
    ):
        raise MalformedDump("it is not a dictionary with a list of entries")
    members, completed = _members(document.get("pg_config")), _completed(document.get("pg_status"))
    operations: dict[str, list[dict[str, Any]]] = {}
    """By group, the oldest first, as the recorder dumps them."""
    done: dict[str, int] = {}
    for entry in entries[-MAX_ENTRIES:]:
        operation = _operation(entry)
        if operation is None:
            continue
        key = _name(entry.get("process_group"))
        if key in operations or len(operations) < MAX_GROUPS:
            operations.setdefault(key, []).append(operation)
            own = operation["number"] if operation["state"] == "completed" else -1
            of_group = completed.get(_text(entry.get("pg_id")), -1)
            done[key] = max(done.get(key, -1), own, of_group)
    return {
        "version": _text(document.get("version", "")),
        "entries": len(entries),
        "groups": [
            {
                "name": key,
                "ranks": members.get(key.partition(" ")[0], ""),
                "entered": max(operation["number"] for operation in found),
                "completed": done[key],
                "pending": [
                    operation
                    for operation in found
                    if operation["state"] != "completed" and operation["number"] > done[key]
                ][:MAX_PENDING],
                "last": found[-MAX_PENDING:],
            }
            for key, found in operations.items()
        ],
    }


def _operation(entry: Any) -> dict[str, Any] | None:
    """Return an entry's collective; None if it has none, as one from a rank to another."""
    if not isinstance(entry, dict) or entry.get("is_p2p") is True:
        return None
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
    if not isinstance(value, list):
        return ""
    shapes = [shape for shape in value[:4] if isinstance(shape, list)]
    return " ".join(
        "x".join(str(size) for size in shape[:8] if _is_count(size)) or "scalar" for shape in shapes
    )


def _place(frames: Any) -> str:
    """Return where the job's code called an operation: the innermost frame outside libraries."""
    found = [
        frame
        for frame in (frames[:64] if isinstance(frames, list) else ())
        if isinstance(frame, dict) and isinstance(frame.get("filename"), str)
    ]
    own = [frame for frame in found if not is_library(frame["filename"])]
    for frame in (own or found)[:1]:
        return (
            f"{_text(frame['filename'])}:{_text(frame.get('line', '?'))} "
            f"{_text(frame.get('name', ''))}"
        )
    return ""


def _members(value: Any) -> dict[str, str]:
    """Return the ranks of each group as text, by the group's name."""
    if not isinstance(value, dict):
        return {}
    told, left = {}, MAX_RANKS_TEXT
    for group in itertools.islice(value.values(), MAX_GROUPS):
        if not isinstance(group, dict):
            continue
        ranks = group.get("ranks", "")
        whole = isinstance(ranks, str) and len(ranks) <= left and _RANKS.fullmatch(ranks)
        told[_text(group.get("name", ""))] = ranks if whole else ""
        left -= len(ranks) if whole else 0
    return told


def _completed(value: Any) -> dict[str, int]:
    """Return the last operation of each group that is known to be complete.

    This is the only source for gloo, whose entries never say so.
    """
    if not isinstance(value, dict):
        return {}
    return {
        _text(name): number
        for name, status in value.items()
        if isinstance(status, dict) and _is_count(number := status.get("last_completed_collective"))
    }


def _name(value: Any) -> str:
    return " ".join(_text(part) for part in value[:2]) if isinstance(value, tuple | list) else ""


def _text(value: Any) -> str:
    text = str(value) if isinstance(value, str | float) or _is_count(value) else ""
    return "".join(character if character.isprintable() else "�" for character in text[:MAX_TEXT])


def _is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is a count of operations, a size or a line.

    Python would need hours to print a number of a million digits.
    """
    return type(value) is int and 0 <= value <= MAX_EXACT
