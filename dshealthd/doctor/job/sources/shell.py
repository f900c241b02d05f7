"""The commands of a shell script, as far as they are known without running anything.

Quotes, variables, arrays and substitutions are read as bash reads them (bash(1), "QUOTING" and
"EXPANSION"), so that a program inside `$(...)` is never taken for one that the script starts. What
only a shell can compute, such as `$(hostname)`, stays as written, with its `$`, and whatever
depends on it is unknown. Conditions are not evaluated and functions not called: commands in all
branches and functions are returned, marked as conditional.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dshealthd.jobs.environment import MAX_VALUE

MAX_TEXT = 1 << 16
"""Maximum characters of a command after expansion, as variables may refer to each other."""
MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."`."""
_EXPANSION = r"(?P<expansion>\$(?:\w+|[@*#?$!-])|`[^`]*`)"
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+)"
    r"|(?P<operator>&>>|<<<|<<-|;;&|<<|>>|&&|\|\||;;|;&|&>|>&|<&|<>|>\||\|&|[;&|()\n]|[<>](?!\())"
    r"|(?P<plain>[^\s'\"\\$`;&|()<>]+)"
    r"|\\(?P<escaped>\r?\n|.|$)"
    r"|\$?'(?P<single>[^']*)'"
    r'|\$?(?P<double>")'
    rf"|{_EXPANSION}|(?P<bracket>\$[({{]|[<>]\()|(?P<dollar>\$)",
    re.DOTALL,
)
_IN_QUOTES = re.compile(
    r'(?P<double>")|\\(?P<escaped>.|$)|(?P<plain>[^"\\$`]+)'
    rf"|{_EXPANSION}|(?P<bracket>\$[({{])|(?P<dollar>\$)",
    re.DOTALL,
)
_BRACKET = re.compile(r"\\.|'[^']*'|\$[({]|[(){}\"]", re.DOTALL)
_PAIRS = {"(": ")", "{": "}", '"': '"'}
_REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", "&>", ">&", "<&", "<>", ">|", "<", ">"})
_HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
_OPENS = frozenset({"if", "while", "until", "{", *_HEADS})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", *_OPENS, *_CLOSES})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED = re.compile(r"(\w+|@|\*)(\[[@*]\]|\[\d{1,4}\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})

Value = str | tuple[str, ...] | None
"""A variable, an array, or a variable that only a shell knows."""


class WordPart(NamedTuple):
    """A stretch of a word."""

    text: str
    is_quoted: bool = False
    expands: bool = False
    """Whether it is an expansion: `$name`, `${...}`, `$(...)`."""


class Word(NamedTuple):
    """A word before expansion."""

    parts: tuple[WordPart, ...]
    array: tuple[Word, ...] | None = None
    """The elements of `name=(...)`; `parts` are then the name."""

    @property
    def plain(self) -> str:
        """The word if nothing in it is quoted or expanded; otherwise empty."""
        simple = not any(part.is_quoted or part.expands for part in self.parts)
        return "".join(part.text for part in self.parts) if simple and self.array is None else ""


class Token(NamedTuple):
    """A word, or else an operator."""

    line: int
    word: Word | None = None
    operator: str = ""
    is_glued: bool = False
    """Whether the operator directly follows a word."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command that a script runs, after expansion."""

    line: int
    words: tuple[str, ...]
    own: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of it."""
    is_conditional: bool = False


def commands(text: str, variables: dict[str, Value]) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed or grows beyond a limit.
    """
    tokens: list[Token] = []
    problem = None
    try:
        tokens.extend(_tokens(text))
    except (ValueError, ArithmeticError) as error:
        problem = error
        while tokens and tokens[-1].operator != "\n":
            tokens.pop()  # a shell runs nothing of a line that it cannot parse
    shell = _Shell(variables)
    for line, words, is_conditional in _parsed(tokens):
        yield from shell.run(line, words, is_conditional=is_conditional)
    if problem is not None:
        raise problem


