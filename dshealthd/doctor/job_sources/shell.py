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
from typing import NamedTuple

from dshealthd.jobs.environment import MAX_VALUE

MAX_TEXT = 1 << 16
"""Maximum characters of a command after expansion, as variables may refer to each other."""
MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."` and functions."""
MAX_COMMANDS = 20_000
"""Maximum commands of a script, as functions may call each other."""
_OPERATOR = re.compile(r"&>>|<<<|<<-|;;&|<<|>>|&&|\|\||;;|;&|&>|>&|<&|<>|>\||\|&|[;&|()<>\n]")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_PLAIN = re.compile(r"[^ \t\r\n'\"\\$`;&|()<>]+")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_EXPANSION = re.compile(r"\$(?:\w+|[@*#?$!-])")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACED = re.compile(r"(\w+|@|\*)(\[[@*]\]|\[\d{1,4}\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_BRACKET = re.compile(r"\\.|'[^']*'|\$[({]|[(){}\"]", re.DOTALL)
_PAIRS = {"(": ")", "{": "}", '"': '"'}
_REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", "&>", ">&", "<&", "<>", ">|", "<", ">"})
_OPENS = frozenset({"if", "while", "until", "for", "case", "select"})
_CLOSES = frozenset({"fi", "done", "esac"})
_KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", "{", "}", *_OPENS, *_CLOSES})
_HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
_DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})
_OPEN = "No closing quotation"

Value = str | tuple[str, ...] | None
"""A variable, an array, or a variable that only a shell knows."""


class Part(NamedTuple):
    """A stretch of a word."""

    text: str
    is_quoted: bool = False
    expands: bool = False
    """Whether it is an expansion: `$name`, `${...}`, `$(...)`."""


class Word(NamedTuple):
    """A word before expansion."""

    parts: tuple[Part, ...]
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
    here: str = ""
    """The here-document of `<<`."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """One simple command, or the definition of a function."""

    line: int
    words: tuple[Word, ...] = ()
    here: str = ""
    """Its here-document."""
    is_conditional: bool = False
    function: str = ""
    body: tuple[Parsed, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a script runs, after expansion."""

    line: int
    words: tuple[str, ...]
    own: Mapping[str, str] = field(default_factory=dict)
    """Variables set in front of it."""
    here: str = ""
    is_conditional: bool = False


