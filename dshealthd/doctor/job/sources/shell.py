"""The commands of a shell script, as far as its text says.

A branch of an `if` whose test is known runs or not; functions are not called: commands in functions
and all other branches are returned, marked as conditional.
"""

from __future__ import annotations

import contextlib
import operator
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.doctor.job.sources import expansion
from dshealthd.jobs.environment import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dshealthd.doctor.job.sources.expansion import Variables

MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."`."""
_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*['\"\\]?(\w+)")
_DEFAULT = re.compile(r"\$\{\w+:?[-+=?]")
_READ = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""A variable that a shell reads, unless it has a default."""
_LEFT = re.compile(r"\\\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""One that a backslash leaves to another shell."""
_SETS = re.compile(r"(?:(?<![\w.$/{-])(?=\w+\+?=)|\b(?:for|read(?:\s+-\w+)*)\s+)([A-Za-z_]\w*)")
"""One that a script sets."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_TO_END = re.compile("-[a-z]*d")
"""An option of `read` with which it reads all lines, if its value is empty."""
MAX_ARRAY = 1 << 16
"""Maximum characters of an array; the arguments of Megatron are some 4,000."""
_HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
_OPENS = frozenset({"if", "while", "until", "{", *_HEADS})
_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    **{f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
"""How tests compare texts, and with a dash numbers (bash(1), CONDITIONAL EXPRESSIONS)."""
_LOOPS = frozenset({"for", "while", "until"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", *_OPENS, *_CLOSES})
DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})


class ShellCommand(NamedTuple):
    """A command that a script runs."""

    words: tuple[str, ...]
    own: Mapping[str, str] = {}
    """Variables set in front of it."""
    is_conditional: bool = False
    in_loop: bool = False
    end: str = "\n"
    """The operator that ends it."""
    document: str = ""
    """Its here-document."""
    target: str = ""
    """The file into which its output goes."""
    reads: frozenset[str] = frozenset()
    """Variables that texts in its words and here-document read, which are left to another shell,
    and do not set; also texts that it has from variables.
    """


@dataclass(slots=True)
class _Block:
    """A compound command that is open."""

    keyword: str
    runs: bool | None = None
    """Whether the branch of an `if` runs that is read; None if that is not known, or its condition
    is read.
    """
    others: bool | None = False
    """Whether one of the branches above runs."""
    tests: list[bool | None] = field(default_factory=list)
    """What the commands of its condition say."""
    in_pattern: bool = False
    """Whether a pattern of `case` is read, or is next."""

    def enter(self, keyword: str) -> None:
        """Read its next branch, or the condition of that."""
        if keyword == "elif":
            self.runs, self.tests = None, []
        elif keyword == "!":
            self.tests.append(None)
        elif keyword in {"then", "else"} and self.keyword == "if":
            says = self.tests[0] if len(self.tests) == 1 else None
            says = True if keyword == "else" else says
            self.runs = False if self.others or says is False else says
            self.runs = None if self.others is None and self.runs else self.runs
            self.others = self.others or self.runs

    def takes(self, end: str) -> bool:
        """Return whether the words before this operator are of a pattern."""
        was = self.in_pattern
        if self.keyword == "case":
            self.in_pattern = ";;" in end or ";&" in end or (was and ")" not in end)
        return was


def commands(text: str, variables: Variables) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed.
    """
    words: list[str] = []
    opened: list[_Block] = []
    is_chained = False
    found: ShellCommand | None
    extra: dict[str, str] = {}
    script = expansion.without_substitutions(text, variables)
    texts = {  # what texts in variables read
        name: _left_in(document, is_closed=name.startswith(expansion.CLOSED))
        for name, document in variables.items()
        if name.startswith((expansion.CLOSED, expansion.OPEN))
    }
    for word, kind in expansion.words(script):
        if kind == "word":
            words.append(word)
        elif kind == "target":
            extra[kind] = " ".join(expansion.expanded(word, variables))
        elif kind != "operator":
            quoted = partial(expansion.quoted, variables=variables)
            document = word if kind == "closed" else expansion.IN_QUOTES.sub(quoted, word)
            extra |= {"document": document, "text": word, "quote": kind.removeprefix("open")}
        if kind != "operator":
            continue
        while words and words[0] in _KEYWORDS:
            keyword = words.pop(0)
            if keyword in _OPENS:
                opened.append(_Block(keyword, in_pattern=keyword == "case"))
            elif keyword in _CLOSES and opened:
                opened.pop()
            elif opened:
                opened[-1].enter(keyword)
            if keyword in _HEADS:
                if keyword != "case" and words:  # the variable has another value each time
                    variables[words[0]] = expansion.unknown(words[0])
                words.clear()
        is_pattern = bool(opened) and opened[-1].takes(word)
        if is_pattern or any(block.runs is False for block in opened):
            words.clear()
        is_conditional = not all(block.runs for block in opened)
        if words and opened and opened[-1].runs is None:
            is_sure = {block.keyword for block in opened} == {"if"} and word in {";", "\n"}
            opened[-1].tests.append(_tested(words, variables) if is_sure else None)
        is_cat = word == "|" and words == ["cat"]  # for the next command
        if words[:1] == ["read"] and "text" in extra and any(map(_TO_END.fullmatch, words)):
            words = [
                f"{words[-1]}={expansion.kept(extra['text'].strip(), extra['quote'], variables)}"
            ]
        left = {one: _left_by(one, texts) for one in words}
        of_document = _left_in(extra.get("text", ""), is_closed=bool(extra.get("quote")))
        if found := _run(words, variables, is_conditional=is_conditional or is_chained):
            yield found._replace(
                is_conditional=is_conditional,
                in_loop=any(block.keyword in _LOOPS for block in opened),
                end=word,
                document=extra.get("document", ""),
                target=extra.get("target", ""),
                reads=of_document.union(*left.values()),
            )
        else:
            texts |= {
                one[1]: left[one[0]] | of_document for one in map(_ASSIGNMENT.match, words) if one
            }
        words.clear()
        if not is_cat:
            extra.clear()
        is_chained = word in {"&&", "||"}


def _left_in(document: str, *, is_closed: bool) -> frozenset[str]:
    """Return the variables that a here-document leaves to another shell, and does not set."""
    pattern = _READ if is_closed else _LEFT
    return frozenset({*pattern.findall(document)} - {*_SETS.findall(document)})


def _left_by(word: str, texts: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the variables that a word leaves to another shell, unless its text sets them."""
    pieces = expansion.PIECE.findall(word)
    closed = "\n".join(single for single, *_ in pieces)
    read = {*_READ.findall(closed), *_LEFT.findall(word)} - {*_SETS.findall(word)}
    named = [m for _, *rest in pieces for one in rest for m in expansion.VARIABLE.finditer(one)]
    return frozenset(read).union(*(texts.get(m["bare"] or m["name"], ()) for m in named))


def _tested(words: Sequence[str], variables: Variables) -> bool | None:
    """Return what a test of known texts says; None for another."""
    names = {match["name"] for word in words for match in expansion.VARIABLE.finditer(word)}
    if words[0] not in {"[", "[[", "test"} or any(
        _DEFAULT.search(word) and not names <= variables.keys() for word in words
    ):
        return None  # the environment may have what it has a default for
    last = len(words) - (words[0] != "test")
    found = [one for word in words[1:last] for one in expansion.expanded(word, variables)]
    if len(found) != last - 1 or any("$" in word for word in found):
        return None
    match found:
        case ["-n" | "-z" as kind, text]:
            return bool(text) == (kind == "-n")
        case [one, kind, other] if kind in _COMPARES and not re.search(r"[*?\[]", other):
            number = int if kind.startswith("-") else str
            with contextlib.suppress(ValueError, ArithmeticError):
                return _COMPARES[kind](number(one), number(other))
    return None


def without_documents(text: str) -> str:
    """Return a script with an empty line for each line of its here-documents."""
    lines, end = [], ""
    for line in text.split("\n"):
        lines.append("" if end else line)
        if end:
            end = "" if line.lstrip("\t") == end else end
        elif match := _DOCUMENT.search(line):
            end = match[1]
    return "\n".join(lines)


def _run(words: list[str], variables: Variables, *, is_conditional: bool) -> ShellCommand | None:
    """Assign what a command assigns, or return the command."""
    own: Variables = {}
    declares = words[:1] and words[0] in DECLARES
    if declares and "=" in words[2:]:
        return ShellCommand(tuple(words), own, is_conditional)
    at = int(bool(declares))
    while at < len(words) and ((match := _ASSIGNMENT.match(words[at])) or declares):
        if match:
            name, value = _assigned(match, {**variables, **own}, is_conditional=is_conditional)
            limit = MAX_ARRAY if name.endswith("]") else MAX_VALUE
            own[name] = value if len(value) <= limit else expansion.unknown(name)
        at += 1
    if at == len(words):
        for name, new in own.items():
            is_known = not is_conditional or name.endswith("]") or variables.get(name) == new
            variables[name] = new if is_known else expansion.unknown(name)
        return None
    found = tuple(expansion.all_expanded(words[at:], variables))
    if found[:1] in {("unset",), ("read",), ("mapfile",), ("readarray",)}:
        variables.update({name: expansion.unknown(name) for name in found[1:]})
        return None
    return ShellCommand(found, own, is_conditional) if found else None


def _assigned(
    match: re.Match[str], variables: Variables, *, is_conditional: bool
) -> tuple[str, str]:
    """Return the name that a word assigns and its value: of an array, all elements."""
    name, adds, text = match.groups()
    if not (text.startswith("(") and text.endswith(")")):
        text = f'"{text}"' if expansion.VARIABLE.fullmatch(text) else text  # nothing is split here
        return name, variables.get(name, "") * bool(adds) + " ".join(
            expansion.expanded(text, variables)
        )
    inside = (word for word, kind in expansion.words(text[1:-1]) if kind == "word")
    elements = list(expansion.all_expanded(inside, variables))
    name += "[@]"
    if is_conditional:
        elements = [expansion.UNKNOWN]
    if adds and name in variables:
        elements = [*filter(None, variables[name].split(expansion.BETWEEN)), *elements]
    return name, expansion.BETWEEN.join(elements)
