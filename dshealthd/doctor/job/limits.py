"""When a training saves and ends, by its own arguments, against the time after which it is killed.

An argument has a unit in its name or in its value: `--save-every-minutes 120`, `--max-time 12h`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dshealthd.core.text import plural
from dshealthd.doctor.check import warning
from dshealthd.doctor.job.sources.slurm_options import seconds
from dshealthd.doctor.job.start import Invariant, Start

_LENGTHS = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400}
_UNITS = {
    **{name: length for unit, length in _LENGTHS.items() for name in (unit, f"{unit}s")},
    **dict.fromkeys(("sec", "secs"), 1),
    **dict.fromkeys(("min", "mins"), 60),
    **dict.fromkeys(("hr", "hrs"), 3_600),
}
"""Units in names of arguments, such as `exit_duration_in_mins`, by their seconds."""
_LETTERS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
"""Units behind a number, besides these."""
_QUANTITY = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)([a-z]*)")
_CLOCK = re.compile(r"(?:(\d{1,3}):)?(\d{1,3}):(\d\d):(\d\d)")
"""[DAYS:]HOURS:MINUTES:SECONDS: of Lightning (Trainer, max_time) those of days, too."""
_ACTS = re.compile(
    r"(?:^|_)(?:save|saving|ckpt|checkpoint(?:ing)?|exit|stop|wall|walltime|runtime)(?:_|$)"
    r"|(?:^|_)(?:time|run|job)_limit(?:_|$)"
    r"|^max_(?:(?:train|training|run|job|wall)_)?(?:time|duration|hours|hrs|minutes|mins|seconds)"
)
"""In names of arguments that say when a training saves or ends."""
_IS_OTHER = re.compile(r"timeout|wait|retry|delay|grace|keep|retain|async|after_idle|barrier")
"""In names of those that say how long something else may take."""


def _duration(name: str, text: str) -> float | None:
    """Return the seconds that an argument states; None if it states none."""
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return days * 86_400 + hours * 3_600 + minutes * 60 + rest
    match = _QUANTITY.fullmatch(text.lower())
    if match is None:
        return None
    named = [_UNITS[part] for part in name.split("_") if part in _UNITS]
    unit = {**_UNITS, **_LETTERS}.get(match[2]) if match[2] else "".join(map(str, named[-1:]))
    return float(match[1]) * int(unit) if unit else None


def _shown(length: int) -> str:
    """Return a limit of time in its largest units."""
    parts = []
    for unit, each in reversed(_LENGTHS.items()):
        if length >= each:
            parts.append(plural(length // each, unit))
            length %= each
    return " and ".join(parts[:2])


def _limits(start: Start) -> Iterator[tuple[int, str]]:
    """Yield the seconds after which something ends the training, each as it is written."""
    outer = start.find("srun")
    for options in (start.requested, outer.options if outer else {}):
        if length := seconds(options.get("time", "")):
            yield length, f"--time={options['time']} is {_shown(length)}"
    if start.deadline:
        yield start.deadline, f"activeDeadlineSeconds {start.deadline} is {_shown(start.deadline)}"


def _too_late(start: Start) -> Iterator[str]:
    """Yield when a training would save or end, if it were not killed before."""
    stated, outer = start.program.stated, start.find("srun")
    is_told = "signal" in {**start.requested, **(outer.options if outer else {})}
    if is_told or any("signal" in word for word in start.program.arguments):
        return  # it saves when it is told that the end comes
    limit, shown = min(_limits(start), default=(0, ""))
    for name, text in stated.items():
        length = _duration(name, text) if _ACTS.search(name) and not _IS_OTHER.search(name) else 0
        if limit and length and length > limit:
            written = f"--{name.replace('_', '-')} {text}"
            yield f"{written} comes after the end of the job: {shown}, and it is killed before"
            return


LIMITS = (Invariant(_too_late, "--time", "sbatch(1), --time", make=warning),)
"""In which a training must agree with the time that it is given."""
