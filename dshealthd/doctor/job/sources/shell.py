"""The commands of a shell script, as far as its text says.

A branch of `if` or `case` whose test is known runs or not; commands in all other branches are
returned, marked as conditional.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.doctor.job.sources import branches, expansion, programs
from dshealthd.jobs.environment import MAX_VALUE

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.expansion import Variables
    from dshealthd.doctor.job.sources.programs import Read

MAX_NESTING = 8
"""Maximum nesting of functions and commands, such as `srun bash -c "torchrun ..."`."""
MAX_COMMANDS = 1 << 14
"""Maximum commands of a script, with those of a function each time it is called."""
_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"\\]?)([^\s\d'\"\\;&|()<>][^\s'\"\\;&|()<>]*)")
READ = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""A variable that a shell reads, unless it has a default."""
_LEFT = re.compile(r"\\\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""One that a backslash leaves to another shell."""
_SETS = re.compile(r"(?:(?<![\w.$/{-])(?=\w+\+?=)|\b(?:for|read(?:\s+-\w+)*)\s+)([A-Za-z_]\w*)")
"""One that a script sets."""
_NAMES = re.compile(r"\w+")
_ARITHMETIC = re.compile(r"(?<![\w$({])(?<!for )\(\(([^()\n;']*(?:\([^()\n]*\)[^()\n;']*)*)\)\)")
"""A command that computes."""
_FOR = re.compile(r"\bfor\s*\(\(\s*(\w*)[^;\n]{0,99};[^;\n]{0,99};[^\n]{0,99}?\)\)")
"""A loop that counts, by its variable."""
_LET = re.compile(r"\s*(\w+)\s*([-+*/%]?=(?!=)|\+\+|--)\s*(.*)", re.DOTALL)
_GROUP = re.compile(r"(?:\)|(?<=[\s;])\})(?:[^\n;&|]|(?<=>)&)*(?<!>)&(?![&>])")
"""The end of a group that runs in the background."""
_EXPORTS = re.compile(r"\s-\w*x")
"""An option with which a declaration exports."""
_SETS_DEFAULT = re.compile(r"\$\{([A-Za-z_]\w*):?=([^${}'\"\\]*)\}")
_DIGITS = "123456789"
_POSITIONAL = frozenset({*_DIGITS, "#", "@[@]"})
"""Variables that stand for the arguments of a script or function."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*(?:\[\w+\])?)(\+?)=(.*)", re.DOTALL)
_TO_END = re.compile("-[a-z]*d")
"""An option of `read` with which it reads all lines, if its value is empty."""
MAX_ARRAY = 1 << 16
"""Maximum characters of an array; the arguments of Megatron are some 4,000."""
_DECLARES = frozenset({"export", "declare", "readonly", "local", "typeset"})


class ShellCommand(NamedTuple):
    """A command that a script runs."""

    words: tuple[str, ...]
    own: Mapping[str, str] = {}
    """Variables set in front of it."""
    is_conditional: bool = False
    in_loop: bool = False
    end: str = "\n"
    """The operator that ends it; empty in a loop whose passes may be groups in the background."""
    document: str = ""
    """Its here-document."""
    target: str = ""
    """The file into which its output goes."""
    reads: frozenset[str] = frozenset()
    """Variables that texts in its words and here-document read, which are left to another shell,
    and do not set; also texts that it has from variables.
    """


class Shell:
    """A shell that reads a script: what it has set, and the functions that it knows.

    A function is read where it is called, as is a file that is sourced, the text of `eval`, and
    what another shell runs at once; programs that run a command where it is are left out.
    """

    def __init__(self, variables: Variables, read: Read = programs.no_file) -> None:
        """Take the variables at its begin, which always have their values so far."""
        self.variables = variables
        self.assigned: set[str] = set()
        """Variables that it has set."""
        self.exported: set[str] = set()
        """Variables that its programs get."""
        self._read = read
        self._defined: set[str] = set()
        """Functions that it defines; their tokens are variables, as exported ones are in bash."""
        self._named: set[str] = set()
        """Names in its commands, some of which call functions in another shell."""
        self._exports = False
        self._has_groups = False
        """Whether groups of its commands run in the background."""
        self._left = MAX_COMMANDS
        self._nesting = 0
        self._is_sure = True
        """Whether the function or file that is read is certainly run."""
        self._local: set[str] = set()
        """Variables of the function that is read."""
        self._texts: dict[str, frozenset[str]] = {}
        """What texts in variables read."""

    def commands(self, text: str) -> Iterator[ShellCommand]:
        """Yield the commands of a script in its order, at last those of functions that it does not
        call itself.

        ValueError, after the commands before it, for what cannot be parsed.
        """
        self._has_groups = _GROUP.search(text) is not None
        yield from self._commands(self._tokens(text))
        self._is_sure = False
        while unread := self._defined - self._named:
            for name in sorted(unread):
                self._named.add(name)
                for one in self._commands(self._function(name) or ()):
                    yield one._replace(is_conditional=True)

    def _function(self, name: str) -> Iterable[tuple[str, str]] | None:
        found = self.variables.get(expansion.FUNCTION + name)
        if found is None:
            return None
        tokens = (
            one.partition(expansion.OF_TOKEN) for one in found.split(expansion.BETWEEN_TOKENS)
        )
        return [(word, kind) for kind, _, word in tokens]

    def _tokens(self, text: str) -> Iterator[tuple[str, str]]:
        text = _FOR.sub(r"for \1", text)
        text = _ARITHMETIC.sub(lambda match: f"let '{match[1]}'", text)
        text = expansion.without_substitutions(text, self.variables)
        self._texts |= {
            name: _left_in(document, is_closed=name.startswith(expansion.CLOSED))
            for name, document in self.variables.items()
            if name.startswith((expansion.CLOSED, expansion.OPEN))
        }
        return expansion.words(text)

    def _commands(self, tokens: Iterable[tuple[str, str]]) -> Iterator[ShellCommand]:
        words: list[str] = []
        opened: list[branches.CompoundCommand] = []
        is_chained = False
        extra: dict[str, str] = {}
        variables = self.variables
        rest = iter(tokens)
        for word, kind in rest:
            if kind == "word" and word == "{" and (name := _defined(words)):
                variables[expansion.FUNCTION + name] = expansion.BETWEEN_TOKENS.join(
                    f"{kind}{expansion.OF_TOKEN}{word}" for word, kind in _body(rest)
                )
                self._defined.add(name)
                words.clear()
            elif kind == "word":
                words.append(word)
            elif kind == "target":
                extra[kind] = " ".join(expansion.expanded(word, variables))
            elif kind != "operator":
                quoted = partial(expansion.quoted, variables=variables)
                document = word if kind == "closed" else expansion.IN_QUOTES.sub(quoted, word)
                extra |= {"document": document, "text": word, "quote": kind.removeprefix("open")}
            if kind == "operator" and word.startswith("()") and len(words) == 1:
                words.append("()")
            if kind != "operator" or _defined(words):
                continue
            self._enter(words, opened)
            is_pattern = bool(opened) and opened[-1].takes(
                [text for one in words for text in expansion.expanded(one, variables)], word
            )
            if is_pattern or any(block.runs is False for block in opened):
                words.clear()
            is_conditional = not all(block.runs for block in opened)
            if words and opened and opened[-1].runs is None:
                is_plain = {block.keyword for block in opened} <= {"if", "{"} and word in {
                    ";",
                    "\n",
                }
                opened[-1].tests.append(branches.tested(words, variables) if is_plain else None)
            is_cat = word == "|" and words == ["cat"]  # for the next command
            if words[:1] == ["read"] and "text" in extra and any(map(_TO_END.fullmatch, words)):
                kept = expansion.kept(extra["text"].strip(), extra["quote"], variables)
                words = [f"{words[-1]}={kept}"]
            left = {one: _left_by(one, self._texts) for one in words}
            of_document = _left_in(extra.get("text", ""), is_closed=bool(extra.get("quote")))
            is_sure = self._is_sure and not is_conditional and not is_chained
            found = self._run(words, is_conditional=not is_sure)
            if found:
                in_loop = any(block.keyword in branches.LOOPS for block in opened)
                made = found._replace(
                    is_conditional=is_conditional,
                    in_loop=in_loop,
                    end="" if in_loop and self._has_groups and word != "&" else word,
                    document=extra.get("document", ""),
                    target=_target(found.words) or extra.get("target", ""),
                    reads=of_document.union(*left.values()),
                )
                if made.words[0] == "set":
                    self._texts["@"] = made.reads
                yield from self._started(made, is_sure=is_sure)
            else:
                self._texts |= {
                    one[1]: left[one[0]] | of_document
                    for one in map(_ASSIGNMENT.match, words)
                    if one
                }
            words.clear()
            if not is_cat:
                extra.clear()
            is_chained = word in {"&&", "||"}

    def _enter(self, words: list[str], opened: list[branches.CompoundCommand]) -> None:
        """Take keywords from the begin of a command, which open and close blocks."""
        while words and words[0] in branches.KEYWORDS:
            keyword = words.pop(0)
            if keyword in branches.OPENS:
                opened.append(
                    branches.CompoundCommand(keyword, runs=True if keyword == "{" else None)
                )
            elif keyword in branches.CLOSES and opened:
                opened.pop()
            elif opened:
                opened[-1].enter(keyword)
            if keyword == "case":
                opened[-1].subject = " ".join(
                    text for one in words[:1] for text in expansion.expanded(one, self.variables)
                )
                opened[-1].patterns = []
                del words[:2]
            elif keyword in branches.HEADS:
                if words:  # the variable has another value each time
                    self.variables[words[0]] = expansion.unknown(words[0])
                words.clear()

    def _started(self, command: ShellCommand, *, is_sure: bool) -> Iterator[ShellCommand]:
        """Yield what a command runs: itself, or the commands of a function, file or other shell."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {MAX_COMMANDS} commands")
        own = dict(command.own)
        words = tuple(programs.unwrapped(command.words, own, programs.HERE))
        command = command._replace(words=words, own=own)
        name, arguments, before = words[0], words[1:], dict(self.variables)
        self._named.update(*map(_NAMES.findall, command.words))
        tokens = function = self._function(name)
        if name == "eval":
            tokens = self._tokens(" ".join(arguments))
        elif name in {"source", "."} and arguments:
            text, arguments = self._read(arguments[0]), arguments[1:]
            tokens = self._tokens(text) if text else None
        elif (found := programs.text_of_shell(words, command.document, self._read)) and found[0]:
            self.variables |= own
            tokens, arguments = self._tokens(found[0]), tuple(found[1])
        if tokens is None or self._nesting >= MAX_NESTING:
            yield command
            return
        is_other = function is None and name not in {"eval", "source", "."}
        outer = self._is_sure, self._local, self._texts.get("@", frozenset())
        self._is_sure, self._local, self._texts["@"] = is_sure, set(), command.reads
        if name != "eval" and (arguments or name not in {"source", "."}):
            self.place(arguments)
        self._nesting += 1
        for one in self._commands(tokens):
            yield one._replace(
                own={**own, **one.own},
                is_conditional=one.is_conditional or command.is_conditional,
                in_loop=one.in_loop or command.in_loop,
                target=one.target or command.target,
                end=command.end
                if command.end in {"&", "|", "\n"} and one.end in "\n;"
                else one.end,
            )
        self._nesting -= 1
        own_names = {*_POSITIONAL, *(self._local if function else ())}
        self._is_sure, self._local, self._texts["@"] = outer
        if is_other:  # what another shell sets is its own
            own_names = {*self.variables, *before}
        for key in () if name == "eval" else own_names:
            self.variables.pop(key, None)
            if key in before:
                self.variables[key] = before[key]

    def place(self, arguments: Sequence[str]) -> None:
        """Set the positional parameters, which stay unknown where some of them are."""
        for key in _POSITIONAL:
            self.variables.pop(key, None)
        if not any(one.startswith(("$@", "$*", "${@", "${*")) for one in arguments):
            self.variables |= dict.fromkeys(_DIGITS, "")
            self.variables |= dict(zip(_DIGITS, arguments, strict=False))
            self.variables |= {"@[@]": expansion.BETWEEN.join(arguments), "#": str(len(arguments))}

    def _run(self, words: list[str], *, is_conditional: bool) -> ShellCommand | None:
        """Assign what a command assigns, or return the command."""
        own: Variables = {}
        variables = self.variables
        declares = words[:1] and words[0] in _DECLARES
        if declares and "=" in words[2:]:
            return ShellCommand(tuple(words), own, is_conditional)
        at = int(bool(declares))
        while at < len(words) and ((match := _ASSIGNMENT.match(words[at])) or declares):
            name = match[1] if match else words[at]
            made = _assigned(match, {**variables, **own}, is_conditional) if match else {}
            for one, value in made.items():
                limit = MAX_ARRAY if one.endswith("[@]") else MAX_VALUE
                own[one] = value if len(value) <= limit else expansion.unknown(one)
            if declares and words[0] not in {"export", "readonly"}:
                self._local.add(name)
            if declares and (words[0] == "export" or _EXPORTS.search(" ".join(words))):
                self.exported.add(name)
            at += 1
        if at == len(words):
            self._set(own, is_conditional=is_conditional)
            return None
        found = tuple(expansion.all_expanded(words[at:], variables))
        defaults = [one for word in words[at:] for one in _SETS_DEFAULT.finditer(word)]
        new = {one[1]: one[2] for one in defaults if not variables.get(one[1])}
        if defaults:
            self._set(new, is_conditional=is_conditional)
        if (sets := _sets(found, variables)) is not None:
            self._set(sets, is_conditional=is_conditional)
            return None
        if found[:1] == ("set",):
            self._exports = {"-a": True, "+a": False}.get(found[-1], self._exports)
            if "--" in found:
                self.place(found[found.index("--") + 1 :])
        if found[:1] == ("shift",) and "@[@]" in variables:
            self.place(variables["@[@]"].split(expansion.BETWEEN)[1:])
        return ShellCommand(found, own, is_conditional) if found else None

    def _set(self, new: Mapping[str, str], *, is_conditional: bool) -> None:
        for name, value in new.items():
            is_known = not is_conditional or name.endswith("[@]")
            is_known = is_known or self.variables.get(name) == value
            self.variables[name] = value if is_known else expansion.unknown(name)
            self.assigned.add(name)
            if self._exports:
                self.exported.add(name)


