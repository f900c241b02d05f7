"""A DeepSpeed configuration as text: JSON, or Hjson, which DeepSpeed also accepts.

DeepSpeed reads the file with `hjson.load` and refuses duplicate keys (0.19.8, runtime/config.py).
JSON is parsed here; anything else is left to the interpreter in which DeepSpeed is installed.
"""

from __future__ import annotations

import functools
import json
import tomllib
from importlib import resources
from typing import Any

TOP = "top level"
RELEASE = "DeepSpeed 0.19.8"
"""What is known here of DeepSpeed without an interpreter that has it."""
MAX_SHOWN = 20
"""Maximum number of duplicate keys to list."""

Parsed = dict[str, Any]
"""`text` if it is not JSON, `document` if it is, `duplicates` and `syntax`."""


@functools.cache
def keys() -> dict[str, frozenset[str]]:
    """Return the keys that DeepSpeed reads at the top level and in some of its blocks."""
    data = tomllib.loads(
        resources.files(__package__).joinpath("deepspeed_keys.toml").read_text(encoding="utf-8")
    )
    return {block: frozenset(names.split()) for block, names in data.items()}


def parse(text: str) -> Parsed:
    """Return a DeepSpeed configuration and what is wrong with its syntax.

    `syntax` says why it is not JSON.
    """
    duplicates: list[str] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and key not in duplicates and len(duplicates) < MAX_SHOWN:
                    duplicates.append(key)
                seen.add(key)
        return found

    def constant(word: str) -> None:
        message = f"{word} is no number in JSON"  # in Hjson it is a string
        raise ValueError(message)

    document, syntax = None, ""
    try:
        document = json.loads(
            text.removeprefix("\ufeff"), object_pairs_hook=members, parse_constant=constant
        )
    except json.JSONDecodeError as error:
        syntax = f"line {error.lineno} column {error.colno}: {error.msg}"
        duplicates = []
    except (ValueError, ArithmeticError, RecursionError) as error:
        syntax = str(error)  # such as an integer of more digits than Python converts
    return {
        "text": text if document is None else "",
        "document": document,
        "duplicates": duplicates,
        "syntax": syntax,
    }