def commands(text: str, variables: dict[str, Value]) -> Iterator[Command]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed or grows beyond a limit.
    """
    yield from _Shell(variables).run(_parse(text), (), 0)


class _Shell:
    """The state of a shell that only assigns variables."""

    def __init__(self, variables: dict[str, Value]) -> None:
        self._variables = variables
        self._functions: dict[str, tuple[Parsed, ...]] = {}
        self._count = 0

    def run(
        self, parsed: Iterator[Parsed] | Sequence[Parsed], given: tuple[str, ...], nesting: int
    ) -> Iterator[Command]:
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
                    body = _parse(" ".join(words[1:]), one.line)
                yield from self.run(body, tuple(words[1:]), nesting + 1)
            else:
                texts = {
                    name: value if isinstance(value, str) else f"${{{name}}}"
                    for name, value in own.items()
                }
                yield Command(one.line, tuple(words), texts, one.here, one.is_conditional)

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
            first = word.parts[0] if word.parts else Part("")
            match = None if first.is_quoted or first.expands else _ASSIGNMENT.match(first.text)
            if match is None:
                if skip:
                    continue
                return found, words[at:]
            name = match[1]
            value: Value
            begin = Part(first.text[match.end() :])
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


class _Parser:
    """Joins tokens to commands, and commands to functions."""

    def __init__(self) -> None:
        self._made: list[Parsed] = []
        self._outer: list[tuple[str, list[Parsed]]] = []
        """Open functions, each with the commands before it."""
        self._braces = [0]
        """Open groups, in each open function."""
        self._name = ""
        """The function of which the body comes next."""
        self._depth = 0
        """Open conditions and loops."""

    def parse(self, tokens: Sequence[Token]) -> list[Parsed]:
        """Return commands and functions in their order."""
        words: list[Word] = []
        here, line, at = "", 1, 0
        while at < len(tokens):
            token = tokens[at]
            at += 1
            if token.word is not None:
                line = line if words else token.line
                words.append(token.word)
            elif token.operator in _REDIRECTIONS:
                here = token.here or here
                if words and words[-1].plain.isdecimal() and token.is_glued:
                    words.pop()  # a file descriptor, as in `2>log`
                at += at < len(tokens) and tokens[at].word is not None
            else:
                is_header = token.operator == "(" and len(words) in (1, 2) and at < len(tokens)
                if is_header and tokens[at].operator == ")":
                    self._name = words[-1].plain
                    at += 1
                else:
                    self._command(line, words, here)
                words, here = [], ""
        self._command(line, words, here)
        while self._outer:
            self._made = self._outer.pop()[1]
        return self._made

    def _command(self, line: int, words: list[Word], here: str) -> None:
        """Add a simple command, without the keywords before it."""
        if len(words) > 1 and words[0].plain == "function":
            self._name = words[1].plain
            words = words[2:]
        while words and (keyword := words[0].plain) in _KEYWORDS:
            words = words[1:]
            self._depth = max(0, self._depth + (keyword in _OPENS) - (keyword in _CLOSES))
            if keyword == "{":
                self._open()
            elif keyword == "}":
                self._close(line)
            elif keyword in _HEADS:
                if keyword != "case" and words and words[0].plain.isidentifier():
                    # the variable of a loop has another value each time
                    unknown = Part("$(loop)", expands=True)
                    assignment = Word((Part(f"{words[0].plain}="), unknown))
                    self._made.append(Parsed(line, (assignment,)))
                return
        if words:
            self._made.append(Parsed(line, tuple(words), here, self._depth > 0))

    def _open(self) -> None:
        if self._name:
            self._outer.append((self._name, self._made))
            self._made = []
            self._braces.append(0)
            self._name = ""
        else:
            self._braces[-1] += 1

    def _close(self, line: int) -> None:
        if self._braces[-1]:
            self._braces[-1] -= 1
        elif self._outer:
            self._braces.pop()
            name, before = self._outer.pop()
            body = tuple(self._made)
            self._made = [*before, Parsed(line, function=name, body=body)]


class _Lexer:
    """Splits a script into words and operators."""

    def __init__(self, text: str, line: int) -> None:
        self._text = text
        self._at = 0
        self._line = line
        self._tokens: list[Token] = []
        self._waiting: list[tuple[int, str, bool]] = []
        """Here-documents of this line: their token, their last line, and whether tabs go."""

    def tokens(self) -> tuple[list[Token], str]:
        """Return the tokens, and what is wrong after the last; empty if nothing is."""
        try:
            while self._at < len(self._text):
                self._next()
        except ValueError as error:
            while self._tokens and self._tokens[-1].operator != "\n":
                self._tokens.pop()  # a shell runs nothing of a line that it cannot parse
            return self._tokens, str(error)
        return self._tokens, ""

    def _next(self) -> None:
        text, before = self._text, self._at
        if match := _BLANK.match(text, self._at):
            self._move(match.end())
        elif text[self._at] == "#":
            end = text.find("\n", self._at)
            self._at = len(text) if end < 0 else end
        elif text.startswith("((", self._at):  # arithmetic, which starts nothing
            self._move(_end(text, self._at + 1, self._line))
        elif text.startswith(("<(", ">("), self._at) or not (
            match := _OPERATOR.match(text, self._at)
        ):
            line = self._line
            word = self._word()
            self._tokens.append(Token(line, word))
        else:
            operator = match[0]
            glued = bool(self._tokens) and before > 0 and not text[before - 1].isspace()
            self._tokens.append(Token(self._line, None, operator, glued))
            self._move(match.end())
            if operator in ("<<", "<<-"):
                self._start_here(has_tabs=operator == "<<-")
            elif operator == "\n":
                self._read_here()

    def _move(self, end: int) -> None:
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def _word(self) -> Word:
        parts: list[Part] = []
        text = self._text
        while self._at < len(text):
            letter = text[self._at]
            if match := _PLAIN.match(text, self._at):
                self._move(match.end())
                parts.append(Part(match[0]))
                is_array = self._at < len(text) and text[self._at] == "(" and len(parts) == 1
                if is_array and _ASSIGNMENT.fullmatch(match[0]):
                    return Word(tuple(parts), self._array())
            elif letter == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                self._move(min(self._at + 2, len(text)))
                if escaped != "\n":
                    parts.append(Part(escaped, is_quoted=True))
            elif letter == "'" or text.startswith("$'", self._at):
                start = text.index("'", self._at) + 1
                end = text.find("'", start)
                if end < 0:
                    raise ValueError(_OPEN)
                parts.append(Part(text[start:end], is_quoted=True))
                self._move(end + 1)
            elif letter == '"' or text.startswith('$"', self._at):
                self._move(self._at + 1 + (letter == "$"))
                parts += self._quoted()
            elif letter in "$`" or text.startswith(("<(", ">("), self._at):
                parts.append(self._expansion(is_quoted=False))
            else:
                break
        return Word(tuple(parts))

    def _quoted(self) -> list[Part]:
        """Return the parts between double quotes, of which the first is behind."""
        parts = [Part("", is_quoted=True)]
        text = self._text
        while self._at < len(text):
            letter = text[self._at]
            if letter == '"':
                self._at += 1
                return parts
            if letter == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                self._move(min(self._at + 2, len(text)))
                if escaped != "\n":
                    kept = escaped if escaped in '$`"\\' else f"\\{escaped}"
                    parts.append(Part(kept, is_quoted=True))
            elif letter in "$`":
                parts.append(self._expansion(is_quoted=True))
            elif match := _IN_QUOTES.match(text, self._at):
                parts.append(Part(match[0], is_quoted=True))
                self._move(match.end())
        raise ValueError(_OPEN)

    def _expansion(self, *, is_quoted: bool) -> Part:
        text, start = self._text, self._at
        if text[start] == "`":
            end = text.find("`", start + 1) + 1
            if not end:
                raise ValueError(_OPEN)
        elif text.startswith(("$(", "${", "<(", ">("), start):
            end = _end(text, start + 1, self._line)
        elif match := _EXPANSION.match(text, start):
            end = match.end()
        else:  # a dollar sign alone
            self._at += 1
            return Part("$", is_quoted=True)
        self._move(end)
        return Part(text[start:end], is_quoted, expands=True)

    def _array(self) -> tuple[Word, ...]:
        """Return the elements of an array; the position is that of its parenthesis."""
        end = _end(self._text, self._at, self._line)
        tokens, problem = _Lexer(self._text[self._at + 1 : end - 1], self._line).tokens()
        if problem:
            raise ValueError(problem)
        self._move(end)
        return tuple(token.word for token in tokens if token.word is not None)

    def _start_here(self, *, has_tabs: bool) -> None:
        """Note the here-document whose last line is the next word."""
        if match := _BLANK.match(self._text, self._at):
            self._move(match.end())
        token = len(self._tokens) - 1
        word = self._word()
        self._tokens.append(Token(self._line, word))
        self._waiting.append((token, "".join(part.text for part in word.parts), has_tabs))

    def _read_here(self) -> None:
        """Read the here-documents that begin on this line."""
        for token, last, has_tabs in self._waiting:
            lines: list[str] = []
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._move(min(end + 1, len(self._text)))
                if (line.lstrip("\t") if has_tabs else line) == last:
                    break
                lines.append(line)
            self._tokens[token] = self._tokens[token]._replace(here="\n".join(lines))
        self._waiting = []


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


def _parse(text: str, first: int = 1) -> Iterator[Parsed]:
    """Yield commands and functions; ValueError, at the end, for what cannot be parsed."""
    tokens, problem = _Lexer(text, first).tokens()
    yield from _Parser().parse(tokens)
    if problem:
        raise ValueError(problem)
