"""What a shell makes of the words of a script, as far as its text says.

Quotes, comments and here-documents are read as bash reads them (bash(1), "QUOTING"), and a variable
or an array that the script sets once, to plain text, has that value. What else a shell would expand
stays as written, with its `$`, and whatever depends on it is unknown: so does what is quoted, for
another shell to expand, perhaps one on each node (`PER_NODE`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from dshealthd.jobs.environment import MAX_VALUE

MAX_COMMAND = 1 << 21
"""Maximum characters of a command; the kernel runs none that is longer (execve(2))."""
_QUOTED = r"\\.|'[^']*+'|\"(?:[^\"\\]++|\\.)*+\""
_BRACED = rf"\$\{{(?:[^{{}}$'\"\\]++|\$(?!\{{)|{_QUOTED}|\$\{{[^{{}}]*+\}})*+\}}"
"""A variable in braces: blanks and operators in it are a part of its word."""
_TOKEN = re.compile(
    r"(?P<blank>[ \t\r]+|\\\r?\n|(?<![^\s;&|()])#[^\n]*)"
    r"|<<-?[ \t]*(?P<quote>['\"\\]?)(?P<document>[^\s'\"\\;&|()<>]+)['\"]?"
    r"|(?P<redirection>\d*(?:&>>?|<<<|>>|[<>]&|<>|>\||[<>]))"
    r"|(?P<operator>\n|[;&|()]+)"
    rf"|(?P<word>\w+\+?=\((?:[^()'\"\\#]++|{_QUOTED}|(?<=\s)#[^\n]*+|#)*+\)"
    rf"|(?:{_BRACED}|[^\s'\"\\;&|()<>$]++|\$|{_QUOTED})++)",
    re.DOTALL,
)
_TEST_ENDS = re.compile(r"\s\]\](?![^\s;&|)])")
"""The end of `[[`, inside of which operators end no command."""
PIECE = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^'\"\\]+)", re.DOTALL)
_SUBSTITUTION = re.compile(r"[$<>]\(")
_WHERE = re.compile(r"\s*(?:which|command\s+-v|type\s+-p)\s+([\w.-]+)\s*")
"""A command that prints where a program is."""
_ECHO = re.compile(r"\s*echo\s+((?!-)[^'`|;&<>()\\]*)")
"""A command that prints its own words."""
_COUNT = re.compile(r"\s*echo\s+((?!-)[^'`|;&<>()\\]*?)\s*\|\s*wc\s+(?:-w|--words)\s*")
"""A command that counts words."""
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
VARIABLE = re.compile(
    r"\$(?:(?P<bare>\w+|[@*#](?!\w))|\{(?P<count>#?)(?P<name>\w+|[@*#](?=\}))"
    r"(?:\[(?P<at>[@*]|\w{1,64})\])?(?P<default>:?[-=][^${}'\"\\]*)?\})"
)
_ELEMENTS = re.compile(r"\"\$(?:\{(\w+\[@\])\}|@|\{@\})\"")
IN_QUOTES = re.compile(rf"\\(?:\n|(?P<escaped>[$`\"\\]))|{VARIABLE.pattern}")
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
_CUTS = re.compile(r"(?:echo|printf|cut|head|tail|awk|sed|tr|cat|sort)(?:\s|$)")
"""A program that takes a part of its input."""
_GIVEN = re.compile(
    r"\d+|SLURM|PMI|OMPI|PBS|LSB|PET_|VC_|LWS_|JOB|RANK|NODE_RANK|LOCAL_|WORLD_SIZE|MASTER_"
    r"|CUDA_VISIBLE"
)
"""Beginnings of variables that a scheduler, an operator or a launcher may set."""
_COMPUTED = "COMPUTED_"
"""Begins the variable that stands for an arithmetic expansion: the rest is its text in hex."""
_ECHOED = "ECHOED_"
"""Begins the variable that stands for what `echo` prints, likewise."""
_COUNTED = "COUNTED_"
"""Begins the variable that stands for the number of these words, likewise."""
_CALLED = "CALLED_"
"""Begins the variable that stands for what a function prints: the rest is its name."""
FUNCTION = "BASH_FUNC_"
"""Begins the variable that has the tokens of a function."""
BETWEEN_TOKENS, OF_TOKEN = "\x1e", "\x1f"
CLOSED, OPEN = "CLOSED_DOCUMENT_", "OPEN_DOCUMENT_"
"""Begin the variable that stands for a here-document, which is in quotes or not."""
_OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    **{getattr(ast, name.title()): getattr(operator, name) for name in ("eq", "gt", "lt")},
    ast.NotEq: operator.ne,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}
UNKNOWN = "$_"
BETWEEN = "\0"
"""Between the elements of an array, which is kept as the variable `NAME[@]`."""
Variables = dict[str, str]
"""Variables by name; a `$` stands in what only a shell knows."""


@dataclass(slots=True)
class _Substitution:
    """A command whose output is substituted, so far; or, outside of all, the script."""

    begin: str = ""
    next: re.Pattern[str] = _SUBSTITUTION
    depth: int = 0
    pieces: list[str] = field(default_factory=list)


def kept(document: str, quote: str, variables: Variables) -> str:
    """Keep a here-document, and return the variable that stands for it."""
    if len(document) > MAX_VALUE:
        return UNKNOWN
    name = f"{CLOSED if quote else OPEN}{len(variables)}"
    variables[name] = document
    return f"${{{name}}}"


def without_substitutions(text: str, variables: Variables) -> str:
    """Return a script with a variable for each `$(...)` and pair of backquotes: no command in them
    starts the job.
    """
    text = _PROCESS.sub("${BASHPID}", text)
    text = re.sub(r"`([^`\n]*)`", lambda match: _substituted(match[1], variables), text)
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
            found = _substituted("".join(inner.pieces), variables)
        opened[-1].pieces.append(found)
    opened[-1].pieces.append(text[at:])
    return "".join(piece for one in opened for piece in (one.begin, *one.pieces))


def _substituted(command: str, variables: Variables) -> str:
    """Return what stands for the output of a command: a variable of the node where it is one's."""
    if path := _WHERE.fullmatch(command):
        return path[1]
    if cat := _CAT.fullmatch(command):
        return kept(cat["body"].rstrip("\n"), cat["quote"], variables)
    if said := _ECHO.fullmatch(command):
        return f"${{{_ECHOED}{said[1].encode().hex()}}}"
    if counted := _COUNT.fullmatch(command):
        return f"${{{_COUNTED}{counted[1].encode().hex()}}}"
    if kind := _list_of(command):
        return f"${{{kind}}}"
    if _OWN_NAME.match(command):
        return "${HOSTNAME}"
    if own := _OWN_FOLDER.search(command):
        return own["path"] or "."
    if command.startswith("(") and command.endswith(")"):
        return f"${{{_COMPUTED}{command[1:-1].encode().hex()}}}"
    if re.match(r"\s*date\b", command):
        return "${TIME_OF_START}"
    if name := re.fullmatch(rf"\s*({_NAME.pattern})\s*", command):
        return f"${{{_CALLED}{name[1]}}}"
    return "${RANDOM}" if _RANDOM.search(command) else UNKNOWN


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


