"""Kinds of lines: what the words of a line say, worked out once for all that have the same words.

Lines that differ only in their digits are of one kind. What depends on a number, as an exit code,
is read from each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from dshealthd.explain import names, progress, remarks
from dshealthd.explain.patterns import Pattern, load
from dshealthd.explain.prefilter import bare
from dshealthd.explain.streams import HEAD, Line, same_digits
from dshealthd.explain.templates import MAX_MATCHED
from dshealthd.explain.tracebacks import as_exception, begins

MAX_REMEMBERED = 1 << 22
"""Maximum bytes of the kinds that are remembered; beyond it, all are forgotten."""
_OVERHEAD = 1 << 9
"""Bytes that a kind needs beside its line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the words of a line say."""

    template: str
    """The text without its digits."""
    level: str
    """One of `remarks.level_of`."""
    of_kernel: bool
    """Whether the kernel wrote it."""
    near: tuple[Pattern, ...]
    """Patterns that may match the text."""
    near_named: tuple[Pattern, ...]
    """Patterns that may match the text with syslog's host and tag."""
    is_remark: bool
    """Whether it may be a remark."""
    is_exception: bool
    """Whether it is an exception in another format than Python's."""
    embeds: bool
    """Whether it has an exception behind other words."""
    is_detail: bool
    """Whether it has the form `key: value`."""
    begins: bool
    """Whether a traceback or a launcher's summary begins with it."""
    is_stack: bool
    opens: bool
    """Whether it is part of a traceback whose end must follow."""
    ranks: bool
    """Whether it speaks of ranks or of the world's size."""
    heads: bool
    """Whether a part of another host or process may begin with it."""
    pairs: bool
    """Whether it may say which rank is where."""
    launches: bool
    """Whether torchrun speaks."""
    ends: bool
    """Whether it shows the good end of a job."""
    works: bool
    """Whether it shows NCCL at work."""
    advances: bool
    """Whether it shows progress."""
    step: slice | None
    is_finite: bool


class Kinds:
    """The kinds of all lines that were seen."""

    def __init__(self) -> None:
        self._patterns = load()
        self._known: dict[tuple[bytes, bytes, str, str, bool, bool], Kind] = {}
        self._size = 0

    def of(self, line: Line, quote: str) -> Kind:
        """Return the kind of a line; `quote` is how it stands in its file."""
        level = remarks.level_of(quote, line.level) or remarks.level_of(line.text)
        of_kernel = line.stamp is not None and line.stamp.form in {"uptime", "ctime"}
        of_kernel = of_kernel or remarks.is_kernel(quote)
        text, named = same_digits(line.text), same_digits(line.named)
        key = text, named, line.level, level, of_kernel, line.prefixed
        found = self._known.get(key)
        if found is None:
            self._size += len(key[0]) + len(key[1]) + _OVERHEAD
            if self._size > MAX_REMEMBERED:
                self._known.clear()
                self._size = len(key[0]) + len(key[1]) + _OVERHEAD
            found = self._known[key] = self._read(line, level, of_kernel=of_kernel)
        return found

    def _read(self, line: Line, level: str, *, of_kernel: bool) -> Kind:
        text = line.text[:MAX_MATCHED]
        template = bare(text)
        near, is_remark = self._patterns.candidates(template)
        named = line.named[:MAX_MATCHED]
        near_named = self._patterns.candidates(bare(named))[0] if named else []
        shown = progress.find(text)
        return Kind(
            template=template,
            level=level,
            of_kernel=of_kernel,
            near=_of_lines(near),
            near_named=_of_lines(near_named),
            is_remark=is_remark or remarks.is_of_shell(text),
            is_exception=as_exception(line) is not line,
            embeds=level not in {"calm", "warning"}
            and any(remarks.embedded(whole) is not None for whole in (text, line.named)),
            is_detail=names.is_detail(text),
            begins=begins(line),
            is_stack=text.startswith("frame #"),
            opens=HEAD in text or text.startswith('  File "'),
            ranks=any(word in text for word in ("rank", "orld", "WORLD", "process_")),
            heads=names.heading(text) is not None,
            pairs=names.may_pair(template),
            launches="torch/distributed/elastic/" in text or "torchrun" in text,
            ends=progress.is_end(text),
            works=progress.is_nccl_at_work(text),
            advances=shown is not None,
            step=slice(*shown.span("step")) if shown is not None and shown["step"] else None,
            is_finite=shown is not None and progress.FINITE_LOSS.search(text) is not None,
        )


def _of_lines(near: list[Pattern]) -> tuple[Pattern, ...]:
    return tuple(one for one in near if one.where != "exception")
