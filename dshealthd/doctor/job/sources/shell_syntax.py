"""The grammar of shell scripts: words, commands and functions, before any expansion.

bash(1), "SHELL GRAMMAR" and "QUOTING". Expansions such as `$(...)` are parts of a word, so that a
program inside one is never taken for one that the script starts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_OPERATOR = re.compile(r"&>>|<<<|<<-|;;&|<<|>>|&&|\|\||;;|;&|&>|>&|<&|<>|>\||\|&|[;&|()<>\n]")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_PLAIN = re.compile(r"[^ \t\r\n'\"\\$`;&|()<>]+")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_EXPANSION = re.compile(r"\$(?:\w+|[@*#?$!-])")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_BRACKET = re.compile(r"\\.|'[^']*'|\$[({]|[(){}\"]", re.DOTALL)
_PAIRS = {"(": ")", "{": "}", '"': '"'}
_REDIRECTIONS = frozenset({"&>>", "<<<", "<<-", "<<", ">>", "&>", ">&", "<&", "<>", ">|", "<", ">"})
_OPENS = frozenset({"if", "while", "until", "for", "case", "select"})
_CLOSES = frozenset({"fi", "done", "esac"})
_KEYWORDS = frozenset({"then", "elif", "else", "do", "!", "time", "{", "}", *_OPENS, *_CLOSES})
_HEADS = frozenset({"for", "case", "select"})
"""Keywords whose own words are no command."""
_OPEN = "No closing quotation"


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
                    unknown = WordPart("$(loop)", expands=True)
                    assignment = Word((WordPart(f"{words[0].plain}="), unknown))
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
        parts: list[WordPart] = []
        text = self._text
        while self._at < len(text):
            letter = text[self._at]
            if match := _PLAIN.match(text, self._at):
                self._move(match.end())
                parts.append(WordPart(match[0]))
                is_array = self._at < len(text) and text[self._at] == "(" and len(parts) == 1
                if is_array and ASSIGNMENT.fullmatch(match[0]):
                    return Word(tuple(parts), self._array())
            elif letter == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                self._move(min(self._at + 2, len(text)))
                if escaped != "\n":
                    parts.append(WordPart(escaped, is_quoted=True))
            elif letter == "'" or text.startswith("$'", self._at):
                start = text.index("'", self._at) + 1
                end = text.find("'", start)
                if end < 0:
                    raise ValueError(_OPEN)
                parts.append(WordPart(text[start:end], is_quoted=True))
                self._move(end + 1)
            elif letter == '"' or text.startswith('$"', self._at):
                self._move(self._at + 1 + (letter == "$"))
                parts += self._quoted()
            elif letter in "$`" or text.startswith(("<(", ">("), self._at):
                parts.append(self._expansion(is_quoted=False))
            else:
                break
        return Word(tuple(parts))

    def _quoted(self) -> list[WordPart]:
        """Return the parts between double quotes, of which the first is behind."""
        parts = [WordPart("", is_quoted=True)]
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
                    parts.append(WordPart(kept, is_quoted=True))
            elif letter in "$`":
                parts.append(self._expansion(is_quoted=True))
            elif match := _IN_QUOTES.match(text, self._at):
                parts.append(WordPart(match[0], is_quoted=True))
                self._move(match.end())
        raise ValueError(_OPEN)

    def _expansion(self, *, is_quoted: bool) -> WordPart:
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
            return WordPart("$", is_quoted=True)
        self._move(end)
        return WordPart(text[start:end], is_quoted, expands=True)

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


def parse(text: str, first: int = 1) -> Iterator[Parsed]:
    """Yield commands and functions; ValueError, at the end, for what cannot be parsed."""
    tokens, problem = _Lexer(text, first).tokens()
    yield from _Parser().parse(tokens)
    if problem:
        raise ValueError(problem)