def commands(
    text: str,
    variables: Variables,
    read: Read = programs.no_file,
    arguments: Sequence[str] = (),
) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order, as `Shell` does."""
    made = Shell(variables, read)
    if arguments:
        made.place(arguments)
    return made.commands(text)


def _target(words: Sequence[str]) -> str:
    """Return the file into which `tee` writes its input; empty for another program."""
    files = (word for word in words[1:] if not word.startswith("-"))
    return next(files, "") if words[0] == "tee" else ""


def _defined(words: Sequence[str]) -> str:
    """Return the function whose definition words begin; empty for none."""
    match words:
        case [name, "()"] | ["function", name] | ["function", name, "()"]:
            return name
    return ""


def _body(tokens: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the tokens up to the brace that closes a function, and a last operator."""
    depth = 1
    for word, kind in tokens:
        if kind == "word":
            depth += (word == "{") - (word == "}")
        if not depth:
            break
        yield word, kind
    yield "\n", "operator"


def _sets(words: Sequence[str], variables: Variables) -> Mapping[str, str] | None:
    """Return the variables that a command sets; None if it sets none."""
    program, rest = "".join(words[:1]), words[1:]
    if program == "let":
        new = {}
        for one in rest:
            match = _LET.fullmatch(one)
            if match and match[2] == "=":
                new[match[1]] = expansion.computed(match[3], variables)
            elif match:
                new[match[1]] = expansion.unknown(match[1])
        return new
    is_printf = program == "printf" and rest[:1] == ("-v",)
    if is_printf or program in {"unset", "read", "mapfile", "readarray"}:
        return {name: expansion.unknown(name) for name in rest if name.isidentifier()}
    return None


