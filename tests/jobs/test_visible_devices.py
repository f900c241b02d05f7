"""What CUDA_VISIBLE_DEVICES leaves, against torch's own reading of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dshealthd.jobs.environment import Visible, visible

LISTS = (
    *(
        "0,1,2,3",
        "4,5",
        "",
        "-1",
        "0,-1,1",
        "3,2,1",
        "0,0",
        "0, 1",
        "1gpu,2",
        "x",
        "0,,1",
        "+1",
        "NoDevFiles",
        "0,1,",
        "7",
    ),
    *("GPU-1a,GPU-2b", "GPU-1a,GPU-1a", "GPU-1a,1", "MIG-1,MIG-2", "MIG-1,GPU-2"),
)


def test_as_torch_reads_them() -> None:
    """For each of these lists torch sees the same GPUs."""
    pytest.importorskip("torch", reason="takes torch")
    program = (
        "import os, sys, torch.cuda\nfor text in sys.argv[1:]:\n    "
        "os.environ['CUDA_VISIBLE_DEVICES'] = text\n    "
        "print(*torch.cuda._parse_visible_devices(), sep=',')"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *LISTS],
        capture_output=True,
        check=True,
        text=True,
        timeout=200,
        env=os.environ,
    )
    assert answer.stdout.splitlines() == [",".join(visible(text, None).devices) for text in LISTS]


@pytest.mark.parametrize(("text", "seen"), [
    ("0,1", Visible(("0", "1"))),
    ("0,4,1", Visible(("0",), missing=True)),
    ("4", Visible((), missing=True)),
    ("1,1", Visible((), repeated=True)),
    ("", Visible(())),
    ("-1", Visible(())),
    ("GPU-9", Visible(("GPU-9",))),
])  # fmt: skip
def test_on_a_node_with_four(text: str, seen: Visible) -> None:
    """An index that the node does not have hides itself and what follows."""
    assert visible(text, 4) == seen


@pytest.mark.parametrize("entry", ["\x1d1", "\u0663", "\u00a01"])
def test_only_what_the_driver_takes_for_a_number(entry: str) -> None:
    """Separators and digits of other scripts are no number, and end the list."""
    assert visible(f"0,{entry}", 8) == Visible(("0",))


def test_a_number_of_any_length() -> None:
    """An index beyond every node's GPUs is one that is missing, however long it is."""
    assert visible("0," + "9" * 5000, 8) == Visible(("0",), missing=True)
