"""Sentences of findings: one text, from which the page's words and the alert's annotation are made.

A placeholder is a label of the finding (`{part}`, `{node}`, `{reason}`, `{training_job}`), or its
value in a form: `{value:percent}`, `{value:GPU|GPUs}` for a number with its noun.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LABELS = ("node", "part", "reason", "training_job")
_PLACEHOLDER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_PREFIXES = ("", "ki", "Mi", "Gi", "Ti", "Pi")


class SentenceError(ValueError):
    """A sentence has a placeholder that no finding can fill."""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value * 100:.4g}%"


def _bytes(value: float) -> str:
    """Write bytes as Prometheus' humanize1024 does, with the unit."""
    for prefix in _PREFIXES:
        if abs(value) < 1024 or prefix == _PREFIXES[-1]:  # noqa: PLR2004 - what "Ki" means
            break
        value /= 1024
    return f"{value:.4g}{prefix}B"


def _duration(value: float) -> str:
    """Write seconds as Prometheus' humanizeDuration does."""
    if abs(value) < 1:
        power = 0
        while value and abs(value) < 1 and power < 3:  # noqa: PLR2004 - down to nanoseconds
            value, power = value * 1000, power + 1
        return f"{value:.4g}{('', 'm', 'u', 'n')[power]}s"
    whole = int(abs(value))
    sign = "-" if value < 0 else ""
    days, hours, minutes, seconds = (
        whole // 86400,
        whole // 3600 % 24,
        whole // 60 % 60,
        whole % 60,
    )
    if days:
        return f"{sign}{days}d {hours}h {minutes}m {seconds}s"
    if hours:
        return f"{sign}{hours}h {minutes}m {seconds}s"
    if minutes:
        return f"{sign}{minutes}m {seconds}s"
    return f"{value:.4g}s"


FORMS: Mapping[str, tuple[Callable[[float], str], str]] = {
    "number": (_number, '{{ printf "%.4g" $value }}'),
    "percent": (_percent, "{{ $value | humanizePercentage }}"),
    "bytes": (_bytes, "{{ $value | humanize1024 }}B"),
    "duration": (_duration, "{{ $value | humanizeDuration }}"),
}
"""Forms of a value: how the agent writes it, and Prometheus' template that writes the same."""


def text(sentence: str, labels: Mapping[str, str], value: float | None) -> str:
    """Return the sentence about a finding with these labels and this value, None if unknown."""

    def fill(match: re.Match[str]) -> str:
        name, form = match.groups()
        if name != "value":
            return labels[name]
        if value is None:
            return "unknown"
        one, _, several = (form or "number").partition("|")
        if several:
            return f"{value:.4g} {one if value == 1 else several}"
        return FORMS[one][0](value)

    return _PLACEHOLDER.sub(fill, _checked(sentence))


def template(sentence: str) -> str:
    """Return Prometheus' template of the sentence, for an alert with the finding's labels."""

    def fill(match: re.Match[str]) -> str:
        name, form = match.groups()
        if name != "value":
            return f"{{{{ $labels.{name} }}}}"
        one, _, several = (form or "number").partition("|")
        if several:
            return f'{{{{ printf "%.4g" $value }}}} {{{{ if eq $value 1.0 }}}}{one}{{{{ else }}}}{several}{{{{ end }}}}'
        return FORMS[one][1]

    return _PLACEHOLDER.sub(fill, _checked(sentence))


def has_value(sentence: str) -> bool:
    """Return whether the sentence says the finding's value."""
    return any(match[1] == "value" for match in _PLACEHOLDER.finditer(sentence))


def _checked(sentence: str) -> str:
    """Return the sentence. Raise SentenceError if it has a placeholder that cannot be filled."""
    for name, form in _PLACEHOLDER.findall(sentence):
        fits = name in LABELS and not form if name != "value" else not form or form in FORMS
        if not fits and not (name == "value" and form.count("|") == 1):
            message = (
                f"{{{name}{':' if form else ''}{form}}} is no placeholder: known are "
                + ", ".join(
                    (
                        *(f"{{{label}}}" for label in LABELS),
                        *(f"{{value:{known}}}" for known in FORMS),
                    )
                )
            )
            raise SentenceError(message)
    return sentence
