"""How the product is cut: `python -m tests.house` prints its figures, and the modules with
constants after their definitions, which read like the seam of two files. It fails nothing.
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = ("bench", "grafana", "deploy", "generate", "docs")
COLUMNS = 100
CHECKS = {"Check", "check_of", "snapshot_check"}
"""A check that one of these declares is a definition, too: it has a name, and is run."""
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def names(node: ast.AST) -> set[str]:
    """Return the names in a piece of code."""
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def seams(module: ast.Module) -> list[str]:
    """Return the constants after a definition of a module that need none of its definitions, so
    that they could stand at its head.
    """
    defined: set[str] = set()
    found = []
    for node in module.body:
        if isinstance(node, DEFINITIONS):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and defined and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = set[str]().union(*map(names, targets))
            if names(node.value) & (defined | CHECKS):
                defined |= own
            else:
                found += sorted(own)
    return found


def main() -> None:
    """Print the figures."""
    texts = {
        part: {
            file: file.read_text(encoding="utf-8") for file in sorted((ROOT / part).rglob("*.py"))
        }
        for part in ("dshealthd", "tests", *BESIDE)
    }
    for part, files in texts.items():
        lines = [text.splitlines() for text in files.values()]
        sizes = list(map(len, lines))
        long = sum(len(line) > COLUMNS for file in lines for line in file)
        print(
            f"{part:10}{sum(sizes):7} lines {len(sizes):4} files, median "
            f"{statistics.median(sizes):.0f}, most {max(sizes)}; {long} lines over {COLUMNS} "
            "columns"
        )
    product = {file: ast.parse(text) for file, text in texts["dshealthd"].items()}
    classes = Counter(
        name
        for module in product.values()
        for name in {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    )
    shared = sorted(name for name, modules in classes.items() if modules > 1)
    print(f"class names of several modules: {', '.join(shared)}")
    for file, module in product.items():
        if found := seams(module):
            print(f"  constants after definitions: {file.relative_to(ROOT)}: {', '.join(found)}")


if __name__ == "__main__":
    main()
