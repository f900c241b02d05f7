"""What lines of the kernel log mean; every line is in the form that its source prints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.linux import kernel_lines as lines

XIDS = [
    (("NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp "
      "Exception on (GPC 7, TPC 7, SM 0)"),
     "0000:cb:00.0", 13),
    (("NVRM: Xid (PCI:0000:66:00): 79, pid=1797828, name=pt_main_thread, GPU has fallen off the "
      "bus."), "0000:66:00.0", 79),
    ("NVRM: Xid (PCI:0000:66:00): 79, GPU has fallen off the bus.", "0000:66:00.0", 79),
    (("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 "
      "0x00000000)"), "0009:01:00.0", 149),
    ("NVRM: Xid (0000:03:00): 62, 10ab(2a38) 00000000 00000000", "0000:03:00.0", 62),
    ("NVRM: Xid (PCI:0000:4b:00 GPU-I:05): 31, pid=1, name=x, Ch 00000008", "0000:4b:00.0", 31),
    (("NVRM: Xid (PCI:0000:4b:00 GPU-I:05 GPU-CI:01): 31, pid=1, name=x, Ch "
      "00000008"), "0000:4b:00.0", 31),
]  # fmt: skip

SPOOFED_XIDS = [
    # a process of that name
    "NVRM: Xid (PCI:[24117]: segfault at 0 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4",
    "NVRM: Xid (PCI:: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL)",
    "python[7]: segfault NVRM: Xid (PCI:0000:cb:00): 79, GPU has fallen off the bus.",
    " NVRM: Xid (PCI:0000:cb:00): 79, GPU has fallen off the bus.",
    r"NVRM: API mismatch: the client has the version 1\x0aNVRM: Xid (PCI:0000:cb:00): 79, x, but",
    "NVRM: Xid (PCI:0000:cb:00): none, what follows is 79,",
    "NVRM: Xid (PCI:0000:cb:00): 79 is what a program printed",
    "NVRM: Xid (PCI:zzzz:cb:00): 79, GPU has fallen off the bus.",
    "nvrm: xid (pci:0000:cb:00): 79, GPU has fallen off the bus.",
]

LINES = Path(__file__).with_name("kernel_lines.txt")
EXAMPLES = [
    line.split("  ", 1)
    for line in LINES.read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
"""Events of the kernel log, or -, each with a line in the form that its source prints."""

AFTER_A_NAME = [
    ("[99]: segfault at 0 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in libc.so.6 likely on "
     "CPU 1 (core 1, socket 0)"),
    (" invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE|__GFP_COMP), order=0, "
     "oom_score_adj=0"),
    (": page allocation failure: order:4, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), "
     "nodemask=(null),cpuset=/,mems_allowed=0"),
    " (99): drop_caches: 3",
    "[99] bad frame in rt_sigreturn frame:000000 ip:7f sp:7f orax:ffffffffffffffff",
]  # fmt: skip
"""What the kernel prints behind a process name that begins a line."""


def event(line: str) -> str | None:
    """Return the name of the event that a single line reports."""
    found = lines.EventParser().event(line)
    return None if found is None else found.name


def test_xid() -> None:
    """An Xid is told with its GPU's address as sysfs writes it, on a MIG instance too."""
    for line, pci, code in XIDS:
        found = lines.xid(line)
        assert found is not None, line
        assert (found.pci_bus_id, found.code) == (pci, code)


def test_spoofed_xid() -> None:
    """FAULT 20: what a user's name or string made look like an Xid is no event."""
    for line in SPOOFED_XIDS:
        assert lines.xid(line) is None
        assert event(line) in {None, "allocation_failure", "nvidia_version_mismatch"}, line


RECOVERY_ACTIONS = [
    ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "gpu_reset"),
    ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "node_reboot"),
    ("GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", "node_reboot"),
    ("GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)", "none"),
    ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", "drain_and_reset"),
    (("GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX "
      "Domain)"), "recover_imex_domain"),
    (("pid=4711, name=pt_main_thread, GPU recovery action changed from 0x0 (None) to 0x1 (GPU "
      "Reset Required)"), "gpu_reset"),
    (("pid='<unknown>', name=<unknown>, GPU recovery action changed from 0x0 (None) to 0x2 (Node "
      "Reboot Required)"), "node_reboot"),
    (("pid=4711, name=a, b, c, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and "
      "Reset)"), "drain_and_reset"),
    ("GPU recovery action changed from 0x0 (None) to 0x7 (System Reboot)", "system_reboot"),
    ("GPU recovery action changed from 0x0 (None) to 0x8 (Call Home)", "other"),
    ("something else", None),
]  # fmt: skip


@pytest.mark.parametrize(("detail", "action"), RECOVERY_ACTIONS)
def test_recovery_action(detail: str, action: str | None) -> None:
    """Xid 154 requests an action by its number; the text differs between drivers."""
    assert lines.recovery_action(lines.Xid("0000:cb:00.0", 154, detail)) == action
    assert lines.recovery_action(lines.Xid("0000:cb:00.0", 153, detail)) is None