def _tokens(text: str) -> Iterator[Token]:
    """Yield the words and operators of a script; ValueError for a quote or bracket without end."""
    at, line, begun = 0, 1, 1
    parts: list[WordPart] | None = None  # of the word at this place
    is_quoted = False
    waiting: list[tuple[str, bool]] = []  # last lines of here-documents, and whether tabs go
    operator = ""
    while at < len(text):
        start = at
        if parts is None:
            begun = line
            if text[at] == "#":
                at = text.find("\n", at)
                if at < 0:
                    return
            elif text.startswith("((", at):  # arithmetic, which starts nothing
                at = _end(text, at + 1, line)
                line += text.count("\n", start, at)
                continue
        match = (_IN_QUOTES if is_quoted else _TOKEN).match(text, at)
        if match is None:
            break
        kind, found, at = match.lastgroup, match[0], match.end()
        if kind == "bracket":
            at = _end(text, at - 1, line)
            found = text[match.start() : at]
        if kind in ("blank", "operator"):
            is_glued = parts is not None
            if parts is not None:
                if operator in ("<<", "<<-"):
                    waiting.append(("".join(part.text for part in parts), operator == "<<-"))
                yield Token(begun, Word(tuple(parts)))
                parts, operator = None, ""
            if kind == "operator":
                operator = found
                yield Token(line, None, found, is_glued)
                if found == "\n":
                    at = _after_documents(text, at, waiting)
        elif not (kind == "escaped" and match["escaped"].endswith("\n")):
            parts = parts or []
            parts.append(_part(match, found, is_quoted=is_quoted))
            is_quoted ^= kind == "double"
        line += text.count("\n", start, at)
    if at < len(text) or is_quoted:
        message = "No closing quotation"
        raise ValueError(message)
    if parts is not None:
        yield Token(begun, Word(tuple(parts)))


def _part(match: re.Match[str], found: str, *, is_quoted: bool) -> WordPart:
    """Return the part of a word that was found; two quotes are a word, even if nothing is
    inside.
    """
    kind = match.lastgroup
    if kind in ("expansion", "bracket"):
        return WordPart(found, is_quoted, expands=True)
    if kind == "plain":
        return WordPart(found, is_quoted)
    if kind == "escaped" and is_quoted and match["escaped"] not in '$`"\\':
        return WordPart(found, is_quoted=True)
    text = {"double": "", "dollar": "$"}.get(kind or "", match[kind or 0])
    return WordPart(text, is_quoted=True)


def _after_documents(text: str, at: int, waiting: list[tuple[str, bool]]) -> int:
    """Return where the script goes on after the here-documents that begin on a line."""
    for last, has_tabs in waiting:
        for found in re.compile(r"([^\n]*)(?:\n|\Z)").finditer(text, at):
            at = found.end()
            if (found[1].lstrip("\t") if has_tabs else found[1]) == last:
                break
    waiting.clear()
    return at


def _end(text: str, start: int, line: int) -> int:
    """Return the end of what the bracket at `start` opens; ValueError if it is not closed."""
    waiting: list[str] = []
    for match in _BRACKET.finditer(text, start):
        found = match[0]
        if waiting and waiting[-1] == '"':
            if found == '"':
                waiting.pop()
            elif found in ("$(", "${"):
                waiting.append(_PAIRS[found[-1]])
        elif found[0] == "'" or found[0] == "\\":
            continue
        elif waiting and found == waiting[-1]:
            waiting.pop()
        elif found[-1] in _PAIRS and (found != "{" or not waiting):
            waiting.append(_PAIRS[found[-1]])
        if not waiting:
            return match.end()
    message = f"line {line}: No closing bracket"
    raise ValueError(message)


def _parsed(tokens: Sequence[Token]) -> Iterator[tuple[int, Sequence[Word], bool]]:
    """Yield the line and words of each simple command, and whether it is conditional."""
    words: list[Word] = []
    line, depth = 1, 0
    waiting = iter((*tokens, Token(0, None, "\n")))
    for token in waiting:
        if token.word is not None:
            line = line if words else token.line
            words.append(token.word)
        elif token.operator in _REDIRECTIONS:
            if words and words[-1].plain.isdecimal() and token.is_glued:
                words.pop()  # a file descriptor, as in `2>log`
            next(waiting, None)
        elif token.operator == "(" and words:
            if token.is_glued and _ASSIGNMENT.fullmatch(words[-1].plain):
                words[-1] = words[-1]._replace(array=tuple(_elements(waiting)))
            else:  # the name of a function
                words = []
        else:
            if words and words[0].plain == "function":
                words = words[2:]
            while words and (keyword := words[0].plain) in _KEYWORDS:
                words = words[1:]
                depth = max(0, depth + (keyword in _OPENS) - (keyword in _CLOSES))
                if keyword in _HEADS:
                    if keyword != "case" and words and words[0].plain.isidentifier():
                        # the variable of a loop has another value each time
                        unknown = WordPart("$(loop)", expands=True)
                        yield line, [Word((WordPart(f"{words[0].plain}="), unknown))], False
                    words = []
            if words:
                yield line, words, depth > 0
            words = []


