"""What the tests notice: `python -m tests.mutations [--count 20] [--seed 1] [PATH …]`.

Changes constants and comparisons of the product in a copy of the checkout, one at a time, and runs
the nearest tests. What none of them notices needs a case on either side of it, or is not needed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
SLOW = {"alertmanager", "deploy", "faults", "hardware", "lab", "nccl", "neighbors", "soak"}
"""Folders of tests that take long."""
NEAREST = 3
"""Files of tests that are run for a mutation."""
SECONDS = 420.0
"""For all of them; what hangs is noticed."""
LIMITS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
OTHERS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutation(NamedTuple):
    """A piece of a file, and what takes its place."""

    file: Path
    line: int
    begin: int
    end: int
    text: str


def mutations(file: Path) -> Iterator[Mutation]:
    """Yield those of a module: constants, the limits of comparisons, `and`, `or`, `min`, `max`."""
    source = (ROOT / file).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        text, place = "", node
        if isinstance(node, ast.Assign) and not node.col_offset:
            if isinstance(node.value, ast.Constant) and type(node.value.value) in {int, float}:
                text, place = f"(2 * {ast.unparse(node.value)} + 1)", node.value
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in LIMITS and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            text = f"({left} {LIMITS[type(node.ops[0])]} {right})"
        elif isinstance(node, ast.BoolOp):
            word = " and " if isinstance(node.op, ast.Or) else " or "
            text = f"({word.join(f'({ast.unparse(part)})' for part in node.values)})"
        elif isinstance(node, ast.Name):
            text = OTHERS.get(node.id, "")
        if text and isinstance(place, ast.expr):
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[(place.end_lineno or 1) - 1] + (place.end_col_offset or 0)
            yield Mutation(file, place.lineno, begin, end, text)


def nearest(file: Path) -> list[str]:
    """Return the files of tests that import a module, those in the place like its own first."""
    module, place = ".".join(file.with_suffix("").parts), file.parts[1:-1]
    parent, _, name = module.rpartition(".")
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders, text = path.relative_to(ROOT).parts[1:-1], path.read_text(encoding="utf-8")
        is_near, is_own = folders == place, path.stem == f"test_{name}"
        uses = module in text or (f"from {parent} import" in text and name in text)
        if not SLOW & {*folders} and (uses or (is_near and is_own)):
            found.append((not is_near, not is_own, str(path.relative_to(ROOT))))
    return [path for *_, path in sorted(found)[:NEAREST]]


def fails(copy: Path, tests: Sequence[str]) -> bool:
    """Tell whether a test fails in a copy of the checkout."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", *tests]
    variables = os.environ | {"PYTHONPATH": str(copy)}
    try:
        return bool(subprocess.call(command, cwd=copy, env=variables, timeout=SECONDS, stdout=-3))
    except subprocess.TimeoutExpired:
        return True


def main() -> None:
    """Print each mutation, and whether it is noticed."""
    parser = argparse.ArgumentParser(description="What the nearest tests notice.")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("paths", nargs="*", default=["dshealthd"])
    given = parser.parse_args()
    files = sorted({file for path in given.paths for file in (ROOT / path).rglob("*.py")})
    every = [one for file in files for one in mutations(file.relative_to(ROOT))]
    with tempfile.TemporaryDirectory(prefix="mutations") as folder:
        copy, left_out = Path(folder) / "copy", shutil.ignore_patterns(".*", "build")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        for mutation in random.Random(given.seed).sample(every, min(given.count, len(every))):
            tests, place = nearest(mutation.file), copy / mutation.file
            old, new = place.read_bytes(), mutation.text.encode()
            place.write_bytes(old[: mutation.begin] + new + old[mutation.end :])
            seen = bool(tests) and fails(copy, tests)
            place.write_bytes(old)
            verdict = (
                "NOT NOTICED" if not seen else "fails anyway" if fails(copy, tests) else "noticed"
            )
            print(f"{verdict}: {mutation.file}:{mutation.line} → {mutation.text}", flush=True)


if __name__ == "__main__":
    main()