def _left_in(document: str, *, is_closed: bool) -> frozenset[str]:
    """Return the variables that a here-document leaves to another shell, and does not set."""
    pattern = READ if is_closed else _LEFT
    return frozenset({*pattern.findall(document)} - {*_SETS.findall(document)})


def _left_by(word: str, texts: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the variables that a word leaves to another shell, unless its text sets them."""
    pieces = expansion.PIECE.findall(word)
    closed = "\n".join(single for single, *_ in pieces)
    read = {*READ.findall(closed), *_LEFT.findall(word)} - {*_SETS.findall(word)}
    named = [m for _, *rest in pieces for one in rest for m in expansion.VARIABLE.finditer(one)]
    return frozenset(read).union(*(texts.get(m["bare"] or m["name"], ()) for m in named))


def without_documents(text: str, *, of_others: bool = False) -> str:
    """Return a script with an empty line for each line of its here-documents; `of_others` leaves
    those that a shell reads, or expands for another program.
    """
    lines, end = [], ""
    for line in text.split("\n"):
        lines.append("" if end else line)
        if end:
            end = "" if line.lstrip("\t") == end else end
        elif match := _DOCUMENT.search(line):
            is_left = not of_others or (match[1] and programs.leaves_to_others(line))
            end = match[2] if is_left else ""
    return "\n".join(lines)


def without_comments(text: str) -> str:
    """Return a script without its lines that are comments."""
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))


def _assigned(
    match: re.Match[str],
    variables: Variables,
    is_conditional: bool,  # noqa: FBT001 - of a caller
) -> Mapping[str, str]:
    """Return what a word assigns, by name: of an array, all elements."""
    name, adds, text = match.groups()
    if not (text.startswith("(") and text.endswith(")")):
        text = f'"{text}"' if expansion.VARIABLE.fullmatch(text) else text  # nothing is split here
        value = " ".join(expansion.expanded(text, variables))
        return {name: variables.get(name, "") * bool(adds) + value}
    inside = (word for word, kind in expansion.words(text[1:-1]) if kind == "word")
    elements = list(expansion.all_expanded(inside, variables))
    name += "[@]"
    if is_conditional:
        elements = [expansion.UNKNOWN]
    if adds and name in variables:
        elements = [*filter(None, variables[name].split(expansion.BETWEEN)), *elements]
    return {name: expansion.BETWEEN.join(elements)}
