"""The names of variables that NCCL and torch read, and the problems of names that they do not."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dshealthd.jobs.nccl.release import release_numbers

OLDEST = (2, 18)
"""Names that only releases before this one read are reported as retired.

Torch has shipped this release or a later one since 2.1.
"""
LIKENESS = 0.9
"""Least similarity of an unknown name to the known one that it is taken for: one or two letters
differ.
"""


class Misnomer(enum.StrEnum):
    """The problem of a name."""

    UNREAD = "unread"
    """No release of any library reads it, whatever guides say."""
    RETIRED = "retired"
    """No current release reads it."""
    RENAMED = "renamed"
    """It still works, but has a new name."""
    MISSPELT = "misspelt"
    """Nothing reads it, and it closely resembles the name reported with it."""
    UNKNOWN = "unknown"
    """Nothing known reads it; a plugin may."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of variables that NCCL and torch read, from `names.toml`."""

    release: tuple[int, ...]
    """The release of NCCL whose names these are; a later one may read others."""
    known: frozenset[str]
    retired: Mapping[str, str]
    """The last release that reads it."""
    renamed: Mapping[str, str]
    unread: frozenset[str]
    foreign: frozenset[str]
    prefixes: tuple[str, ...]


@functools.cache
def known_names() -> Names:
    """Return the known names, from `names.toml`."""
    import tomllib  # a worker without jobs needs neither
    from importlib import resources

    data = tomllib.loads(
        resources.files(__package__).joinpath("names.toml").read_text(encoding="utf-8")
    )
    return Names(
        release=release_numbers(data["nccl"]["release"]),
        known=frozenset(f"NCCL_{name}" for name in data["nccl"]["names"].split())
        | frozenset(data["torch"]["names"].split()),
        retired=data["retired"],
        renamed=data["renamed"],
        unread=frozenset(data["unread"]["names"].split()),
        foreign=frozenset(data["foreign"]["names"].split()),
        prefixes=tuple(data["foreign"]["prefixes"].split()),
    )


def newer(releases: Iterable[str]) -> bool:
    """Return whether one of these NCCL releases is newer than the known names."""
    return any(release_numbers(release) > known_names().release for release in releases)


@functools.lru_cache(maxsize=1024)
def misnomer(name: str) -> tuple[str, Misnomer] | None:
    """Return what is wrong with the name of a variable that is set for NCCL, and that name.

    The returned name is the variable's own, the intended one, or `other`, so that it stays bounded
    whatever names processes make up. None if the variable is read, or is not NCCL's.
    """
    have = known_names()
    if name in have.renamed:
        return name, Misnomer.RENAMED
    if name in have.unread:
        return name, Misnomer.UNREAD
    if name in have.known or name in have.foreign or name.startswith(have.prefixes):
        return None
    if name in have.retired:
        return (name, Misnomer.RETIRED) if release_numbers(have.retired[name]) < OLDEST else None
    import difflib  # 0.2 MiB that only an unknown name needs

    near = difflib.get_close_matches(name, have.known, n=1, cutoff=LIKENESS)
    return (near[0], Misnomer.MISSPELT) if near else ("other", Misnomer.UNKNOWN)
