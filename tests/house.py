"""How the product is cut: `python -m tests.house` lists modules that may be too small to stand
alone, and what share of all lines are imports. It fails nothing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "dshealthd"
FEWEST = 30
"""Lines of code; a module with fewer usually belongs to a neighbor."""
MOST_IMPORTS = 0.07
"""Share of imports in all lines; the finer the cut, the more of them."""
KEPT = {
    "collectors/": "a collector is a module",
    "core/text.py": "words for people, which every package takes",
    "doctor/job/checks.py": "the list of checks, in the order in which people read them",
    "doctor/remedies.py": "commands to paste, of a node's checks and of a job's",
    "findings/options.py": "a section of the configuration, read without the rest of its package",
    "jobs/heartbeats/listener.py": "the socket's file; the receiver is large enough",
    "jobs/ras/peer.py": "it reads /proc and netlink, its neighbors only what RAS says",
    "linux/daemons.py": "of the collectors of the NVLink domain, whichever daemon",
    "nvml/values.py": "without pynvml, for the agent",
    "nvrx/frames.py": "both ends of the socket: the agent, and the process that has imported gRPC",
    "nvrx/options.py": "a section of the configuration, read without the rest of its package",
    "probe/state.py": "what outlives the slots, without importing them",
    "status/paint.py": "of `status` and `doctor`",
    "training/position.py": "all that a step touches, read as one: its neighbor is long",
    "web/page_files.py": "the files of the pages, read once and by no other",
}
"""Small modules, or folders of such, that stand alone, and why."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code(text: str) -> set[int]:
    """Return the lines that hold code: neither blank nor only a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines - {len(text.splitlines()) + 1}


def imports(text: str) -> int:
    """Return the number of lines that imports take, those for types included."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def main() -> None:
    """Print what may be cut too finely."""
    texts = {
        str(file.relative_to(SOURCE)): file.read_text(encoding="utf-8")
        for file in sorted(SOURCE.rglob("*.py"))
        if file.name not in {"__init__.py", "__main__.py"}
    }
    sizes = {name: len(code(text)) for name, text in texts.items()}
    small = [
        f"  {size:2} {name}"
        for name, size in sizes.items()
        if size < FEWEST and not name.startswith(tuple(KEPT))
    ]
    share = sum(map(imports, texts.values())) / sum(
        len(text.splitlines()) for text in texts.values()
    )
    if small:
        print(
            f"Modules with fewer than {FEWEST} lines of code; merge, or say why in tests/house.py:"
        )
        print(*small, sep="\n")
    if share > MOST_IMPORTS:
        print(f"Imports are {share:.1%} of the lines; aim at {MOST_IMPORTS:.0%} by larger modules.")


if __name__ == "__main__":
    main()