LINK_ERRORS = [
    (74, ("pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 14(0x0, 0x0, "
          "0x10000, 0x0, 0x0, 0x0, 0x0)"),
     ("14", "fatal")),
    (149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x025525c6 0x00000000)", ("9", "fatal")),
    (149, "NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0x0000000a]", ("1", "fatal")),
    (145, "RLW_REMAP        Nonfatal XC1 i0 Link -1 (0x00000004 0x80000000)", ("", "nonfatal")),
    (145, "RLW_REMAP        Nonfatal XC1 i0 Link 99 (0x00000004 0x80000000)", ("", "nonfatal")),
    (145, ("pid=4711, name=python, RLW_REMAP Nonfatal XC1 i0 Link 07 (0x00000004 "
           "0x80000000)"), ("7", "nonfatal")),
    (149, ("pid='<unknown>', name=<unknown>, NETIR_LINK_EVT Fatal XC0 i0 Link 09 "
           "(0x025525c6)"), ("9", "fatal")),
    (149, "pid=4711, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x025525c6)", ("9", "fatal")),
    (147, "TLW_RX/TLW_RX_PIPE0 Fatal XC0 i0 Link 03 (0x0000001 0x0)", ("3", "fatal")),
    (74, "something else", None),
    (79, "NVLink: fatal error detected on link 1(", None),
]  # fmt: skip


@pytest.mark.parametrize(("code", "detail", "expected"), LINK_ERRORS)
def test_link_error(code: int, detail: str, expected: tuple[str, str] | None) -> None:
    """NVLink errors name their link, of NVLink 4 and 5, and whether they are fatal."""
    found = lines.link_error(lines.Xid("0000:cb:00.0", code, detail))
    assert (found and (found.link, found.severity)) == expected


def test_gpu_that_cannot_start() -> None:
    """A GPU is named as sysfs names it, by which it is known from other lines and metrics."""
    found = lines.event("NVRM: GPU 0000:66:00.0: RmInitAdapter failed! (0x62:0x40:1860)")
    assert found == lines.KernelEvent("gpu_init_failed", "0000:66:00.0")


def test_sxid() -> None:
    """An SXid is told once, though it goes over three lines."""
    first = (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS "
        "crumbstore MCTO (First)"
    )
    assert lines.sxid(first) == lines.SXid("3", "0000:c1:00.0", 28006, "nonfatal")
    fatal = lines.sxid(first.replace("Non-fatal", "Fatal"))
    assert fatal == lines.SXid("3", "0000:c1:00.0", 28006, "fatal")
    for rest in (
        "0000:c1:00.0): 28006, Severity 0 Engine instance 46 Sub-engine instance 00",
        "0000:c1:00.0): 28006, Data {0x00140004, 0x00100000}",
        "[77]: 28006, Fatal",
    ):
        assert lines.sxid(f"nvidia-nvswitch3: SXid (PCI:{rest}") is None


def test_events() -> None:
    """Each event is recognized in the form that the kernel prints, and no other line is one."""
    assert {name for name, _ in EXAMPLES} == {"-", *lines.EVENTS}
    assert [(event(line) or "-", line) for _, line in EXAMPLES] == list(map(tuple, EXAMPLES))


@pytest.mark.parametrize(("severity", "rest", "expected"), [
    ("corrected", ["section_type: memory error"], "memory_error_corrected"),
    ("fatal", ["section_type: memory error"], "memory_error_uncorrected"),
    ("recoverable", ["section_type: IA32/X64 processor error"], "machine_check"),
    ("corrected", ["section_type: general processor error"], "machine_check_corrected"),
    ("recoverable", ["section_type: PCIe error"], None),
    ("recoverable", ["section_type: PCIe error", "device_id: 0000:17:00.0"], "pcie_error_nonfatal"),
    ("info", ["section_type: memory error"], None),
    ("fatal", ["section_type: CXL protocol error"], None),
])  # fmt: skip
def test_record_of_firmware(severity: str, rest: list[str], expected: str | None) -> None:
    """Severity and section make the event, with PCIe's device; another record's lines do not."""
    parser = lines.EventParser()
    head = "{1}[Hardware Error]:  "
    assert parser.event(f"{head}Error 0, type: {severity}") is None
    assert parser.event(f"{{2}}[Hardware Error]:   {rest[0]}") is None
    *before, last = [parser.event(f"{head} {text}") for text in rest]
    assert not any(before)
    assert (last and last.name) == expected
    if last is not None and "device_id" in rest[-1]:
        assert last.device == "0000:17:00.0"


def test_process_named_like_a_fault() -> None:
    """FAULT 20: no process name at the start of a line makes it a fault."""
    examples = [line for name, line in EXAMPLES if name not in {"-", "allocation_failure"}]
    examples += ["EDAC MC0: 1 CE ", "Oops: 0002 [#1]", *(line for line, _, _ in XIDS)]
    for line, rest in itertools.product(examples, AFTER_A_NAME):
        named = line[:15] + rest  # the longest name of a process
        assert lines.xid(named) is None
        assert event(named) in {None, "allocation_failure"}, line


@given(st.text())
def test_any_line(line: str) -> None:
    """Whatever a line holds, there is an answer."""
    assert lines.xid(line) is None or line.startswith("NVRM: Xid (PCI:")
    assert lines.sxid(line) is None or line.startswith("nvidia-nvswitch")
    assert event(line) in {None, *lines.EVENTS}
