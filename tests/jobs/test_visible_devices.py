"""What CUDA_VISIBLE_DEVICES leaves, against torch's own reading of it."""

from __future__ import annotations

from typing import Any

import pytest

from dshealthd.jobs.environment import Visible, visible
from tests.training.lazy import Lazy

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


def test_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of these lists torch sees the same GPUs."""
    torch: Any = Lazy("torch")
    for text in LISTS:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        seen = list(map(str, torch.cuda._parse_visible_devices()))
        assert seen == list(visible(text, None).devices), text


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
