"""JSON as the agent writes it: the only way, and parts of a document that are built each by
itself.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MISSHAPEN = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What code raises on a document, or a value, of another shape than it expects."""

MAX_REASON = 200
"""Most characters of a reason, which may quote a value."""
MAX_LEFT_OUT = 100
"""Most parts that are named: one user may start any number of jobs."""
COMPACT = (",", ":")
"""Separators of JSON that only programs read."""
_NOTHING = object()


def dumps(value: object, **options: Any) -> str:
    """Return a value as JSON; `options` are those of `json.dumps`. An object is what its method
    `document` returns, or its fields.

    ValueError if a number is not finite: JSON has none such. Python would write `Infinity`, which
    no browser and no other program parses, so that one such number would cost the whole document.
    """
    return json.dumps(value, allow_nan=False, default=_object, **options)


def _object(value: Any) -> Any:
    if hasattr(value, "document"):
        return value.document()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


class LeftOut:
    """What a document lacks because it could not be built: a value of one user, job or member costs
    its own part alone, and the document says so.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def document(self) -> list[dict[str, str]]:
        """Return the parts that were left out, each with its reason."""
        return [{"part": part, "reason": reason} for part, reason in self._reasons.items()]

    def each(
        self, kind: str, items: Iterable[T], name: Callable[[T], object], build: Callable[[T], Any]
    ) -> Iterator[Any]:
        """Yield what `build` makes of each item, but for those of which it makes no JSON. The name
        of a part is its kind and its `name`.
        """
        for item in items:
            made = self.section(f"{kind} {name(item)}", functools.partial(build, item), _NOTHING)
            if made is not _NOTHING:
                yield made

    def section(self, part: str, build: Callable[[], Any], otherwise: object = None) -> Any:
        """Return the part of a document that `build` makes; `otherwise` if that is no JSON."""
        try:
            made = build()
            dumps(made)
        except MISSHAPEN as error:
            self.add(part, error)
            return otherwise
        return made

    def add(self, part: str, error: Exception) -> None:
        """Leave out a part of a document because of an error."""
        self.add_reason(part, f"{type(error).__name__}: {error}")

    def add_reason(self, part: str, reason: str) -> None:
        """Say that a part of a document was left out, here or by whom it comes from."""
        if len(self._reasons) < MAX_LEFT_OUT:
            self._reasons[cut(part, MAX_REASON)] = cut(reason, MAX_REASON)


def cut(text: str, most: int) -> str:
    """Return at most so many characters of a document's text, without what is no UTF-8."""
    return text[:most].encode(errors="replace").decode()


def whole(sections: Mapping[str, Any], left_out: LeftOut) -> str:
    """Return a document of these sections and of what was left out. A section that is no JSON is
    null.
    """
    written = {}
    for name, section in sections.items():
        try:
            written[name] = dumps(section, separators=COMPACT)
        except MISSHAPEN as error:
            left_out.add(name, error)
            written[name] = "null"
    written["left_out"] = dumps(left_out.document(), separators=COMPACT)
    return "{" + ",".join(f"{dumps(name)}:{text}" for name, text in written.items()) + "}"
