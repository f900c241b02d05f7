"""The commands of a shell script, as far as its text says.

Quotes, comments and here-documents are read as bash reads them (bash(1), "QUOTING"), and a variable
or an array that the script sets once, to plain text, has that value. What else a shell would expand
stays as written, with its `$`, and whatever depends on it is unknown: so does what is quoted, for
another shell to expand, perhaps one on each node (`PER_NODE`). A branch of an `if` whose test is
known runs or not; functions are not called: commands in functions and all other branches are
returned, marked as conditional.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.jobs.environment import MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_COMMAND = 1 << 21
"""Maximum characters of a command; the kernel runs none that is longer (execve(2))."""
MAX_NESTING = 4
"""Maximum nesting of commands, such as `srun bash -c "torchrun ..."`."""
_QUOTED = r"\\.|'[^']*+'|\"(?:[^\"\\]++|\\.)*+\""
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+|\\\r?\n|(?<![^\s;&|()])#[^\n]*)"
    r"|<<-?[ \t]*(?P<quote>['\"\\]?)(?P<document>\w+)['\"]?"
    r"|(?P<redirection>\d*(?:&>>?|<<<|>>|[<>]&|<>|>\||[<>]))"
    r"|(?P<operator>\n|[;&|()]+)"
    rf"|(?P<word>\w+\+?=\((?:[^()'\"\\#]++|{_QUOTED}|(?<=\s)#[^\n]*+|#)*+\)"
    rf"|(?:[^\s'\"\\;&|()<>]++|{_QUOTED})++)",
    re.DOTALL,
)
_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*['\"\\]?(\w+)")
_PIECE = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^'\"\\]+)", re.DOTALL)
_SUBSTITUTION = re.compile(r"[$<>]\(")
_WHERE = re.compile(r"\s*(?:which|command\s+-v|type\s+-p)\s+([\w.-]+)\s*")
"""A command that prints where a program is."""
_ECHO = re.compile(r"\s*echo\s+((?!-)[^'\"`|;&<>()\\]*)")
"""A command that prints its own words."""
_CAT = re.compile(
    r"\s*cat\s*<<-?[ \t]*(?P<quote>['\"\\]?)(?P<end>\w+)['\"]?[ \t]*\n(?P<body>.*)\n\t*(?P=end)\s*",
    re.DOTALL,
)
"""A command that prints its here-document."""
_OWN_NAME = re.compile(r"\s*(?:hostname|uname\s+-n)\b(?!.*\b(?:srun|ssh|scontrol)\b)", re.DOTALL)
_OWN_FOLDER = re.compile(
    r"\bdirname\b.*(?:BASH_SOURCE|\$0)|^\s*cd\s+[\"']?(?P<path>\.[\w./-]*)[^&;\n]*(?:&&|;)\s*pwd\b"
)
"""A command that prints the folder of the script, or one below it."""
_RANDOM = re.compile(
    r"\b(?:shuf|mktemp|uuidgen|openssl\s+rand)\b|/dev/u?random|\.bind\(|\bRANDOM\b"
)
"""In a command whose output is another each time."""
_PROCESS = re.compile(r"(?<!\$)\$\$(?![\w${(])")
_NAME = re.compile(r"[A-Za-z_]\w*")
_INSIDE = re.compile(r"\\.|'[^']*+'|\"|[$<>]?\(|\)", re.DOTALL)
"""What opens or closes something in a command whose output is substituted."""
_IN_QUOTED = re.compile(r"\\.|\"|\$\(", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:(?P<bare>\w+)|\{(?P<count>#?)(?P<name>\w+)(?:\[(?P<at>[@*]|\d{1,4})\])?"
    r"(?P<default>:?-[^${}'\"\\]*)?\})"
)
_DEFAULT = re.compile(r"\$\{\w+:?[-+=?]")
_READ = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""A variable that a shell reads, unless it has a default."""
_LEFT = re.compile(r"\\\$\{?([A-Za-z_]\w*)\b(?!:|-|\+|\?)")
"""One that a backslash leaves to another shell."""
_SETS = re.compile(r"(?:(?<![\w.$/{-])(?=\w+\+?=)|\b(?:for|read(?:\s+-\w+)*)\s+)([A-Za-z_]\w*)")
"""One that a script sets."""
_ELEMENTS = re.compile(r"\"\$\{(\w+\[@\])\}\"")
_IN_QUOTES = re.compile(rf"\\(?:\n|(?P<escaped>[$`\"\\]))|{_VARIABLE.pattern}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
PER_NODE = frozenset(
    {
        *("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURMD_NODENAME"),
        *("HOSTNAME", "RANDOM", "BASHPID"),
    }
)
"""Variables that have another value in the shell of each node or task."""
OF_STEP = ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST", "SLURM_STEP_NODELIST")
"""Variables that only srun sets, for its tasks (srun(1))."""
_COMPRESSED = re.compile(r"\$\{?SLURM_(?:JOB_|STEP_)?NODELIST\b(?!:)")
_TO_END = re.compile("-[a-z]*d")
"""An option of `read` with which it reads all lines, if its value is empty."""
_CUTS = re.compile(r"(?:echo|printf|cut|head|tail|awk|sed|tr|cat|sort)(?:\s|$)")
"""A program that takes a part of its input."""
MAX_ARRAY = 1 << 16
"""Maximum characters of an array; the arguments of Megatron are some 4,000."""
GIVEN = re.compile(
    r"\d+|SLURM|PMI|OMPI|PBS|LSB|PET_|VC_|LWS_|JOB|RANK|NODE_RANK|LOCAL_|WORLD_SIZE|MASTER_|CUDA_"
)
"""Beginnings of variables that a scheduler, an operator or a launcher may set."""
_COMPUTED = "COMPUTED_"
"""Begins the variable that stands for an arithmetic expansion: the rest is its text in hex."""
_CLOSED, _OPEN = "CLOSED_DOCUMENT_", "OPEN_DOCUMENT_"
"""Begin the variable that stands for a here-document, which is in quotes or not."""
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNKNOWN = "$_"
_BETWEEN = "\0"
"""Between the elements of an array, which is kept as the variable `NAME[@]`."""
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

Variables = dict[str, str]
"""Variables by name; a `$` stands in what only a shell knows."""


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


@dataclass(slots=True)
class _Substitution:
    """A command whose output is substituted, so far; or, outside of all, the script."""

    begin: str = ""
    next: re.Pattern[str] = _SUBSTITUTION
    depth: int = 0
    pieces: list[str] = field(default_factory=list)


def commands(text: str, variables: Variables) -> Iterator[ShellCommand]:
    """Yield the commands of a script in its order; `variables` always has their values so far.

    ValueError, after the commands before it, for what cannot be parsed.
    """
    words: list[str] = []
    opened: list[_Block] = []
    is_chained = False
    found: ShellCommand | None
    extra: dict[str, str] = {}
    script = _without_substitutions(text, variables)
    texts = {  # what texts in variables read
        name: _left_in(document, is_closed=name.startswith(_CLOSED))
        for name, document in variables.items()
        if name.startswith((_CLOSED, _OPEN))
    }
    for word, kind in _words(script):
        if kind == "word":
            words.append(word)
        elif kind == "target":
            extra[kind] = " ".join(_expanded(word, variables))
        elif kind != "operator":
            quoted = partial(_quoted, variables=variables)
            document = word if kind == "closed" else _IN_QUOTES.sub(quoted, word)
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
                    variables[words[0]] = _unknown(words[0])
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
            words = [f"{words[-1]}={_kept(extra['text'].strip(), extra['quote'], variables)}"]
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


def _kept(document: str, quote: str, variables: Variables) -> str:
    """Keep a here-document, and return the variable that stands for it."""
    if len(document) > MAX_VALUE:
        return _UNKNOWN
    name = f"{_CLOSED if quote else _OPEN}{len(variables)}"
    variables[name] = document
    return f"${{{name}}}"


def _left_in(document: str, *, is_closed: bool) -> frozenset[str]:
    """Return the variables that a here-document leaves to another shell, and does not set."""
    pattern = _READ if is_closed else _LEFT
    return frozenset({*pattern.findall(document)} - {*_SETS.findall(document)})


def _left_by(word: str, texts: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the variables that a word leaves to another shell, unless its text sets them."""
    pieces = _PIECE.findall(word)
    closed = "\n".join(single for single, *_ in pieces)
    read = {*_READ.findall(closed), *_LEFT.findall(word)} - {*_SETS.findall(word)}
    named = [m for _, *rest in pieces for one in rest for m in _VARIABLE.finditer(one)]
    return frozenset(read).union(*(texts.get(m["bare"] or m["name"], ()) for m in named))


def _tested(words: Sequence[str], variables: Variables) -> bool | None:
    """Return what a test of known texts says; None for another."""
    names = {match["name"] for word in words for match in _VARIABLE.finditer(word)}
    if words[0] not in {"[", "[[", "test"} or any(
        _DEFAULT.search(word) and not names <= variables.keys() for word in words
    ):
        return None  # the environment may have what it has a default for
    last = len(words) - (words[0] != "test")
    found = [one for word in words[1:last] for one in _expanded(word, variables)]
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


def _without_substitutions(text: str, variables: Variables) -> str:
    """Return a script with a variable for each `$(...)` and pair of backquotes: no command in them
    starts the job.
    """
    text = _PROCESS.sub("${BASHPID}", text)
    text = re.sub(
        r"`([^`\n]*)`", lambda match: _substituted(match[1], variables, is_quoted=True), text
    )
    opened = [_Substitution()]
    at = 0
    while match := opened[-1].next.search(text, at):
        inner, found = opened[-1], match[0]
        inner.pieces.append(text[at : match.start()])
        at = match.end()
        if len(found) > 1 and found.endswith("("):
            opened.append(_Substitution(found, next=_INSIDE))
            continue
        if found == '"':
            inner.next = _INSIDE if inner.next is _IN_QUOTED else _IN_QUOTED
        inner.depth += (found == "(") - (found == ")")
        if inner.depth < 0:
            opened.pop()
            is_quoted = opened[-1].next is _IN_QUOTED
            found = _substituted("".join(inner.pieces), variables, is_quoted=is_quoted)
        opened[-1].pieces.append(found)
    opened[-1].pieces.append(text[at:])
    return "".join(piece for one in opened for piece in (one.begin, *one.pieces))


def _substituted(command: str, variables: Variables, *, is_quoted: bool) -> str:
    """Return what stands for the output of a command: a variable of the node where it is one's."""
    if path := _WHERE.fullmatch(command):
        return path[1]
    if cat := _CAT.fullmatch(command):
        return _kept(cat["body"].rstrip("\n"), cat["quote"], variables)
    if said := _ECHO.fullmatch(command):
        return said[1] if is_quoted else f'"{said[1]}"'
    if kind := _list_of(command):
        return f"${{{kind}}}"
    if _OWN_NAME.match(command):
        return "${HOSTNAME}"
    if own := _OWN_FOLDER.search(command):
        return own["path"] or "."
    if command.startswith("(") and command.endswith(")") and len(command) < MAX_VALUE // 4:
        return f"${{{_COMPUTED}{command[1:-1].encode().hex()}}}"
    return "${RANDOM}" if _RANDOM.search(command) else _UNKNOWN


def _list_of(command: str) -> str:
    """Return a variable that stands for the list of hosts that a command prints: that of Slurm, or
    one that nothing sets; empty where it prints none, or none is known.

    A part of a compressed list still is one, unless its brackets or columns are treated.
    """
    programs = re.split(r"\|&?", command.strip())
    if re.fullmatch(r"hostname\s+(-I|--all-ip-addresses)", programs[0].strip()):
        return "" if programs[1:] else "ALL_OWN_ADDRESSES"
    if re.fullmatch(r"scontrol\s+show\s+hostnames?\b[^;&]*", programs[0].strip()):
        return "" if programs[1:] else "NAMES_OF_ALL_NODES"
    treats = re.search(r"[\[\]]|substr|\s-c|--char", command)
    is_cut = all(_CUTS.match(one.strip()) for one in programs) and not treats
    return "SLURM_JOB_NODELIST" if is_cut and _COMPRESSED.search(command) else ""


def is_of_task(name: str) -> bool:
    """Return whether each node or task has its own value of a variable."""
    return name in PER_NODE or name in OF_STEP


def _computed(text: str, variables: Variables) -> str:
    """Return the value of an arithmetic expansion; of one that is unknown, the variable of the node
    on which it depends.
    """
    names = {name for name in _NAME.findall(text) if name not in variables}
    known = _VARIABLE.sub(lambda match: _value(match, variables), text)
    known = _NAME.sub(lambda match: variables.get(match[0], match[0]) or "0", known)
    try:
        return str(_number(ast.parse(known.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        if names & {"SLURM_JOB_ID", "SLURM_JOBID"} and not re.search("[%/&]", text):
            return "${SLURM_JOB_ID}"  # plus something
        # a quotient may be common
        of_node = names & PER_NODE if "/" not in text else ()
        return f"${{{min(of_node)}}}" if of_node else _UNKNOWN


def _number(node: ast.expr) -> int:
    """Return what an expression of whole numbers is; ValueError for another."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    message = "no expression of whole numbers"
    raise ValueError(message)


def _value(match: re.Match[str], variables: Variables) -> str:
    """Return the value of a variable: its default, where nothing else sets it."""
    name, default = match["bare"] or match["name"], match["default"]
    if match["at"] and (known := variables.get(f"{name}[@]")) is not None:
        elements = known.split(_BETWEEN)
        if not match["count"] and not match["at"].isdecimal():
            return " ".join(elements)
        if "$" in known:  # which may be several
            return match[0]
        at = len(elements) if match["count"] else int(match["at"])
        return str(at) if match["count"] else "".join(elements[at : at + 1])
    if match["at"]:
        return match[0]
    if match["count"]:
        return match[0]
    if name.startswith(_COMPUTED):
        return _computed(bytes.fromhex(name.removeprefix(_COMPUTED)).decode(), variables)
    found = variables.get(name)
    if found and name.startswith(_OPEN):
        others = {name: one for name, one in variables.items() if not name.startswith(_OPEN)}
        return _IN_QUOTES.sub(partial(_quoted, variables=others), found)
    if found is None and (default is None or GIVEN.match(name)):
        return match[0]
    if default is not None and (found is None or (not found and default.startswith(":"))):
        return default.lstrip(":").removeprefix("-")
    return found or ""


def _words(text: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a script, targets of its output, here-documents, which are closed in
    quotes or open, and operators, which end a command, each with its kind.
    """
    at, behind, redirection = 0, 0, ""
    while match := _TOKEN.match(text, at):
        kind, found, at = match.lastgroup, match[0], match.end()
        if match["document"]:
            begin = max(behind, text.find("\n", at) + 1 or len(text))
            end = re.compile(rf"^\t*{match['document']}$", re.MULTILINE).search(text, begin)
            behind = end.end() if end else len(text)
            yield (
                text[begin : end.start() if end else behind],
                "closed" if match["quote"] else "open",
            )
        elif kind == "redirection":
            redirection = found
        elif kind == "word":
            if not redirection:
                yield found, kind
            elif redirection.lstrip("1") in {">", ">>", ">|"}:
                yield found, "target"
            redirection = ""
        elif kind == "operator":
            redirection = ""
            at = max(at, behind) if found == "\n" else at
            yield found, kind
    if at < len(text):
        message = f"line {text.count(chr(10), 0, at) + 1}: No closing quotation"
        raise ValueError(message)
    yield "\n", "operator"


def _quoted(match: re.Match[str], variables: Variables) -> str:
    """Return what stands in double quotes or a here-document for a variable or an escape."""
    return (match["escaped"] or "") if match[0].startswith("\\") else _value(match, variables)


def _expanded(word: str, variables: Variables) -> list[str]:
    """Return the words that a word becomes with the variables that are known, without quotes.

    What single quotes or a backslash protect keeps its `$`.
    """
    value, quoted = (partial(one, variables=variables) for one in (_value, _quoted))

    def piece(match: re.Match[str]) -> str:
        single, double, escaped, bare = match.groups()
        if double is not None:
            return _IN_QUOTES.sub(quoted, double)
        if bare is not None:
            return _VARIABLE.sub(value, bare)
        return (single or "") if escaped is None else escaped.replace("\n", "")

    if array := _ELEMENTS.fullmatch(word):
        known = variables.get(array[1], word[1:-1])
        return known.split(_BETWEEN) if known else []
    if _VARIABLE.fullmatch(word):  # without quotes, a shell splits it
        return _VARIABLE.sub(value, word).split()
    return [word if len(word) > MAX_VALUE and "$" in word else _PIECE.sub(piece, word)]


def _all_expanded(words: Iterable[str], variables: Variables) -> Iterator[str]:
    """Yield the words that words become; ValueError if they are more than a command can have."""
    total = 0
    for word in words:
        for text in _expanded(word, variables):
            total += len(text) + 1
            if total > MAX_COMMAND:
                message = f"a command is longer than {MAX_COMMAND >> 20} MiB"
                raise ValueError(message)
            yield text


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
            own[name] = value if len(value) <= limit else _unknown(name)
        at += 1
    if at == len(words):
        for name, new in own.items():
            is_known = not is_conditional or name.endswith("]") or variables.get(name) == new
            variables[name] = new if is_known else _unknown(name)
        return None
    found = tuple(_all_expanded(words[at:], variables))
    if found[:1] in {("unset",), ("read",), ("mapfile",), ("readarray",)}:
        variables.update({name: _unknown(name) for name in found[1:]})
        return None
    return ShellCommand(found, own, is_conditional) if found else None


def _assigned(
    match: re.Match[str], variables: Variables, *, is_conditional: bool
) -> tuple[str, str]:
    """Return the name that a word assigns and its value: of an array, all elements."""
    name, adds, text = match.groups()
    if not (text.startswith("(") and text.endswith(")")):
        text = f'"{text}"' if _VARIABLE.fullmatch(text) else text  # nothing is split here
        return name, variables.get(name, "") * bool(adds) + " ".join(_expanded(text, variables))
    inside = (word for word, kind in _words(text[1:-1]) if kind == "word")
    elements = list(_all_expanded(inside, variables))
    name += "[@]"
    if is_conditional:
        elements = [_UNKNOWN]
    if adds and name in variables:
        elements = [*filter(None, variables[name].split(_BETWEEN)), *elements]
    return name, _BETWEEN.join(elements)


def _unknown(name: str) -> str:
    return f"${{{name[:MAX_VALUE]}}}"
