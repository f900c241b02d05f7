"""Parsers of kernel log lines: Xids, SXids, and a table of events.

Every pattern is anchored at the start of the line and spells out what the kernel prints there. A
line may begin with or contain text that a user chose (a process name of up to 15 characters, a
version string), but none long enough to imitate such a start. Formats follow the sources of the
kernel and the drivers; for Xids and SXids, kernel_rc.c and common_nvswitch.h of NVIDIA's open GPU
kernel modules.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_PCI = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}"
_XID_TEXT = (
    rf"NVRM: Xid \((?:PCI:)?(?P<pci>{_PCI})(?:\.\d)?(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\): "
    r"(?P<code>%s)(?:, |$)"
)
_XID = re.compile(_XID_TEXT % r"\d+")
_SXID = re.compile(
    rf"nvidia-nvswitch(\d+): SXid \(PCI:({_PCI}\.\d)\): (\d+), (?!Severity \d|Data \{{)(Fatal|Non-fatal)?"
)
_PROCESS = r"(?:pid=(?:\d+|'<unknown>'), (?:name=.{0,100}?, )?)?"
"""What the driver prints before the text of an Xid that concerns a process.

The user chooses the name, but its 15 characters are too few to imitate a text searched for after
it.
"""
_RECOVERY = re.compile(
    _PROCESS + r"GPU recovery action changed from 0x[0-9a-f]+ \([^)]*\) to 0x([0-9a-f]+) "
)
_LINK_74 = re.compile(r"NVLink: (fatal|non-fatal)? ?error detected on link (\d+)\(", re.IGNORECASE)
_LINK_5 = re.compile(
    _PROCESS + r"[\w/]+ +(Fatal|Nonfatal|Non-fatal) +XC ?\d+ +i ?\d+ +Link (-?\d+) "
)

NVLINK_XID = 74
NVLINK_5_XIDS = range(144, 151)
RECOVERY_XID = 154
XIDS = range(1, 1000)
"""Valid Xid numbers; others do not become labels."""
SXIDS = range(1, 100_000)
_LINKS = range(64)

RECOVERY_ACTIONS = (
    "none", "gpu_reset", "node_reboot", "drain_p2p", "drain_and_reset", "recover_imex_domain",
    "bus_reset", "system_reboot",
)  # fmt: skip
"""Actions that Xid 154 requests, by the number in the line; its text varies with the driver.

Numbers and names are those of nvmlDeviceGpuRecoveryAction_t.
"""


class Xid(NamedTuple):
    """An error reported by the GPU driver."""

    pci_bus_id: str
    """In sysfs format: 0000:cb:00.0."""
    code: int
    detail: str
    """The rest of the line, whose format depends on the code."""


class SXid(NamedTuple):
    """An error reported by the NVSwitch driver. It spans three lines; only the first is counted."""

    switch: str
    pci_bus_id: str
    code: int
    severity: str


class LinkError(NamedTuple):
    """The NVLink error in an Xid; `link` is "" if the line names none."""

    link: str
    severity: str


def xid(message: str) -> Xid | None:
    """Return the Xid that a kernel log line reports, if any."""
    match = _XID.match(message)
    return Xid(f"{match[1]}.0", int(match[2]), message[match.end() :]) if match else None


def xid_expression(codes: str) -> str:
    """Return an expression for Xids, with the groups `pci`, `code` and, if the line has it, `pid`.

    `codes` is an expression for their numbers.
    """
    return _XID_TEXT % codes + r"(?:pid='?(?P<pid>\d+))?"


def sxid(message: str) -> SXid | None:
    """Return the SXid that a kernel log line reports, if any."""
    match = _SXID.match(message)
    if not match:
        return None
    severity = {"Fatal": "fatal", "Non-fatal": "nonfatal"}.get(match[4], "unknown")
    return SXid(match[1], match[2], int(match[3]), severity)


def recovery_action(found: Xid) -> str | None:
    """Return what Xid 154 requests, one of `RECOVERY_ACTIONS` or "other"; None for another Xid."""
    match = _RECOVERY.match(found.detail) if found.code == RECOVERY_XID else None
    if not match:
        return None
    number = int(match[1], 16)
    return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else "other"


def link_error(found: Xid) -> LinkError | None:
    """Return the NVLink error in Xid 74, or 144 to 150 (NVLink 5); None for another Xid."""
    if found.code == NVLINK_XID:
        match = _LINK_74.search(found.detail)
        return (
            LinkError(
                _link(match[2]), "nonfatal" if (match[1] or "").lower() == "non-fatal" else "fatal"
            )
            if match
            else None
        )
    match = _LINK_5.match(found.detail) if found.code in NVLINK_5_XIDS else None
    return (
        LinkError(_link(match[2]), "fatal" if match[1] == "Fatal" else "nonfatal")
        if match
        else None
    )


def _link(text: str) -> str:
    return str(int(text)) if int(text) in _LINKS else ""


class _Event(NamedTuple):
    """An event: text that its line contains (a quick check), and a pattern for the line's start."""

    name: str
    part: str
    pattern: re.Pattern[str]


