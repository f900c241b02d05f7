"""Which words of a log can be the name of a host."""

from __future__ import annotations

import re

_LEVELS_LIKE = re.compile(
    r"\d+(?:[.:]\d+){0,2}|v\d[\w.]*|[\w.-]*\.(?:py|cc?|cpp|cu|h|so|log|json|out|yaml)(?:[:.]\d+)*"
)
"""Numbers, releases and files, at the place of a host's name."""


def is_name_of_host(word: str) -> bool:
    """Return whether a word can be a host's name or address, rather than prose, a number or a
    file.
    """
    if _LEVELS_LIKE.fullmatch(word):
        return False
    is_number = re.fullmatch(r"(?:0x)?[0-9a-fA-F]{5,}", word) is not None
    return not is_number and any(character.isdigit() for character in word)
