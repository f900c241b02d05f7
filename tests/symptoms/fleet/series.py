"""Series of a fleet, one value a minute, and their text for promtool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

Value = float | None
"""None is a scrape without this sample."""


class Series:
    """Series by name and labels; what is not set is absent."""

    def __init__(self, minutes: int) -> None:
        """Begin an empty time of so many minutes."""
        self.minutes = minutes
        self._values: dict[str, list[Value]] = {}

    def put(
        self, name: str, labels: Mapping[str, str], values: float | Iterable[Value]
    ) -> list[Value]:
        """Set a series, to one value for all the time or to one a minute, and return it."""
        row: list[Value] = (
            [float(values)] * self.minutes if isinstance(values, int | float) else list(values)
        )
        assert len(row) == self.minutes, (name, len(row))
        self._values[_text(name, labels)] = row
        return row

    def get(self, name: str, labels: Mapping[str, str]) -> list[Value] | None:
        """Return a series that was set, or None."""
        return self._values.get(_text(name, labels))

    def of(self, instance: str, cluster: str) -> Iterator[tuple[str, list[Value]]]:
        """Yield all series of one target."""
        wanted = (f'instance="{instance}"', f'cluster="{cluster}"')
        return (
            (name, row)
            for name, row in self._values.items()
            if all(label in name for label in wanted)
        )

    def document(self) -> list[dict[str, str]]:
        """Return what promtool takes as `input_series`."""
        return [{"series": name, "values": encode(row)} for name, row in self._values.items()]


def _text(name: str, labels: Mapping[str, str]) -> str:
    inside = ", ".join(f'{key}="{labels[key]}"' for key in sorted(labels))
    return f"{name}{{{inside}}}"


def encode(row: list[Value]) -> str:
    """Return values in promtool's notation; a series that ends becomes stale, as after a scrape."""
    parts: list[str] = []
    place = 0
    while place < len(row):
        value = row[place]
        if value is None:
            end = place
            while end < len(row) and row[end] is None:
                end += 1
            missing = end - place
            if place:
                parts.append("stale")
                missing -= 1
            if missing:
                parts.append(f"_x{missing}")
            place = end
            continue
        step = _step(row, place)
        end = place + 1
        while end < len(row) and row[end] == value + step * (end - place):
            end += 1
        sign = "-" if step < 0 else "+"
        parts.append(
            f"{value:.12g}{sign}{abs(step):.12g}x{end - place - 1}"
            if end - place > 1
            else f"{value:.12g}"
        )
        place = end
    return " ".join(parts)


def _step(row: list[Value], place: int) -> float:
    first, second = row[place], row[place + 1] if place + 1 < len(row) else None
    return 0.0 if first is None or second is None else second - first