def _event(name: str, part: str, pattern: str) -> _Event:
    return _Event(name, part, re.compile(pattern))


_DEVICE = rf"[\w-]{{1,40}} (?P<pci>{_PCI}\.\d)"
"""A driver and its PCI device, as dev_printk begins a line."""
_EDAC = r"EDAC MC\d+: \d+ %s .{1,200} on .{1,200}page:0x"
_OOPS = r"(?:Oops: |general protection fault|invalid opcode: |Internal error: )(?:.{0,200}[ :])?[0-9a-f]{4,16} \[#\d+\](?: [A-Z]|$)"
_SEGFAULT = (
    r"(?:traps: )?.{1,16}\[\d+\]:? (?:segfault at|general protection fault|trap [a-z ]{1,20}) "
    r"?[0-9a-f]* ?ip:? ?[0-9a-f]+ sp:? ?[0-9a-f]+ error:? ?[0-9a-f]+ in "
)
# The firmware answers a register or a query that it does not have with one of these: monitors that
# read every port's registers cause them on healthy adapters.
_REFUSED = (
    r"(?!(?:ACCESS_REG|QUERY_\w+)\(.{1,60} failed, "
    r"status bad (?:operation|parameter|index|input length|output length)\()"
)
_MLX5 = rf"mlx5_core (?P<pci>{_PCI}\.\d): (?:\w+:\d+:\(pid \d+\): )?"

