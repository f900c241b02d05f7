"""A DeepSpeed configuration as text: JSON, or Hjson as DeepSpeed also takes it.

DeepSpeed reads the file with `hjson.load` and refuses duplicate keys (0.19.8, runtime/config.py).
What is JSON is parsed here; the rest is left to the interpreter in which DeepSpeed is installed.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 1 << 18
"""The largest configuration that DeepSpeed's repositories ship has 6 KiB."""
MAX_DEPTH = 64
"""Brackets within brackets; DeepSpeed's own blocks nest six deep."""
MAX_SHOWN = 20
"""Duplicate keys and numbers that are listed."""

Parsed = dict[str, Any]
"""`text` of what is no JSON, `document` of what is, `duplicates`, `constants` and `syntax`."""


def parse(text: str, name: str) -> Parsed:
    """Return a DeepSpeed configuration and what is wrong with its form.

    `constants` are `NaN`, `Infinity` and `-Infinity`, which JSON does not have. `syntax` says why
    it is no JSON. ValueError if it nests deeper than anything real does.
    """
    _check_depth(text, name)
    duplicates: list[str] = []
    constants: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and key not in duplicates and len(duplicates) < MAX_SHOWN:
                    duplicates.append(key)
                seen.add(key)
        return found

    def constant(word: str) -> str:
        if len(constants) < MAX_SHOWN:
            constants.append(word)
        return word  # as Hjson has it: a word without quotes is a string

    document, syntax = None, ""
    try:
        document = json.loads(
            text.removeprefix("\ufeff"), object_pairs_hook=members, parse_constant=constant
        )
    except json.JSONDecodeError as error:
        syntax = f"line {error.lineno} column {error.colno}: {error.msg}"
        duplicates, constants = [], []
    except ValueError as error:  # an integer of more digits than Python converts
        syntax = str(error)
    return {
        "text": text if document is None else "",
        "document": document,
        "duplicates": duplicates,
        "constants": constants,
        "syntax": syntax,
    }


def _check_depth(text: str, name: str) -> None:
    """Refuse a configuration that would exhaust a recursive parser, DeepSpeed's as well as ours."""
    depth, quoted, escaped = 0, False, False
    for position, character in enumerate(text):
        if quoted:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character in '"\n':  # Hjson: a word may have one quotation mark
                quoted = False
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                line = text.count("\n", 0, position) + 1
                message = f"{name}:{line}: nests more than {MAX_DEPTH} levels deep"
                raise ValueError(message)
        elif character in "}]":
            depth -= 1
