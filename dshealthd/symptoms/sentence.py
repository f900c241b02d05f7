"""Sentences of findings: one text, from which the page's words and the alert's annotation are made.

A placeholder is a label of the finding (`{part}`, `{node}`, `{reason}`, `{training_job}`), or its
value in a form: `{value:percent}`, `{value:GPU|GPUs}` for a number with its noun.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

LABELS = ("node", "part", "reason", "training_job")
_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_LARGE, _SMALL = tuple("kMGTPEZY"), tuple("munpfazy")
_BINARY = ("ki", "Mi", "Gi", "Ti", "Pi", "Ei", "Zi", "Yi")


class SentenceError(ValueError):
    """A sentence has a placeholder that no finding can fill."""


def percentage(value: float) -> str:
    """Write a ratio as Prometheus' humanizePercentage does."""
    return f"{value * 100:.4g}%"


def humanize(value: float) -> str:
    """Write a number as Prometheus' humanize does: with a prefix, also of parts of one."""
    if not value or abs(value) >= 1:
        return _scaled(value, 1000, _LARGE)
    place = 0
    while abs(value) < 1 and place < len(_SMALL):
        value, place = value * 1000, place + 1
    return f"{value:.4g}{_SMALL[place - 1]}"


def humanize1024(value: float) -> str:
    """Write a number as Prometheus' humanize1024 does."""
    return _scaled(value, 1024, _BINARY)


def _scaled(value: float, base: float, prefixes: Sequence[str]) -> str:
    place = 0
    while abs(value) >= base and place < len(prefixes):
        value, place = value / base, place + 1
    return f"{value:.4g}{prefixes[place - 1] if place else ''}"


def duration(value: float) -> str:
    """Write seconds as Prometheus' humanizeDuration does."""
    if not math.isfinite(value):
        return f"{value:+g}".title()
    if value < 0:
        return f"-{duration(-value)}"
    if value < 1:
        return f"{humanize(value)}s"
    whole = int(value)
    if whole < 60:  # noqa: PLR2004 - seconds of a minute
        return f"{value:.4g}s"
    parts = (whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m")
    first = next(place for place, (number, _) in enumerate(parts) if number)
    shown = [f"{number}{unit}" for number, unit in (*parts[first:], (whole % 60, "s"))]
    return " ".join(shown)


FORMS: Mapping[str, tuple[Callable[[float], str], str]] = {
    "number": (lambda value: f"{value:.4g}", '{{ printf "%.4g" $value }}'),
    "whole": (lambda value: f"{value:.0f}", '{{ printf "%.0f" $value }}'),
    "percent": (percentage, "{{ $value | humanizePercentage }}"),
    "bytes": (lambda value: f"{humanize1024(value)}B", "{{ $value | humanize1024 }}B"),
    "duration": (duration, "{{ $value | humanizeDuration }}"),
}
"""Forms of a value: how the agent writes it, and Prometheus' template that writes the same."""


def text(sentence: str, labels: Mapping[str, str], value: float | None) -> str:
    """Return the sentence about a finding with these labels and this value, None if unknown."""

    def said(form: str) -> str:
        if value is None:
            return "unknown"
        one, _, several = form.partition("|")
        if several:
            return f"{value:.4g} {one if value == 1 else several}"
        return FORMS[one][0](value)

    return _filled(sentence, labels.__getitem__, said)


def template(sentence: str) -> str:
    """Return Prometheus' template of the sentence, for an alert with the finding's labels."""

    def said(form: str) -> str:
        one, _, several = form.partition("|")
        if several:
            return (
                f'{{{{ printf "%.4g" $value }}}} {{{{ if eq $value 1.0 }}}}{one}{{{{ else '
                f"}}}}{several}{{{{ end }}}}"
            )
        return FORMS[one][1]

    return _filled(sentence, lambda name: f"{{{{ $labels.{name} }}}}", said)


def _filled(sentence: str, label: Callable[[str], str], value: Callable[[str], str]) -> str:
    """Return the sentence with each label by its name, and the value by its form."""
    return _PLACEHOLDER.sub(
        lambda match: value(match[2] or "number") if match[1] == "value" else label(match[1]),
        _checked(sentence),
    )


def placeholders(sentence: str) -> set[str]:
    """Return what the sentence names: labels, and `value` if it says the finding's value."""
    return {match[1] for match in _PLACEHOLDER.finditer(sentence)}


def _checked(sentence: str) -> str:
    """Return a sentence. Raise SentenceError if it has a placeholder that cannot be filled."""
    for name, form in _PLACEHOLDER.findall(sentence):
        fits = name in LABELS and not form if name != "value" else not form or form in FORMS
        if not fits and not (name == "value" and form.count("|") == 1):
            known = [*(f"{{{label}}}" for label in LABELS), *(f"{{value:{one}}}" for one in FORMS)]
            wrong = f"{{{name}{':' if form else ''}{form}}}"
            raise SentenceError(f"{wrong} is no placeholder: known are {', '.join(known)}")
    return sentence
