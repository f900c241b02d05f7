"""The commands of a shell script, as far as its text says.

Quotes, comments and here-documents are read as bash reads them (bash(1), "QUOTING"), and a variable
that the script sets once, to plain text, has that value. What else a shell would expand stays as
written, with its `$`, and whatever depends on it is unknown. Conditions are not evaluated and
functions not called: commands in all branches and functions are returned, marked as conditional.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.jobs.environment import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."`."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+|\\\r?\n|(?<![^\s;&|()])#[^\n]*)"
    r"|<<-?[ \t]*['\"\\]?(?P<document>\w+)['\"]?"
    r"|(?P<redirection>\d*(?:&>>?|<<<|>>|[<>]&|<>|>\||[<>]))"
    r"|(?P<operator>\n|[;&|()]+)"
    r"|(?P<word>(?:[^\s'\"\\;&|()<>]++|\\.|'[^']*+'|\"(?:[^\"\\]++|\\.)*+\")++)",
    re.DOTALL,
)
_PIECE = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|[^'\"\\]+", re.DOTALL)
_ESCAPE = re.compile(r'\\(?:\n|([$`"\\]))')
_SUBSTITUTION = re.compile(r"(?:\$|(=)|[<>])\(")
_PARENTHESIS = re.compile(
    r"\\.|'[^']*+'|\"(?:[^\"\\$]++|\\.|\$(?!\())*+\"|(?P<open>\()|(?P<close>\))", re.DOTALL
)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
_OPENS = frozenset({"if", "while", "until", "{", *_HEADS})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", *_OPENS, *_CLOSES})
_DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})

Variables = dict[str, str]
"""Variables by name; a `$` stands in what only a shell knows."""


class ShellCommand(NamedTuple):
    """A command that a script runs."""

    words: tuple[str, ...]
    own: Mapping[str, str] = {}
    """Variables set in front of it."""
    is_conditional: bool = False


def commands(text: str, variables: Variables) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed.
    """
    words: list[str] = []
    depth = 0
    for word in _words(_without_substitutions(text)):
        if word is not None:
            words.append(word)
            continue
        while words and words[0] in _KEYWORDS:
            keyword = words.pop(0)
            depth = max(0, depth + (keyword in _OPENS) - (keyword in _CLOSES))
            if keyword in _HEADS:
                if keyword != "case" and words:  # the variable has another value each time
                    variables[words[0]] = _unknown(words[0])
                words.clear()
        if found := _run(words, variables, is_conditional=depth > 0):
            yield found
        words.clear()


def _without_substitutions(text: str) -> str:
    """Return a script with `$_` for `$(...)`, backquotes and elements of arrays: no command in them
    starts the job.
    """
    text = re.sub(r"`[^`\n]*`", "$_", text)
    pieces, at = [], 0
    while begin := _SUBSTITUTION.search(text, at):
        depth = 0
        for match in _PARENTHESIS.finditer(text, begin.end() - 1):
            depth += bool(match["open"]) - bool(match["close"])
            if depth == 0:
                break
        else:
            break
        pieces += [text[at : begin.start()], begin[1] or "", "$_"]
        at = match.end()
    return "".join((*pieces, text[at:]))


def _words(text: str) -> Iterator[str | None]:
    """Yield the words of a script, and None at each end of a command."""
    at, document, is_target = 0, "", False
    while match := _TOKEN.match(text, at):
        kind, found, at = match.lastgroup, match[0], match.end()
        if kind == "document":
            document = match["document"]
        elif kind == "redirection":
            is_target = True
        elif kind == "word":
            if not is_target:
                yield found
            is_target = False
        elif kind == "operator":
            yield None
            if found == "\n" and document:
                end = re.compile(rf"^\t*{document}$", re.MULTILINE).search(text, at)
                at, document = end.end() if end else len(text), ""
    if at < len(text):
        message = f"line {text.count(chr(10), 0, at) + 1}: No closing quotation"
        raise ValueError(message)
    yield None


def _plain(word: str) -> str:
    """Return a word without its quotes."""

    def piece(match: re.Match[str]) -> str:
        single, double, escaped = match.groups()
        if double is not None:
            return _ESCAPE.sub(lambda one: one[1] or "", double)
        if escaped is not None:
            return "" if escaped == "\n" else escaped
        return match[0] if single is None else single

    return _PIECE.sub(piece, word)


def _expanded(word: str, variables: Variables) -> list[str]:
    """Return the words that a word becomes with the variables that are known."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0])

    if _VARIABLE.fullmatch(word):  # without quotes, a shell splits it
        return _VARIABLE.sub(value, word).split()
    plain = _plain(word)
    return [plain if len(plain) > MAX_VALUE else _VARIABLE.sub(value, plain)]


def _run(words: list[str], variables: Variables, *, is_conditional: bool) -> ShellCommand | None:
    """Assign what a command assigns, or return the command."""
    own: Variables = {}
    declares = words[:1] and words[0] in _DECLARES
    at = int(bool(declares))
    while at < len(words) and ((match := _ASSIGNMENT.match(words[at])) or declares):
        if match:
            value = " ".join(_expanded(match[3], variables))
            is_known = len(value) <= MAX_VALUE and not match[2]
            own[match[1]] = value if is_known else _unknown(match[1])
        at += 1
    if at == len(words):
        for name, new in own.items():
            is_only = not is_conditional and variables.get(name, new) == new
            variables[name] = new if is_only else _unknown(name)
        return None
    found = tuple(text for word in words[at:] for text in _expanded(word, variables))
    if found[:1] in {("unset",), ("read",), ("mapfile",), ("readarray",)}:
        variables.update({name: _unknown(name) for name in found[1:]})
        return None
    return ShellCommand(found, own, is_conditional) if found else None


def _unknown(name: str) -> str:
    return f"${{{name[:MAX_VALUE]}}}"
