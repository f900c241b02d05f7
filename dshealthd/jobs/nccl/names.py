"""The names of variables that NCCL and torch read, and what is wrong with one that they do not."""

from __future__ import annotations

import difflib
import enum
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

from dshealthd.jobs.nccl.release import release_numbers

OLDEST = (2, 18)
"""Names that only releases before this one read are told as retired.

Torch has come with it or a later one since 2.1.
"""
LIKENESS = 0.9
"""Share of the letters that an unknown name has in common with a known one that it is taken for.

One or two letters differ.
"""


class Misnomer(enum.StrEnum):
    """What is wrong with a name."""

    UNREAD = "unread"
    """No release of any library reads it, whatever guides say."""
    RETIRED = "retired"
    """No release of today reads it."""
    RENAMED = "renamed"
    """It works, and has another name by now."""
    MISSPELT = "misspelt"
    """Nothing reads it, and it is nearly the name that is given with it."""
    UNKNOWN = "unknown"
    """We know of nothing that reads it; a plugin may."""


@dataclass(frozen=True, slots=True)
class Names:
    """The data file."""

    release: tuple[int, ...]
    """The release of NCCL whose names these are: of a later one we do not know all."""
    known: frozenset[str]
    retired: Mapping[str, str]
    """The last release that reads it."""
    renamed: Mapping[str, str]
    unread: frozenset[str]
    foreign: frozenset[str]
    prefixes: tuple[str, ...]


@functools.cache
def names() -> Names:
    """Return what is known of variables' names, from `names.toml`."""
    data = tomllib.loads(
        resources.files(__package__).joinpath("names.toml").read_text(encoding="utf-8")
    )
    return Names(
        release=release_numbers(data["nccl"]["release"]),
        known=frozenset(
            {
                *(f"NCCL_{name}" for name in data["nccl"]["names"].split()),
                *data["torch"]["names"].split(),
            }
        ),
        retired=data["retired"],
        renamed=data["renamed"],
        unread=frozenset(data["unread"]["names"].split()),
        foreign=frozenset(data["foreign"]["names"].split()),
        prefixes=tuple(data["foreign"]["prefixes"].split()),
    )


def newer(releases: Iterable[str]) -> bool:
    """Tell whether one of these releases of NCCL is newer than the names that are known."""
    return any(release_numbers(release) > names().release for release in releases)


@functools.lru_cache(maxsize=1024)
def misnomer(name: str) -> tuple[str, Misnomer] | None:
    """Return what is wrong with a variable's name, and a name of ours that stands for it.

    Itself, the one that is meant, or `other`.

    None if it is read, or is none of NCCL's. What is returned comes from the data file alone,
    whatever names processes make up.
    """
    have = names()
    if name in have.renamed:
        return name, Misnomer.RENAMED
    if name in have.unread:
        return name, Misnomer.UNREAD
    if name in have.known or name in have.foreign or name.startswith(have.prefixes):
        return None
    if name in have.retired:
        return (name, Misnomer.RETIRED) if release_numbers(have.retired[name]) < OLDEST else None
    near = difflib.get_close_matches(name, have.known, n=1, cutoff=LIKENESS)
    return (near[0], Misnomer.MISSPELT) if near else ("other", Misnomer.UNKNOWN)
