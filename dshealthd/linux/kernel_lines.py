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
_XID_TEXT = (  # older drivers print the address in capitals
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?(?: "
    r"GPU-I:\d+)?(?: GPU-CI:\d+)?\): "
    r"(?P<code>%s)(?:, |$)"
)
_XID = re.compile(_XID_TEXT % r"\d+")
_SXID = re.compile(
    rf"nvidia-nvswitch(\d+): SXid \(PCI:({_PCI}\.\d)\): (\d+), (?!Severity \d|Data "
    rf"\{{)(Fatal|Non-fatal)?"
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
"""Actions by Xid 154's number, as of nvmlDeviceGpuRecoveryAction_t; its text varies."""
_DEVICE = rf"[\w-]{{1,40}} (?P<pci>{_PCI}\.\d)"
"""A driver and its PCI device, as dev_printk begins a line."""
_INTERFACE = r"(?P<interface>[\w.@-]{1,15})"
_DISK = r"(?P<device>[\w!-]{1,32})"
"""A block device as the kernel names it; `!` stands for a slash."""
_FIXED_DISK = rf"(?!(?:fd|sr)\d){_DISK}"
"""But for a drive of floppies or CDs: a virtual machine's, or a BMC's, whose medium comes and
goes."""
_NEED_NOT = r"(?! op 0x\w+:\((?:DISCARD|SECURE_ERASE|WRITE_SAME|WRITE_ZEROES)\))"
"""Not a request that a healthy disk may refuse, which the kernel then asks no more."""
_JOURNAL = r"(?P<device>dm-\d+|[\w!]{1,32})(?:-\d{1,10})?"
"""A journal is named after its file system's device and its inode there."""
_SERVER = r"(?P<server>[\w.:%@-]{1,64})"
_EDAC = (
    r"EDAC MC\d+: (?P<count>\d{1,9}) %s .{1,200}? on (?:(?!unknown |any "
    r")(?P<device>[\w#.:/-]{2,64}) \(.{0,200}"
    r"|.{1,200})page:0x"
)
"""What EDAC's drivers print of so many errors, with the label of a DIMM if they know which it
is."""
# The status register of a bank, bits 63 to 60 (valid, overflow, uncorrected, enabled) in its first
# digit: IA32_MCi_STATUS in Intel's SDM 3B, MCi_STATUS in AMD's APM 2. Errors of a memory controller
# have the compound code 000F 0000 1MMM CCCC in its last four (SDM); AMD has no such code.
# Firmware's records of memory errors get it, too (arch/x86/kernel/cpu/mce/apei.c).
_BANK = (
    r"(?:mce: )?\[Hardware Error\]: CPU %s: Machine Check(?: Exception)?: [0-9a-f]{1,16} Bank \d+: "
)
_OF_MEMORY, _OF_CPU = _BANK % r"\d+", _BANK % r"(?P<cpu>\d{1,5})"
_UC, _CE = "[abef][0-9a-f]{11}", "[89cd][0-9a-f]{11}"
_CONTROLLER, _ELSEWHERE = "[01]0[89a-f][0-9a-f]", "(?![01]0[89a-f])[0-9a-f]{4}"
# drivers/edac/mce_amd.c decodes it. A deferred error is one that is not corrected, nor used yet.
_BANK_AMD = (
    r"\[Hardware Error\]: CPU:(?P<cpu>\d{1,5})\s{1,4}\([0-9a-f:]{5,12}\) MC\d+_STATUS\[(?:Over|-)\|"
)
_OOPS = (
    r"(?:Oops: |general protection fault|invalid opcode: |Internal error: )(?:.{0,200}[ "
    r":])?[0-9a-f]{4,16} \[#\d+\](?: [A-Z]|$)"
)
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
_GROUPS = ("device", "interface", "cpu", "server", "pci")
"""Groups that name the device, the most telling first."""
_PARTITION = re.compile(
    r"((?:nvme\d+(?:c\d+)?n|mmcblk|md|nbd|loop)\d+)p\d+|((?:s|v|h|xv)d[a-z]+)\d+"
)
_RECORD = re.compile(
    r"\{(?P<record>\d{1,10})\}\[Hardware Error\]: {1,8}(?:Error \d+, type: (?P<severity>\w+)"
    rf"|section_type: (?P<section>[\w /-]{{1,60}})|device_id: (?P<pci>{_PCI}\.\d))$"
)
_SEVERITIES = ("corrected", "recoverable", "fatal")
_SECTIONS = {
    "memory error": ("memory_error_corrected", *2 * ("memory_error_uncorrected",)),
    "processor error": ("machine_check_corrected", *2 * ("machine_check",)),
    "PCIe error": ("pcie_error_corrected", "pcie_error_nonfatal", "pcie_error_fatal"),
}
"""Events of a firmware's record by the end of its section's name, one for each severity."""
_TABLE = (
    # memory
    ("oom_kill",
     r"(?:(?:Memory cgroup out|Out) of memory(?: \([a-z_]+\))?: )?Killed process (?P<pid>\d+)[ ,]"),
    ("allocation_failure", r".{1,64}?: page allocation failure: order:\d+"),
    ("memory_error_corrected", _EDAC % "CE"),
    ("memory_error_uncorrected", _EDAC % "UE"),
    ("memory_error_corrected", _OF_MEMORY + _CE + _CONTROLLER),
    ("memory_error_uncorrected", _OF_MEMORY + _UC + _CONTROLLER),
    ("machine_check_corrected", _OF_CPU + _CE + _ELSEWHERE),
    ("machine_check", _OF_CPU + _UC + _ELSEWHERE),
    ("machine_check_corrected", _BANK_AMD + r"CE\|"),
    ("machine_check", _BANK_AMD + r"(?:UE|-\|[\w|-]{1,80}\bDeferred)\b"),
    # limits
    ("open_files_exhausted", r"VFS: file-max limit \d+ reached"),
    ("time_wait_overflow", r"TCP: time wait bucket table overflow"),
    ("conntrack_full", r"nf_conntrack: (?:nf_conntrack: )?table full, dropping packet"),
    ("fork_rejected", r"cgroup: fork rejected by pids controller in "),
    # processors
    ("hung_task", r"INFO: task .{1,80}:\d+ .{0,60}?blocked .{0,80}?for more than \d+ seconds"),
    ("soft_lockup", r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - CPU#\d+ stuck for "),
    ("hard_lockup",
     r"(?:(?:NMI )?watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu (?P<cpu>\d{1,5})"),
    ("rcu_stall", r"(?:rcu: )?INFO: rcu\w* (?:self-)?detected (?:expedited )?stall"),
    ("kernel_oops", _OOPS),
    # Only seen if the machine survives for a moment, as with kernel.panic delays.
    ("kernel_panic", r"Kernel panic - not syncing: "),
    # "is", from Linux 5.6 on.
    ("cpu_throttled", r"(?:mce: )?CPU\d+: (?:Core|Package) temperature (?:is )?above threshold"),
    # storage
    ("io_error",
     (rf"(?:(?:blk_update_request|print_req_error): )?(?:I/O|timeout|protection|device offline"
     rf"|recoverable transport|critical (?:medium|nexus|space allocation)) error, dev "
     rf"{_FIXED_DISK}, sector \d")),
    ("io_error",
     (rf"(?:(?:blk_update_request|print_req_error): )?critical target error, dev {_FIXED_DISK}, "
     rf"sector \d+\b{_NEED_NOT}")),
    ("io_error", rf"Buffer I/O error on dev(?:ice)? {_FIXED_DISK}, logical block \d"),
    ("nvme_timeout", r"nvme (?P<device>nvme\d+): I/O (?:tag )?\d+ .{0,80}?timeout, "),
    # What it does after a time-out; most controllers come back.
    ("nvme_timeout", r"nvme (?P<device>nvme\d+): controller is down; will reset"),
    ("nvme_failure",
     (r"nvme (?P<device>nvme\d+): (?:Removing after probe failure|Disabling device after reset "
     r"failure|Device not ready; aborting)")),
    ("nvme_path_lost",
     r"block (?P<device>nvme\d+n\d+): no (?:usable path - requeuing|available path - failing) I/O"),
    # raid0 and linear print no colon between the level and the array's name.
    ("raid_disk_failed", rf"md/(?:raid\d{{0,2}}|linear):?\S{{0,40}}: Disk failure on {_DISK}"),
    ("filesystem_error", rf"EXT4-fs error \(device {_DISK}\)(?:: | in )"),
    ("filesystem_error",
     (rf"EXT4-fs \({_DISK}\): (?:I/O error while writing superblock|previous I/O error to "
     rf"superblock detected|This should not happen!! Data will be lost)")),
    ("filesystem_error",
     rf"JBD2: Detected IO errors \d*.{{0,4}}while flushing file data on {_JOURNAL}"),
    ("filesystem_error", rf"Aborting journal on device {_JOURNAL}\.$"),
    ("filesystem_error",
     (rf"XFS \({_DISK}\): (?:Corruption |Internal error |[Mm]etadata (?:CRC|corruption|I/O) error"
     rf"|log I/O error|.{{0,60}}[Ss]hutting down filesystem|[Ff]ilesystem has been shut down)")),
    ("filesystem_error", rf"BTRFS:? (?:error|critical) \(device {_DISK}"),
    # All that uses it hangs, by default (failmode=wait).
    ("filesystem_error",
     (r"WARNING: Pool '(?P<device>[\w.:-]{1,64})' has encountered an uncorrectable I/O failure and "
     r"has been suspended")),
    ("filesystem_read_only", rf"BTRFS:? info \(device {_DISK}.{{0,80}}?\): forced readonly"),
    ("filesystem_read_only", rf"EXT4-fs \({_DISK}\): Remounting filesystem read-only"),
    ("nfs_unresponsive", rf"(?:nfs\w*|lockd|RPC: \w+): server {_SERVER} not responding, "),
    ("nfs_state_lost", r"(?:NFS: )?_{0,2}nfs4_reclaim_\w+: (?:Lock reclaim|unhandled)"),
    ("nfs_state_lost", rf"NFS: state manager.{{0,80}} failed on NFSv4 server {_SERVER}"),
    ("lustre_connection_lost",
     (rf"Lustre(?:Error)?: .{{1,160}}?(?: to {_SERVER} \(.{{1,80}})? was lost; in progress "
     rf"operations ")),
    # -19 and -107: the server is gone, or has forgotten this client; -5, -30 and -110 reach the
    # job.
    ("lustre_operation_failed",
     (rf"LustreError: \d+-\d+: \S{{1,100}}: operation \w+ to node {_SERVER} failed: rc = -(?:5|19"
     rf"|30|107|108|110)\b")),
    ("lustre_evicted", rf"LustreError: .{{1,100}}: This client was evicted by {_SERVER}"),
    # network
    ("link_down", rf"{_DEVICE} {_INTERFACE}: (?:NIC )?Link (?:is )?[Dd]own"),
    ("link_down", rf"{_DEVICE} {_INTERFACE}: Port: \d+ Link DOWN"),
    ("transmit_timeout",
     rf"{_DEVICE} {_INTERFACE}: NETDEV WATCHDOG: .{{1,80}}: transmit queue \d+ timed out"),
    ("transmit_timeout",
     rf"NETDEV WATCHDOG: {_INTERFACE} \(.{{1,64}}\): transmit queue \d+ timed out"),
    ("adapter_failure", _MLX5 + "device's health compromised"),
    ("adapter_failure", _MLX5 + r"Fatal error \d+ detected"),
    ("adapter_command_failed",
     _MLX5 + _REFUSED + r"[A-Z0-9_]+\(0x[0-9a-f]+\) op_mod\(0x[0-9a-f]+\) failed, "),
    ("adapter_command_timed_out", _MLX5 + r"[A-Z0-9_]+\(0x[0-9a-f]+\) timeout\. Will cause a leak"),
    ("adapter_command_failed",
     (rf"(?:infiniband|efa) (?:(?P<pci>{_PCI}\.\d) )?(?P<interface>efa_\d+): Failed to process "
     rf"command ")),
    ("adapter_overheated", _MLX5 + "High temperature on sensors"),
    ("adapter_power_insufficient", _MLX5 + "Detected insufficient power on the PCIe slot"),
    ("module_error", _MLX5 + r"Port module event\[error\]: module \d+, "),
    ("module_unplugged", _MLX5 + r"Port module event: module \d+, Cable unplugged"),
    # buses and the GPU driver
    ("pcie_error_corrected", rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Correct"),
    ("pcie_error_nonfatal",
     rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"),
    ("pcie_error_fatal",
     rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    ("pcie_slot_down",
     rf"pcieport (?P<pci>{_PCI}\.\d): pciehp: Slot\([\w-]+\): (?:Link Down|Card not present)"),
    ("pcie_containment", rf"pcieport (?P<pci>{_PCI}\.\d): DPC: containment event"),
    ("pcie_recovery_failed", rf"{_DEVICE}: (?:AER: )?device recovery failed"),
    ("iommu_fault",
     r"DMAR: \[[\w ]+\] Request device \[(?P<pci>[0-9a-fx:.]{4,16})\] .{0,20}fault addr "),
    ("iommu_fault",
     (rf"(?:{_DEVICE}: )?AMD-Vi: Event logged \[IO_PAGE_FAULT "
     rf"(?:device=(?P<device>[0-9a-f:.]{{4,16}}) )?")),
    # Of translation, address size, access, permission; the raw event follows.
    ("iommu_fault", r"arm-smmu-v3 [\w.-]{1,40}: event 0x1[0-3] received:"),
    # The first is printed when the driver probes a GPU, without an Xid.
    ("gpu_off_bus", rf"NVRM: (?:GPU (?P<pci>{_PCI}\.\d): GPU has )?fallen off the bus"),
    # GSP's heartbeat and its calls: on some releases no Xid follows.
    ("gpu_firmware_timeout",
     (r"NVRM: (?:GPU(?P<gpu>\d+) )?_kgsp(?:IsHeartbeatTimedOut: Heartbeat timed out|RpcRecvPoll: "
     r"[\w /-]{1,40} heartbeat timed out|Log(?:Rpc|Gsp)Timeout: \*{3,60} GSP Timeout)")),
    ("gpu_init_failed",
     (rf"NVRM: (?:GPU (?:at PCI:)?(?P<pci>{_PCI}(?:\.\d)?): )?(?:RmInitAdapter failed!|The NVIDIA "
     rf"probe routine failed for \d+ device|GPU does not have the necessary power cables "
     rf"connected)")),
    ("nvlink_detect_failed", r"NVRM: (?:GPU\d+ )?\w*PostRxDetectLinkMask\w*: "),
    ("peermem_error", r"nvidia-peermem \w+:\d+ ERROR "),
    # The process name, which a user chooses, comes first; the kernel prints all that follows.
    ("nccl_segfault", _SEGFAULT + r"libnccl[\w.-]*\["),
    ("cuda_segfault", _SEGFAULT + r"libcuda[\w.-]*\["),
    ("nvidia_version_mismatch", r"NVRM: API mismatch: the client "),
)  # fmt: skip
"""Events, each with an expression for its line; the first that matches decides."""
_ANY = re.compile("|".join(f"({re.sub(r'[?]P<[a-z]+>', '?:', row[1])})" for row in _TABLE))
"""All of them at once, in a group each."""

EVENTS = tuple(dict.fromkeys(name for name, _ in _TABLE))
"""Names of events."""


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
    return Xid(f"{match[1].lower()}.0", int(match[2]), message[match.end() :]) if match else None


def xid_expression(codes: str) -> str:
    """Return an expression for Xids of `codes`, with groups `pci`, `code` and perhaps `pid`."""
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
    match = None
    if found.code == NVLINK_XID:
        match = _LINK_74.search(found.detail)
    elif found.code in NVLINK_5_XIDS:
        match = _LINK_5.match(found.detail)
    if match is None:
        return None
    link, severity = int(match[2]), (match[1] or "fatal").lower()
    return LinkError(
        str(link) if link in _LINKS else "", "fatal" if severity == "fatal" else "nonfatal"
    )


class KernelEvent(NamedTuple):
    """A fault that the kernel logs."""

    name: str
    """One of `EVENTS`."""
    device: str
    """What has it, by the kernel's own name: `nvme0n1`, `0000:17:00.0`, a CPU's number, the label
    of a DIMM, a server's name; empty if the line does not say.
    """
    errors: int = 1
    """How many the line stands for."""


def event_expressions(name: str) -> list[str]:
    """Return the expressions of an event; a group `pci` is its device. ValueError: none such."""
    if name not in EVENTS:
        raise ValueError(f"{name} is not an event of the kernel log")
    return [pattern for event, pattern in _TABLE if event == name]


def event(message: str) -> KernelEvent | None:
    """Return the event that a line of the kernel log reports, or None."""
    found = _ANY.match(message)
    if found is None or found.lastindex is None:
        return None
    name, pattern = _TABLE[found.lastindex - 1]
    match = re.match(pattern, message)
    groups = match.groupdict() if match else {}
    device = next((groups[key] for key in _GROUPS if groups.get(key)), "")
    if partition := _PARTITION.fullmatch(device):
        device = partition[1] or partition[2]
    return KernelEvent(name, device, int(groups.get("count") or 1))


class EventParser:
    """Parses the lines of one log in their order, with those that make up a record together.

    Errors that firmware reports (APEI) have their severity, their kind and their device in lines of
    their own, with the number of the record in front: drivers/firmware/efi/cper.c. Records of the
    previous boot have no number, and are none of this one.
    """

    def __init__(self) -> None:
        self._record = self._severity = self._section = ""

    def event(self, message: str) -> KernelEvent | None:
        """Return the event that the next line reports or completes, or None."""
        if not message.startswith("{"):
            return event(message)
        match = _RECORD.match(message)
        if match is None:
            return None
        if match["severity"] is not None:
            self._record, self._severity, self._section = match["record"], match["severity"], ""
            return None
        if match["record"] != self._record:
            return None
        self._section, device = match["section"] or self._section, match["pci"] or ""
        kind = next((kind for kind in _SECTIONS if self._section.endswith(kind)), "")
        if not kind or (kind == "PCIe error" and not device):
            return None
        self._section = ""
        if self._severity not in _SEVERITIES:
            return None
        return KernelEvent(_SECTIONS[kind][_SEVERITIES.index(self._severity)], device)
