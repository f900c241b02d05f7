"""What the tests notice: `python -m tests.mutations [--count 30] [--seed 1] [PATH …]`.

Changes numbers, comparisons, conditions, orders and guards of the product in a copy of the
checkout, one at a time, and runs the nearest tests. What none of them notices needs a case on
either side of it, or is not needed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dshealthd.symptoms import all_symptoms
from tests.schedule import TABLE, recorded

ROOT = Path(__file__).parents[1]
SLOW = {"alertmanager", "deploy", "faults", "hardware", "lab", "nccl", "neighbors", "soak"}
"""Folders of tests that take long."""
BUDGET = 12
"""Seconds of tests for a mutation, as `durations.txt` counts them: half as many in truth."""
LONGER = 128
"""As many of those that are left out for their length, for what none of the others notices."""
SCENES = "tests/findings/test_scenes.py"
UNRECORDED = 1
"""Seconds of a file that is not there; most of these take less."""
SECONDS = 900.0
"""For all of them; what hangs is noticed."""
LIMITS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
REVERSED: dict[type[ast.cmpop], str] = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<",
}  # fmt: skip
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}
TIME = re.compile(
    r"\b(now|monotonic|time|elapsed|age|since|until|deadline|seconds|wall|silence|overdue)\b"
)
"""A time, which no clock meets exactly: the side matters, the limit itself does not."""
SAID = re.compile(r"(_?log(ger)?|LOG)\.|warnings\.|(\w*\.)?(add_argument|round|print)\b")
"""Calls whose arguments are read by people alone."""
READ = {"__repr__", "__str__"}
AT_ONCE = re.compile(r"_?(CHUNK|BUFFER|PIECE)")
"""Constants of how much is read at once: what is read is the same."""


class Mutation(NamedTuple):
    """A piece of a file, and what takes its place."""

    kind: str
    file: Path
    line: int
    scope: str
    """The function, or the constant."""
    begin: int
    end: int
    text: str


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield the kind of a mutation, the piece that it replaces, and by what."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            is_time = TIME.search(ast.unparse(node).replace("_", " "))
            other = (REVERSED if is_time else LIMITS).get(type(operator)) or LIMITS[type(operator)]
            yield "comparison", node, f"({ast.unparse(left)} {other} {ast.unparse(right)})"
        case ast.BoolOp(values=values):
            word = " and " if isinstance(node.op, ast.Or) else " or "
            yield "condition", node, f"({word.join(f'({ast.unparse(one)})' for one in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "condition", node, f"bool({ast.unparse(operand)})"
        case ast.Call(func=ast.Name(id="sorted")):
            yield "order", node, f"{ast.unparse(node)}[::-1]"
        case ast.Call(func=ast.Name(id=name)) if name in OTHERS:
            yield "order", node.func, OTHERS[name]
        case ast.If(test=test, body=[ast.Return() | ast.Continue() | ast.Raise()], orelse=[]):
            yield "guard", test, "False"
        case ast.Constant(value=int() | float() as value) if value not in {0, 1}:
            yield "number", node, f"(2 * {value} + 1)"
            yield "number", node, f"({value} {'//' if isinstance(value, int) else '/'} 2)"


def pieces(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield what decides, and the function or constant that it is in: not what is only read."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = scope if node.name == "__init__" else node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign) and not node.col_offset:
        scope = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    yield scope, node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            is_type = name in {"annotation", "returns", "slice"}
            is_said = isinstance(child, ast.Call) and SAID.match(ast.unparse(child.func))
            is_read = scope in READ or isinstance(child, ast.JoinedStr) or is_said
            is_same = bool(AT_ONCE.fullmatch(scope))
            if isinstance(child, ast.AST) and not (is_type or is_read or is_same):
                yield from pieces(child, scope)


def modules(path: str) -> list[Path]:
    """Return those of a folder, or the module."""
    place = ROOT / path
    return [place] if place.is_file() else [*place.rglob("*.py")]


def mutations(file: Path) -> Iterator[Mutation]:
    """Yield those of a module."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for scope, node in pieces(ast.parse(source)):
        for kind, place, text in changes(node):
            if isinstance(place, ast.expr) and place.end_lineno:
                begin = starts[place.lineno - 1] + place.col_offset
                end = starts[place.end_lineno - 1] + (place.end_col_offset or 0)
                yield Mutation(kind, file, place.lineno, scope, begin, end, text)