def computed(text: str, variables: Variables) -> str:
    """Return the value of an arithmetic expansion; of one that is unknown, the variable of the node
    on which it depends.
    """
    names = {name for name in _NAME.findall(text) if name not in variables}
    known = VARIABLE.sub(lambda match: _value(match, variables), text)
    known = _NAME.sub(lambda match: variables.get(match[0], match[0]) or "0", known)
    try:
        return str(_number(ast.parse(known.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
        if names & {"SLURM_JOB_ID", "SLURM_JOBID"} and not re.search("[%/&:]", text):
            return "${SLURM_JOB_ID}"  # plus something
        # a quotient may be common
        of_node = names & PER_NODE if "/" not in text else ()
        return f"${{{min(of_node)}}}" if of_node else UNKNOWN


def _number(node: ast.expr) -> int:
    """Return what an expression of whole numbers is; ValueError for another."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATIONS:
        compare = _OPERATIONS[type(node.ops[0])]
        return int(compare(_number(node.left), _number(node.comparators[0])))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return int(_OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    raise ValueError("no expression of whole numbers")


def _value(match: re.Match[str], variables: Variables) -> str:
    """Return the value of a variable: its default, where nothing else sets it."""
    name, default = match["bare"] or match["name"], match["default"]
    if name in {"@", "*"}:
        return variables.get("@[@]", match[0]).replace(BETWEEN, " ")
    if match["at"] and f"{name}[{match['at']}]" in variables and match["at"] != "@":
        return variables[f"{name}[{match['at']}]"]
    if match["at"] and not match["at"].isdecimal() and match["at"] not in {"@", "*"}:
        return match[0]
    if match["at"] and (known := variables.get(f"{name}[@]")) is not None:
        elements = known.split(BETWEEN)
        if not match["count"] and not match["at"].isdecimal():
            return " ".join(elements)
        if "$" in known:  # which may be several
            return match[0]
        at = len(elements) if match["count"] else int(match["at"])
        return str(at) if match["count"] else "".join(elements[at : at + 1])
    if match["at"] or match["count"]:
        return match[0]
    if name.startswith((_ECHOED, _COUNTED)):
        text = bytes.fromhex(name.removeprefix(_ECHOED).removeprefix(_COUNTED)).decode()
        said = " ".join(part for one in text.split() for part in expanded(one, variables))
        if name.startswith(_ECHOED):
            return said
        return match[0] if "$" in said else str(len(said.split()))
    if name.startswith(_COMPUTED):
        return computed(bytes.fromhex(name.removeprefix(_COMPUTED)).decode(), variables)
    if name.startswith(_CALLED):
        return _printed(variables.get(FUNCTION + name.removeprefix(_CALLED), ""), variables)
    found = variables.get(name)
    if found and name.startswith(OPEN):
        others = {name: one for name, one in variables.items() if not name.startswith(OPEN)}
        return IN_QUOTES.sub(partial(quoted, variables=others), found)
    if found is None and (default is None or _GIVEN.match(name)):
        return match[0]
    if default is not None and (found is None or (not found and default.startswith(":"))):
        return default.lstrip(":")[1:]
    return found or ""


def _printed(tokens: str, variables: Variables) -> str:
    """Return what a function prints that is one `echo`; unknown for another, or one inside it."""
    parts = [one.partition(OF_TOKEN) for one in tokens.split(BETWEEN_TOKENS)]
    kinds = [kind for kind, _, _ in parts]
    named = [word for kind, _, word in parts if kind == "word"]
    inner = "".join("w" if kind == "word" else "o" if kind == "operator" else "-" for kind in kinds)
    is_plain = named[:1] == ["echo"] and not re.match("-[neE]+$", "".join(named[1:2]))
    if not is_plain or not re.fullmatch("o*w+o*", inner):
        return UNKNOWN
    known = {name: one for name, one in variables.items() if not name.startswith(FUNCTION)}
    return " ".join(text for one in named[1:] for text in expanded(one, known))


def words(text: str) -> Iterator[tuple[str, str]]:
    """Yield the words of a script, targets of its output, here-documents, which are closed in
    quotes or open, and operators, which end a command, each with its kind.
    """
    at, behind, redirection, test, ends = 0, 0, "", 0, True
    while match := _TOKEN.match(text, at):
        kind, found, at = match.lastgroup, match[0], match.end()
        if found == "[[" and ends and at > test:
            ending = _TEST_ENDS.search(text, at)
            test, ends = (ending.end() if ending else 0), ending is not None
        if at <= test and kind in {"operator", "redirection"}:
            if found != "\n":
                yield found, "word"
            continue
        if match["document"]:
            begin = max(behind, text.find("\n", at) + 1 or len(text))
            closing = re.escape(match["document"])
            end = re.compile(rf"^\t*{closing}$", re.MULTILINE).search(text, begin)
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
        raise ValueError(f"line {text.count(chr(10), 0, at) + 1}: No closing quotation")
    yield "\n", "operator"


def quoted(match: re.Match[str], variables: Variables) -> str:
    """Return what stands in double quotes or a here-document for a variable or an escape."""
    return (match["escaped"] or "") if match[0].startswith("\\") else _value(match, variables)


def expanded(word: str, variables: Variables) -> list[str]:
    """Return the words that a word becomes with the variables that are known, without quotes.

    What single quotes or a backslash protect keeps its `$`.
    """
    value, within = (partial(one, variables=variables) for one in (_value, quoted))

    def piece(match: re.Match[str]) -> str:
        single, double, escaped, bare = match.groups()
        if double is not None:
            return IN_QUOTES.sub(within, double)
        if bare is not None:
            return VARIABLE.sub(value, bare)
        return (single or "") if escaped is None else escaped.replace("\n", "")

    if array := _ELEMENTS.fullmatch(word):
        known = variables.get(array[1] or "@[@]", word[1:-1])
        return known.split(BETWEEN) if known else []
    if VARIABLE.fullmatch(word):  # without quotes, a shell splits it
        return VARIABLE.sub(value, word).split()
    return [word if len(word) > MAX_VALUE and "$" in word else PIECE.sub(piece, word)]


def all_expanded(words: Iterable[str], variables: Variables) -> Iterator[str]:
    """Yield the words that words become; ValueError if they are more than a command can have."""
    total = 0
    for word in words:
        for text in expanded(word, variables):
            total += len(text) + 1
            if total > MAX_COMMAND:
                raise ValueError(f"a command is longer than {MAX_COMMAND >> 20} MiB")
            yield text


def unknown(name: str) -> str:
    """Return the value of a variable that only a shell knows."""
    return f"${{{name[:MAX_VALUE]}}}"