def _elements(tokens: Iterator[Token]) -> Iterator[Word]:
    for token in tokens:
        if token.word is not None:
            yield token.word
        elif token.operator == ")":
            return


class _Shell:
    """The state of a shell that only assigns variables."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self._variables = variables

    def run(
        self, line: int, words: Sequence[Word], *, is_conditional: bool
    ) -> Iterator[ShellCommand]:
        """Assign what a command assigns, or yield it."""
        own, rest = self._assignments(words)
        texts = self._expand(rest)
        if not texts or texts[0] in _DECLARES:
            own |= self._assignments(rest[1:] if texts else (), skip=True)[0]
            for name, value in own.items():
                known = self._variables.get(name)
                may_differ = is_conditional and name in self._variables and known != value
                self._variables[name] = None if may_differ else value
        elif texts[0] in ("unset", "read", "mapfile", "readarray"):
            for name in texts[1:]:
                self._variables[name] = "" if texts[0] == "unset" else None
        else:
            values = {
                name: value if isinstance(value, str) else f"${{{name}}}"
                for name, value in own.items()
            }
            yield ShellCommand(line, tuple(texts), values, is_conditional)

    def _assignments(
        self, words: Sequence[Word], *, skip: bool = False
    ) -> tuple[dict[str, Value], Sequence[Word]]:
        """Return the variables that the first words assign, and the rest.

        With `skip`, words that assign nothing, such as options of `export`, are skipped.
        """
        found: dict[str, Value] = {}
        for at, word in enumerate(words):
            first = word.parts[0] if word.parts else WordPart("")
            match = None if first.is_quoted or first.expands else _ASSIGNMENT.match(first.text)
            if match is None:
                if skip:
                    continue
                return found, words[at:]
            name = match[1]
            value: Value
            begin = WordPart(first.text[match.end() :])
            quoted = (part._replace(is_quoted=True) for part in word.parts[1:])
            try:
                value = "".join(self._expand([Word((begin, *quoted))]))
                if word.array is not None:
                    value = tuple(self._expand(word.array))
            except (ValueError, ArithmeticError):  # too long to be a value that matters
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

    def _expand(self, words: Sequence[Word]) -> list[str]:
        """Return words after expansion, as a shell splits them; ValueError beyond MAX_TEXT."""
        found: list[str] = []
        size = 0
        for word in words:
            pieces: list[str] | None = None
            for text, begins in self._pieces(word):
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

    def _pieces(self, word: Word) -> Iterator[tuple[str, bool]]:
        """Yield what the parts of a word become, and whether each begins another word."""
        for part in word.parts:
            value = self._value(part.text) if part.expands else part.text
            if value is None:
                value = part.text if "$" in part.text else f"$({part.text.strip('`')})"
            elif part.expands and not part.is_quoted:
                texts = (value,) if isinstance(value, str) else value
                value = tuple(one for text in texts for one in text.split())
            if isinstance(value, str):
                yield value, False
            else:
                yield from ((text, at > 0) for at, text in enumerate(value))

    def _value(self, raw: str) -> Value:
        """Return what an expansion becomes; None if only a shell knows."""
        if raw.startswith(("$(", "`", "<(", ">(")):
            return None
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        if (match := _BRACED.fullmatch(inner)) is None:
            return None
        name, index, operator, default = match.groups()
        known = self._variables.get(name)
        if isinstance(known, tuple) and index not in {"[@]", "[*]"}:
            at = int(index[1:-1]) if index else 0
            # an unknown element may be several
            is_known = not any("$" in element for element in known)
            known = None if not is_known else known[at] if at < len(known) else ""
        if operator is None or operator.endswith("?"):
            return known
        if operator.endswith("+"):
            return None if known is None else default if known else ""
        if known is not None:
            return default if operator.startswith(":") and not known else known
        if name in self._variables or "$" in default or "`" in default:
            return None
        return str(default.strip("\"'"))