_TABLE = (
    # memory
    _event("oom_kill", "Killed process ",
           r"(?:(?:Memory cgroup out|Out) of memory(?: \([a-z_]+\))?: )?Killed process (?P<pid>\d+)[ ,]"),
    _event("allocation_failure", "page allocation failure: order:", r".{1,64}?: page allocation failure: order:\d+"),
    _event("memory_error_corrected", " CE ", _EDAC % "CE"),
    _event("memory_error_uncorrected", " UE ", _EDAC % "UE"),
    _event("machine_check", "[Hardware Error]: CPU ", r"(?:mce: )?\[Hardware Error\]: CPU \d+: Machine Check"),
    # limits
    _event("open_files_exhausted", "file-max limit ", r"VFS: file-max limit \d+ reached"),
    _event("time_wait_overflow", "time wait bucket table overflow", r"TCP: time wait bucket table overflow"),
    _event("conntrack_full", "table full, dropping packet",
           r"nf_conntrack: (?:nf_conntrack: )?table full, dropping packet"),
    _event("fork_rejected", "fork rejected by pids controller", r"cgroup: fork rejected by pids controller in "),
    # processors
    _event("hung_task", "INFO: task ", r"INFO: task .{1,80}:\d+ .{0,60}?blocked .{0,80}?for more than \d+ seconds"),
    _event("soft_lockup", "BUG: soft lockup", r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#\d+ stuck for "),
    _event("hard_lockup", "hard LOCKUP on cpu",
           r"(?:(?:NMI )?watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu \d"),
    _event("rcu_stall", "detected ", r"(?:rcu: )?INFO: rcu\w* (?:self-)?detected (?:expedited )?stall"),
    _event("kernel_oops", "[#", _OOPS),
    # Only seen if the machine survives for a moment, as with kernel.panic delays.
    _event("kernel_panic", "Kernel panic - ", r"Kernel panic - not syncing: "),
    _event("cpu_throttled", "temperature above threshold",
           r"(?:mce: )?CPU\d+: (?:Core|Package) temperature above threshold"),
    # storage
    _event("io_error", " error, dev ",
           r"(?:(?:blk_update_request|print_req_error): )?(?:I/O|timeout|protection|recoverable transport|critical (?:medium|target|nexus))"
           r" error, dev (?!fd\d)\S+, sector \d"),
    _event("io_error", "Buffer I/O error on dev", r"Buffer I/O error on dev(?:ice)? (?!fd\d)\S+, logical block \d"),
    _event("nvme_timeout", "timeout, ", r"nvme nvme\d+: I/O (?:tag )?\d+ .{0,80}?timeout, "),
    _event("nvme_failure", "nvme nvme",
           r"nvme nvme\d+: (?:controller is down; will reset|Removing after probe failure|Disabling device after reset failure"
           r"|Device not ready; aborting)"),
    _event("nvme_path_lost", " path - ",
           r"block nvme\d+n\d+: no (?:usable path - requeuing|available path - failing) I/O"),
    # raid0 and linear print no colon between the level and the array's name.
    _event("raid_disk_failed", ": Disk failure on ", r"md/(?:raid\d{0,2}|linear):?\S{0,40}: Disk failure on "),
    _event("filesystem_error", "EXT4-fs error ", r"EXT4-fs error \(device \S+\): "),
    _event("filesystem_error", "EXT4-fs (",
           r"EXT4-fs \(\S+\): (?:I/O error while writing superblock"
           r"|previous I/O error to superblock detected"
           r"|This should not happen!! Data will be lost)"),
    _event("filesystem_error", "JBD2: Detected IO errors",
           r"JBD2: Detected IO errors \d*.{0,4}while flushing file data on "),
    _event("filesystem_error", "Aborting journal on device", r"Aborting journal on device \S+\.$"),
    _event("filesystem_error", "XFS (",
           r"XFS \(\S+\): (?:Corruption |Internal error |[Mm]etadata (?:CRC|corruption|I/O) error|log I/O error"
           r"|.{0,60}[Ss]hutting down filesystem|[Ff]ilesystem has been shut down)"),
    _event("filesystem_error", "BTRFS", r"BTRFS:? (?:error|critical) \(device "),
    _event("filesystem_read_only", "forced readonly", r"BTRFS:? info \(device .{1,80}?\): forced readonly"),
    _event("filesystem_read_only", "Remounting filesystem read-only",
           r"EXT4-fs \(\S+\): Remounting filesystem read-only"),
    _event("nfs_unresponsive", " not responding, ",
           r"(?:nfs\w*|lockd|RPC: \w+): server (?P<server>\S+) not responding, "),
    _event("nfs_state_lost", "reclaim", r"(?:NFS: )?_{0,2}nfs4_reclaim_\w+: (?:Lock reclaim|unhandled)"),
    _event("nfs_state_lost", "NFS: state manager", r"NFS: state manager.{0,80} failed on NFSv4 server "),
    _event("lustre_connection_lost", " was lost; in progress operations",
           r"Lustre(?:Error)?: .{1,160} was lost; in progress operations "),
    # -19 and -107: the server is gone, or has forgotten this client; -5, -30 and -110 reach the job.
    _event("lustre_operation_failed", "failed: rc = -",
           r"LustreError: \d+-\d+: \S{1,100}: operation \w+ to node (?P<server>\S{1,80}) failed: "
           r"rc = -(?:5|19|30|107|108|110)\b"),
    _event("lustre_evicted", "This client was evicted by ", r"LustreError: .{1,100}: This client was evicted by "),
    # network
    _event("link_down", "Link ", rf"{_DEVICE} \S+: (?:NIC )?Link (?:is )?[Dd]own"),
    _event("link_down", " Link DOWN", rf"{_DEVICE} \S+: Port: \d+ Link DOWN"),
    _event("transmit_timeout", "NETDEV WATCHDOG: ",
           rf"(?:{_DEVICE} \S+: )?NETDEV WATCHDOG: .{{1,80}}: transmit queue \d+ timed out"),
    _event("adapter_failure", "device's health compromised", _MLX5 + "device's health compromised"),
    _event("adapter_failure", "Fatal error ", _MLX5 + r"Fatal error \d+ detected"),
    _event("adapter_command_failed", "op_mod(",
           _MLX5 + _REFUSED + r"[A-Z0-9_]+\(0x[0-9a-f]+\) op_mod\(0x[0-9a-f]+\) failed, "),
    _event("adapter_command_timed_out", " timeout. Will cause a leak of a command resource",
           _MLX5 + r"[A-Z0-9_]+\(0x[0-9a-f]+\) timeout\. Will cause a leak"),
    _event("adapter_command_failed", ": Failed to process command ",
           rf"(?:infiniband|efa) (?:(?P<pci>{_PCI}\.\d) )?efa_\d+: Failed to process command "),
    _event("adapter_overheated", "High temperature on sensors", _MLX5 + "High temperature on sensors"),
    _event("adapter_power_insufficient", "Detected insufficient power",
           _MLX5 + "Detected insufficient power on the PCIe slot"),
    _event("module_error", "Port module event[error]", _MLX5 + r"Port module event\[error\]: module \d+, "),
    _event("module_unplugged", "Cable unplugged", _MLX5 + r"Port module event: module \d+, Cable unplugged"),
    # buses and the GPU driver
    _event("pcie_error_corrected", "severity=Correct", rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Correct"),
    _event("pcie_error_uncorrected", "severity=Uncorrect", rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Uncorrect"),
    _event("pcie_slot_down", "pciehp: Slot(",
           rf"pcieport (?P<pci>{_PCI}\.\d): pciehp: Slot\([\w-]+\): (?:Link Down|Card not present)"),
    _event("pcie_containment", "DPC: containment event", rf"pcieport (?P<pci>{_PCI}\.\d): DPC: containment event"),
    _event("pcie_recovery_failed", "device recovery failed", rf"{_DEVICE}: (?:AER: )?device recovery failed"),
    _event("iommu_fault", "fault addr ", r"DMAR: \[[\w ]+\] Request device \[[0-9a-fx:.]+\] .{0,20}fault addr "),
    _event("iommu_fault", "IO_PAGE_FAULT", rf"(?:{_DEVICE}: )?AMD-Vi: Event logged \[IO_PAGE_FAULT "),
    # The first is printed when the driver probes a GPU, without an Xid.
    _event("gpu_off_bus", "allen off the bus", rf"NVRM: (?:GPU (?P<pci>{_PCI}\.\d): GPU has )?fallen off the bus"),
    # GSP's heartbeat and its calls: on some releases no Xid follows.
    _event("gpu_firmware_timeout", "_kgsp",
           r"NVRM: (?:GPU(?P<gpu>\d+) )?_kgsp(?:IsHeartbeatTimedOut: Heartbeat timed out"
           r"|RpcRecvPoll: [\w /-]{1,40} heartbeat timed out"
           r"|Log(?:Rpc|Gsp)Timeout: \*{3,60} GSP Timeout)"),
    _event("gpu_init_failed", "NVRM: ",
           rf"NVRM: (?:GPU (?:at PCI:)?(?P<pci>{_PCI})(?:\.\d)?: )?(?:RmInitAdapter failed!"
           r"|The NVIDIA probe routine failed for \d+ device"
           r"|GPU does not have the necessary power cables connected)"),
    _event("nvlink_detect_failed", "RxDetectLinkMask", r"NVRM: (?:GPU\d+ )?\w*PostRxDetectLinkMask\w*: "),
    _event("peermem_error", "nvidia-peermem ", r"nvidia-peermem \w+:\d+ ERROR "),
    # The process name, which a user chooses, comes first; the kernel prints all that follows.
    _event("nccl_segfault", " in libnccl", _SEGFAULT + r"libnccl[\w.-]*\["),
    _event("cuda_segfault", " in libcuda", _SEGFAULT + r"libcuda[\w.-]*\["),
    _event("nvidia_version_mismatch", "API mismatch: the client ", r"NVRM: API mismatch: the client "),
)  # fmt: skip

EVENTS = tuple(dict.fromkeys(event.name for event in _TABLE))
"""Names that `event` returns."""


def event_expressions(name: str) -> list[str]:
    """Return the expressions of one of `EVENTS`; a group `pci` is the device that a line names.

    ValueError: there is no such event.
    """
    if name not in EVENTS:
        message = f"{name} is not an event of the kernel log"
        raise ValueError(message)
    return [event.pattern.pattern for event in _TABLE if event.name == name]


def event(message: str) -> str | None:
    """Return the event that a kernel log line reports, one of `EVENTS`, or None."""
    for name, part, pattern in _TABLE:
        if part in message and pattern.match(message):
            return name
    return None