def drawn(every: Sequence[Mutation], count: int, seed: int) -> list[Mutation]:
    """Return some of them, as many of one kind as of another."""
    source, kinds = random.Random(seed), defaultdict(list)
    for mutation in every:
        kinds[mutation.kind].append(mutation)
    for each in kinds.values():
        source.shuffle(each)
    order = [kind for _ in range(count) for kind in source.sample(sorted(kinds), len(kinds))]
    return [kinds[kind].pop() for kind in order[:count] if kinds[kind]]


def naming(file: Path) -> re.Pattern[str]:
    """Return how a module is imported."""
    parent, name = re.escape(".".join(file.parent.parts)), re.escape(file.stem)
    return re.compile(rf"{parent}\.{name}\b|from {parent} import (?:\([^)]*|[^\n]*)\b{name}\b")


@functools.cache
def texts(folder: str) -> dict[Path, str]:
    """Return the modules of a folder of the checkout."""
    return {
        path.relative_to(ROOT): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def importing(folder: str, imports: Iterable[re.Pattern[str]]) -> dict[Path, str]:
    """Return the modules of a folder that import one of some modules."""
    wanted = [*imports]
    found = texts(folder).items()
    return {file: text for file, text in found if any(one.search(text) for one in wanted)}


def naming_tests(path: str, text: str, piece: str) -> list[str]:
    """Return the tests of a file that name a piece."""
    named = re.compile(rf"\b{re.escape(piece)}\b")
    return [
        f"{path}::{one.name}"
        for one in ast.parse(text).body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        and one.name.startswith("test_")
        and named.search(ast.unparse(one))
    ]


def nearest(mutation: Mutation) -> tuple[list[list[str]], list[list[str]]]:
    """Return the files of tests of a module, those that import it, of those that import it, that
    import one of these, and of its folder: in this order, and those that name the piece first. The
    first takes at most twice the budget, unless it is the module's own; of those that take more
    than what is left, tests that name the piece. With the first, the scenes of the findings that
    the piece yields. And the files that are left out for their length.
    """
    file, seconds = mutation.file, recorded(TABLE)
    found: list[tuple[list[bool], int, str, str]] = []
    place, own = file.parts[1:-1], naming(mutation.file)
    users = {
        (*folders, f"test_{user.stem}")
        for user in importing("dshealthd", [own])
        for folders in (user.parts[1:-1], user.parts[1:-2])
    }
    direct = importing("tests", [own])
    hops = [*direct, *importing("dshealthd", [own])]
    indirect = importing("tests", [naming(hop) for hop in hops if "test_" not in hop.name])
    for path, text in texts("tests").items():
        folders = path.parts[1:-1]
        if SLOW & {*folders[:1]} or not path.name.startswith("test_"):
            continue
        is_own = folders in {place, place[:-1]} and path.stem == f"test_{file.stem}"
        is_near = bool(folders) and folders in {place, place[:-1]}
        uses = path in direct, (*folders, path.stem) in users, path in indirect
        if is_own or any(uses) or is_near:
            is_named = re.search(rf"\b{re.escape(mutation.scope)}\b", text)
            order = [not one for one in (is_own, *uses, is_named)]
            found.append((order, seconds.get(str(path), UNRECORDED), str(path), text))
    kept: list[str] = []
    larger: list[str] = []
    longer: list[str] = []
    left, more = BUDGET, LONGER
    for (is_other, *_), taken, name, text in sorted(found):
        if taken <= (left if kept else 2 * BUDGET) or not is_other:
            left -= taken if kept else 0
            kept.append(name)
            continue
        larger += naming_tests(name, text, mutation.scope)
        if taken <= more:
            more -= taken
            longer.append(name)
    kept += larger[: max(left // UNRECORDED, not kept)]
    # The first alone: it notices most, and takes a fraction of the time to begin.
    runs = [run for run in (kept[:1], *scenes(mutation), kept[1:]) if run]
    return runs, [longer] if longer else []


def scenes(mutation: Mutation) -> list[list[str]]:
    """Return how the scenes of the findings that a function yields are run, or its module."""
    whole = ast.parse((ROOT / mutation.file).read_bytes())
    functions = (one for one in ast.walk(whole) if isinstance(one, ast.FunctionDef))
    piece = next((one for one in functions if one.name == mutation.scope), whole)
    for part in (piece, whole):
        named = {*re.findall(r"Dshealthd\w+", ast.unparse(part))}
        symptoms = all_symptoms().items()
        slugs = [slug for slug, one in symptoms if named & {each.name for each in one.findings}]
        if slugs and mutation.file.parts[1] == "findings":
            return [[SCENES, "-k", " or ".join(slugs)]]
    return []


def failed(copy: Path, runs: Sequence[Sequence[str]], broken: Collection[str] = ()) -> list[str]:
    """Return how the test is run that fails in a copy of the checkout, or nothing.

    Not those that are `broken` without a mutation, too.
    """
    environment = os.environ | {"PYTHONPATH": str(copy)}
    for run in runs:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-rfE", *run]
        command += [f"--deselect={test}" for test in broken]
        with subprocess.Popen(
            command, cwd=copy, env=environment, text=True, stdout=-1, stderr=-2, process_group=0
        ) as ran:
            try:
                output, _ = ran.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(ran.pid, signal.SIGKILL)
                return [*run]
        if ran.returncode not in {0, 5}:  # 5: none is left of its tests
            one = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)?)", output, re.MULTILINE)
            return [one[1], *run[1:]] if one and "-k" in run else [one[1]] if one else [*run]
    return []


def noticing(
    copy: Path, mutation: Mutation, runs: Sequence[Sequence[str]], broken: set[str]
) -> list[str]:
    """Return how the test is run that fails with a mutation and not without it, or nothing; add
    those that fail without it to the `broken`.
    """
    place, text = copy / mutation.file, mutation.text.encode()
    old = place.read_bytes()
    while True:
        place.write_bytes(old[: mutation.begin] + text + old[mutation.end :])
        one = failed(copy, runs, broken)
        place.write_bytes(old)
        if not one or not failed(copy, [one]):
            return one
        broken |= {*one[:1]}


def judged(copy: Path, mutation: Mutation, broken: set[str]) -> tuple[str, list[str]]:
    """Return whether a mutation is noticed, and how the test is run that notices it."""
    near, longer = nearest(mutation)
    if one := noticing(copy, mutation, near, broken):
        return "noticed", one
    if one := noticing(copy, mutation, longer, broken):
        return "noticed by a longer test", one
    return "NOT NOTICED", []


def main() -> None:
    """Print each mutation, and whether it is noticed."""
    parser = argparse.ArgumentParser(description="What the nearest tests notice.")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", help="comparison, condition, guard, number or order; else all")
    parser.add_argument("--list", action="store_true", help="run no tests")
    parser.add_argument("--without", nargs="*", default=[], metavar="PATH", help="leave out")
    parser.add_argument("paths", nargs="*", default=["dshealthd"])
    given = parser.parse_args()
    files = sorted({file for path in given.paths for file in modules(path)})
    left = {file for path in given.without for file in modules(path)}
    files = [file for file in files if file not in left]
    found = [one for file in files for one in mutations(file.relative_to(ROOT))]
    every = [one for one in found if given.kind in {None, one.kind}]
    broken: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        copy, left_out = Path(folder) / "copy", shutil.ignore_patterns(".*", "build")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        for mutation in drawn(every, given.count, given.seed):
            verdict, one = ("not run", []) if given.list else judged(copy, mutation, broken)
            where = f"{mutation.file}:{mutation.line} {mutation.scope}"
            was = (copy / mutation.file).read_bytes()[mutation.begin : mutation.end].decode()
            print(f"{verdict}: {where}: {was} → {mutation.text} ({' '.join(one)})", flush=True)


if __name__ == "__main__":
    main()
