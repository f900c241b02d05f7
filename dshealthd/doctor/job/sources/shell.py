"""The commands of a shell script, as far as they are known without running anything.

Quotes, substitutions, here-documents, arrays, functions and `eval` are read as bash reads them
(bash(1), "SHELL GRAMMAR" and "EXPANSION"), so that a program inside `$(...)` is never taken for one
that the script starts. What only a shell can compute, such as `$(hostname)`, stays as written, with
its `$`, and whatever depends on it is unknown. Conditions are not evaluated: commands in all
branches are returned, marked as conditional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dshealthd.doctor.job.sources.shell_syntax import ASSIGNMENT, Parsed, Word, WordPart, parse
from dshealthd.jobs.environment import MAX_VALUE

MAX_TEXT = 1 << 16
"""Maximum characters of a command after expansion, as variables may refer to each other."""
MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."` and functions."""
MAX_COMMANDS = 20_000
"""Maximum commands of a script, as functions may call each other."""
_BRACED = re.compile(r"(\w+|@|\*)(\[[@*]\]|\[\d{1,4}\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})

Value = str | tuple[str, ...] | None
"""A variable, an array, or a variable that only a shell knows."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that a script runs, after expansion."""

    line: int
    words: tuple[str, ...]
    own: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of it."""
    here: str = ""
    is_conditional: bool = False


def commands(text: str, variables: dict[str, Value]) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed or grows beyond a limit.
    """
    yield from _Shell(variables).run(parse(text), (), 0)


class _Shell:
    """The state of a shell that only assigns variables."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self._variables = variables
        self._functions: dict[str, tuple[Parsed, ...]] = {}
        self._count = 0

    def run(
        self, parsed: Iterator[Parsed] | Sequence[Parsed], given: tuple[str, ...], nesting: int
    ) -> Iterator[ShellCommand]:
        """Yield what commands run; `given` are the arguments of their function."""
        for one in parsed:
            self._count += 1
            if self._count > MAX_COMMANDS:
                message = f"it has more than {MAX_COMMANDS} commands"
                raise ValueError(message)
            if one.function:
                self._functions[one.function] = one.body
                continue
            own, rest = self._assignments(one.words, given)
            words = self._expand(rest, given)
            if not words or words[0] in _DECLARES:
                skipped = rest[1:] if words else ()
                own |= self._assignments(skipped, given, skip=True)[0]
                for name, value in own.items():
                    self._assign(name, value, may_be_skipped=one.is_conditional)
            elif words[0] in ("unset", "read", "mapfile", "readarray"):
                for name in words[1:]:
                    self._variables[name] = "" if words[0] == "unset" else None
            elif words[0] in ("eval", *self._functions) and nesting < MAX_NESTING:
                body: Iterator[Parsed] | Sequence[Parsed] = self._functions.get(words[0], ())
                if words[0] == "eval":
                    body = parse(" ".join(words[1:]), one.line)
                yield from self.run(body, tuple(words[1:]), nesting + 1)
            else:
                texts = {
                    name: value if isinstance(value, str) else f"${{{name}}}"
                    for name, value in own.items()
                }
                yield ShellCommand(one.line, tuple(words), texts, one.here, one.is_conditional)

    def _assign(self, name: str, value: Value, *, may_be_skipped: bool) -> None:
        known = self._variables.get(name)
        if may_be_skipped and name in self._variables and known != value:
            value = None
        self._variables[name] = value

    def _assignments(
        self, words: Sequence[Word], given: tuple[str, ...], *, skip: bool = False
    ) -> tuple[dict[str, Value], Sequence[Word]]:
        """Return the variables that the first words assign, and the rest.

        With `skip`, words that assign nothing, such as options of `export`, are skipped.
        """
        found: dict[str, Value] = {}
        for at, word in enumerate(words):
            first = word.parts[0] if word.parts else WordPart("")
            match = None if first.is_quoted or first.expands else ASSIGNMENT.match(first.text)
            if match is None:
                if skip:
                    continue
                return found, words[at:]
            name = match[1]
            value: Value
            begin = WordPart(first.text[match.end() :])
            quoted = (part._replace(is_quoted=True) for part in word.parts[1:])
            try:
                if word.array is not None:
                    value = tuple(self._expand(word.array, given))
                else:
                    value = "".join(self._expand([Word((begin, *quoted))], given))
            except ValueError:  # too long to be a value that matters
                value = None
            found[name] = self._bounded(self._added(name, value) if match[2] else value)
        return found, ()

    def _added(self, name: str, value: Value) -> Value:
        """Return the value of a variable after `+=`."""
        known = self._variables.get(name, "" if isinstance(value, str) else ())
        if isinstance(known, tuple) and isinstance(value, tuple):
            return (*known, *value)
        return known + value if isinstance(known, str) and isinstance(value, str) else None

    @staticmethod
    def _bounded(value: Value) -> Value:
        texts = (value,) if isinstance(value, str) else value or ()
        if sum(map(len, texts)) > MAX_VALUE:
            return None
        return None if isinstance(value, str) and "$" in value else value

    def _expand(self, words: Sequence[Word], given: tuple[str, ...]) -> list[str]:
        """Return words after expansion, as a shell splits them; ValueError beyond MAX_TEXT."""
        found: list[str] = []
        size = 0
        for word in words:
            pieces: list[str] | None = None
            for text, begins in self._pieces(word, given):
                size += len(text) + 1
                if size > MAX_TEXT:
                    message = f"the command has more than {MAX_TEXT} characters"
                    raise ValueError(message)
                if begins and pieces is not None:
                    found.append("".join(pieces))
                    pieces = []
                pieces = pieces or []
                pieces.append(text)
            if pieces is not None:
                found.append("".join(pieces))
        return found

    def _pieces(self, word: Word, given: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
        """Yield what the parts of a word become, and whether each begins another word."""
        for part in word.parts:
            value = self._value(part.text, given) if part.expands else part.text
            if value is None:
                value = part.text if "$" in part.text else f"$({part.text.strip('`')})"
            elif part.expands and not part.is_quoted:
                texts = (value,) if isinstance(value, str) else value
                value = tuple(one for text in texts for one in text.split())
            if isinstance(value, str):
                yield value, False
            else:
                yield from ((text, at > 0) for at, text in enumerate(value))

    def _value(self, raw: str, given: tuple[str, ...]) -> Value:
        """Return what an expansion becomes; None if only a shell knows."""
        if raw.startswith(("$(", "`", "<(", ">(")):
            return None
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        if inner.startswith("#"):
            array = self._variables.get(inner[1:].removesuffix("[@]").removesuffix("[*]"))
            return str(len(array)) if isinstance(array, tuple) and _is_known(array) else None
        if (match := _BRACED.fullmatch(inner)) is None:
            return None
        name, index, operator, default = match.groups()
        known = self._known(name, given)
        if isinstance(known, tuple) and index not in {"[@]", "[*]"} and name not in "@*":
            at = int(index[1:-1]) if index else 0
            # an unknown element may be several
            known = None if not _is_known(known) else known[at] if at < len(known) else ""
        if operator is None or operator.endswith("?"):
            return known
        if operator.endswith("+"):
            return None if known is None else default if known else ""
        if known is not None:
            return default if operator.startswith(":") and not known else known
        if name in self._variables or "$" in default or "`" in default:
            return None
        return str(default.strip("\"'"))

    def _known(self, name: str, given: tuple[str, ...]) -> Value:
        if name in ("@", "*"):
            return given or None
        if name.isdecimal():
            return given[int(name) - 1] if 0 < int(name[:4]) <= len(given) else None
        return self._variables.get(name)


def _is_known(array: tuple[str, ...]) -> bool:
    return not any("$" in element for element in array)
