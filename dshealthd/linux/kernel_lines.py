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
"""Actions that Xid 154 requests, by the number in the line; its text varies with the driver.

Numbers and names are those of nvmlDeviceGpuRecoveryAction_t.
"""
_DEVICE = rf"[\w-]{{1,40}} (?P<pci>{_PCI}\.\d)"
"""A driver and its PCI device, as dev_printk begins a line."""
_INTERFACE = r"(?P<interface>[\w.@-]{1,15})"
_DISK = r"(?P<device>[\w!-]{1,32})"
"""A block device as the kernel names it; `!` stands for a slash."""
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
_GROUPS = ("device", "interface", "interface_2", "cpu", "server", "pci")
"""Groups that name the device, the most telling first."""
_PARTITION = re.compile(
    r"((?:nvme\d+(?:c\d+)?n|mmcblk|md|nbd|loop)\d+)p\d+|((?:s|v|h|xv)d[a-z]+)\d+"
)
_RECORD = re.compile(
    r"\{(?P<record>\d{1,10})\}\[Hardware Error\]: {1,8}(?:Error \d+, type: (?P<severity>\w+)"
    rf"|section_type: (?P<section>[\w /-]{{1,60}})|device_id: (?P<pci>{_PCI}\.\d))$"
)
_PCIE = {
    "corrected": "pcie_error_corrected",
    "recoverable": "pcie_error_nonfatal",
    "fatal": "pcie_error_fatal",
}
_MEMORY = {
    "corrected": "memory_error_corrected",
    "recoverable": "memory_error_uncorrected",
    "fatal": "memory_error_uncorrected",
}
_PROCESSOR = {
    "corrected": "machine_check_corrected",
    "recoverable": "machine_check",
    "fatal": "machine_check",
}


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
    name: str
    part: str
    pattern: re.Pattern[str]


def _event(name: str, part: str, pattern: str) -> _Event:
    return _Event(name, part, re.compile(pattern))


_TABLE = (
    # memory
    _event("oom_kill", "Killed process ",
           (r"(?:(?:Memory cgroup out|Out) of memory(?: \([a-z_]+\))?: )?Killed process "
            r"(?P<pid>\d+)[ ,]")),
    _event("allocation_failure", "page allocation failure: order:", (r".{1,64}?: page allocation "
                                                                     r"failure: order:\d+")),
    _event("memory_error_corrected", " CE ", _EDAC % "CE"),
    _event("memory_error_uncorrected", " UE ", _EDAC % "UE"),
    _event("memory_error_corrected", ": Machine Check", _OF_MEMORY + _CE + _CONTROLLER),
    _event("memory_error_uncorrected", ": Machine Check", _OF_MEMORY + _UC + _CONTROLLER),
    _event("machine_check_corrected", ": Machine Check", _OF_CPU + _CE + _ELSEWHERE),
    _event("machine_check", ": Machine Check", _OF_CPU + _UC + _ELSEWHERE),
    _event("machine_check_corrected", "_STATUS[", _BANK_AMD + r"CE\|"),
    _event("machine_check", "_STATUS[", _BANK_AMD + r"(?:UE|-\|[\w|-]{1,80}\bDeferred)\b"),
    # limits
    _event("open_files_exhausted", "file-max limit ", r"VFS: file-max limit \d+ reached"),
    _event("time_wait_overflow", "time wait bucket table overflow", (r"TCP: time wait bucket "
                                                                     r"table overflow")),
    _event("conntrack_full", "table full, dropping packet",
           r"nf_conntrack: (?:nf_conntrack: )?table full, dropping packet"),
    _event("fork_rejected", "fork rejected by pids controller", (r"cgroup: fork rejected by pids "
                                                                 r"controller in ")),
    # processors
    _event("hung_task", "INFO: task ", (r"INFO: task .{1,80}:\d+ .{0,60}?blocked .{0,80}?for "
                                        r"more than \d+ seconds")),
    _event("soft_lockup", "BUG: soft lockup", (r"(?:(?:NMI )?watchdog: )?BUG: soft lockup - "
                                               r"CPU#\d+ stuck for ")),
    _event("hard_lockup", "hard LOCKUP on cpu",
           (r"(?:(?:NMI )?watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu "
            r"(?P<cpu>\d{1,5})")),
    _event("rcu_stall", "detected ", (r"(?:rcu: )?INFO: rcu\w* (?:self-)?detected (?:expedited "
                                      r")?stall")),
    _event("kernel_oops", "[#", _OOPS),
    # Only seen if the machine survives for a moment, as with kernel.panic delays.
    _event("kernel_panic", "Kernel panic - ", r"Kernel panic - not syncing: "),
    _event("cpu_throttled", "temperature above threshold",
           r"(?:mce: )?CPU\d+: (?:Core|Package) temperature above threshold"),
    # storage
    _event("io_error", " error, dev ",
           r"(?:(?:blk_update_request|print_req_error): )?(?:I/O|timeout|protection|recoverable "
           r"transport|critical (?:medium|target|nexus))"
           rf" error, dev (?!fd\d){_DISK}, sector \d"),
    _event("io_error", "Buffer I/O error on dev", (r"Buffer I/O error on dev(?:ice)? "
                                                   rf"(?!fd\d){_DISK}, logical block \d")),
    _event("nvme_timeout", "timeout, ", (r"nvme (?P<device>nvme\d+): I/O (?:tag )?\d+ "
                                         r".{0,80}?timeout, ")),
    # What it does after a time-out; most controllers come back.
    _event("nvme_timeout", "controller is down", (r"nvme (?P<device>nvme\d+): controller is "
                                                  r"down; will reset")),
    _event("nvme_failure", "nvme nvme",
           r"nvme (?P<device>nvme\d+): (?:Removing after probe failure|Disabling device after "
           r"reset failure"
           r"|Device not ready; aborting)"),
    _event("nvme_path_lost", " path - ",
           (r"block (?P<device>nvme\d+n\d+): no (?:usable path - requeuing|available path - "
            r"failing) I/O")),
    # raid0 and linear print no colon between the level and the array's name.
    _event("raid_disk_failed", ": Disk failure on ",
           rf"md/(?:raid\d{{0,2}}|linear):?\S{{0,40}}: Disk failure on {_DISK}"),
    _event("filesystem_error", "EXT4-fs error ", rf"EXT4-fs error \(device {_DISK}\): "),
    _event("filesystem_error", "EXT4-fs (",
           rf"EXT4-fs \({_DISK}\): (?:I/O error while writing superblock"
           r"|previous I/O error to superblock detected"
           r"|This should not happen!! Data will be lost)"),
    _event("filesystem_error", "JBD2: Detected IO errors",
           rf"JBD2: Detected IO errors \d*.{{0,4}}while flushing file data on {_JOURNAL}"),
    _event("filesystem_error", "Aborting journal on device", (r"Aborting journal on device "
                                                              rf"{_JOURNAL}\.$")),
    _event("filesystem_error", "XFS (",
           rf"XFS \({_DISK}\): (?:Corruption |Internal error |[Mm]etadata "
           r"(?:CRC|corruption|I/O) error|log I/O error"
           r"|.{0,60}[Ss]hutting down filesystem|[Ff]ilesystem has been shut down)"),
    _event("filesystem_error", "BTRFS", rf"BTRFS:? (?:error|critical) \(device {_DISK}"),
    _event("filesystem_read_only", "forced readonly", (r"BTRFS:? info \(device "
                                                       rf"{_DISK}.{{0,80}}?\): forced readonly")),
    _event("filesystem_read_only", "Remounting filesystem read-only",
           rf"EXT4-fs \({_DISK}\): Remounting filesystem read-only"),
    _event("nfs_unresponsive", " not responding, ",
           rf"(?:nfs\w*|lockd|RPC: \w+): server {_SERVER} not responding, "),
    _event("nfs_state_lost", "reclaim", (r"(?:NFS: )?_{0,2}nfs4_reclaim_\w+: (?:Lock "
                                         r"reclaim|unhandled)")),
    _event("nfs_state_lost", "NFS: state manager", (rf"NFS: state manager.{{0,80}} failed on "
                                                    rf"NFSv4 server {_SERVER}")),
    _event("lustre_connection_lost", " was lost; in progress operations",
           (rf"Lustre(?:Error)?: .{{1,160}}?(?: to {_SERVER} \(.{{1,80}})? was lost; in progress "
            r"operations ")),
    # -19 and -107: the server is gone, or has forgotten this client; -5, -30 and -110 reach the
    # job.
    _event("lustre_operation_failed", "failed: rc = -",
           rf"LustreError: \d+-\d+: \S{{1,100}}: operation \w+ to node {_SERVER} failed: "
           r"rc = -(?:5|19|30|107|108|110)\b"),
    _event("lustre_evicted", "This client was evicted by ", (rf"LustreError: .{{1,100}}: This "
                                                             rf"client was evicted by {_SERVER}")),
    # network
    _event("link_down", "Link ", rf"{_DEVICE} {_INTERFACE}: (?:NIC )?Link (?:is )?[Dd]own"),
    _event("link_down", " Link DOWN", rf"{_DEVICE} {_INTERFACE}: Port: \d+ Link DOWN"),
    _event("transmit_timeout", "NETDEV WATCHDOG: ",
           rf"(?:{_DEVICE} {_INTERFACE}: NETDEV WATCHDOG: .{{1,80}}"
           rf"|NETDEV WATCHDOG: {_INTERFACE.replace('interface', 'interface_2')} "
           rf"\(.{{1,64}}\)): transmit queue \d+ timed out"),
    _event("adapter_failure", "device's health compromised", _MLX5 + "device's health compromised"),
    _event("adapter_failure", "Fatal error ", _MLX5 + r"Fatal error \d+ detected"),
    _event("adapter_command_failed", "op_mod(",
           _MLX5 + _REFUSED + r"[A-Z0-9_]+\(0x[0-9a-f]+\) op_mod\(0x[0-9a-f]+\) failed, "),
    _event("adapter_command_timed_out", " timeout. Will cause a leak of a command resource",
           _MLX5 + r"[A-Z0-9_]+\(0x[0-9a-f]+\) timeout\. Will cause a leak"),
    _event("adapter_command_failed", ": Failed to process command ",
           (rf"(?:infiniband|efa) (?:(?P<pci>{_PCI}\.\d) )?(?P<interface>efa_\d+): Failed to "
            r"process command ")),
    _event("adapter_overheated", ("High temperature on "
                                  "sensors"), _MLX5 + "High temperature on sensors"),
    _event("adapter_power_insufficient", "Detected insufficient power",
           _MLX5 + "Detected insufficient power on the PCIe slot"),
    _event("module_error", "Port module event[error]", _MLX5 + (r"Port module event\[error\]: "
                                                                r"module \d+, ")),
    _event("module_unplugged", "Cable unplugged", _MLX5 + (r"Port module event: module \d+, "
                                                           r"Cable unplugged")),
    # buses and the GPU driver
    _event("pcie_error_corrected", "severity=Correct", (rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: "
                                                        r"severity=Correct")),
    _event("pcie_error_nonfatal", "severity=Uncorrect",
           rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"),
    _event("pcie_error_fatal", "severity=Uncorrect",
           rf"{_DEVICE}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    _event("pcie_slot_down", "pciehp: Slot(",
           (rf"pcieport (?P<pci>{_PCI}\.\d): pciehp: Slot\([\w-]+\): (?:Link Down|Card not "
            r"present)")),
    _event("pcie_containment", "DPC: containment event", (rf"pcieport (?P<pci>{_PCI}\.\d): DPC: "
                                                          r"containment event")),
    _event("pcie_recovery_failed", "device recovery failed", (rf"{_DEVICE}: (?:AER: )?device "
                                                              r"recovery failed")),
    _event("iommu_fault", "fault addr ", (r"DMAR: \[[\w ]+\] Request device "
                                          r"\[(?P<pci>[0-9a-fx:.]{4,16})\] .{0,20}fault addr ")),
    _event("iommu_fault", "IO_PAGE_FAULT",
           (rf"(?:{_DEVICE}: )?AMD-Vi: Event logged \[IO_PAGE_FAULT "
            rf"(?:device=(?P<device>[0-9a-f:.]{{4,16}}) )?")),
    # The first is printed when the driver probes a GPU, without an Xid.
    _event("gpu_off_bus", "allen off the bus", (rf"NVRM: (?:GPU (?P<pci>{_PCI}\.\d): GPU has "
                                                r")?fallen off the bus")),
    # GSP's heartbeat and its calls: on some releases no Xid follows.
    _event("gpu_firmware_timeout", "_kgsp",
           r"NVRM: (?:GPU(?P<gpu>\d+) )?_kgsp(?:IsHeartbeatTimedOut: Heartbeat timed out"
           r"|RpcRecvPoll: [\w /-]{1,40} heartbeat timed out"
           r"|Log(?:Rpc|Gsp)Timeout: \*{3,60} GSP Timeout)"),
    _event("gpu_init_failed", "NVRM: ",
           rf"NVRM: (?:GPU (?:at PCI:)?(?P<pci>{_PCI})(?:\.\d)?: )?(?:RmInitAdapter failed!"
           r"|The NVIDIA probe routine failed for \d+ device"
           r"|GPU does not have the necessary power cables connected)"),
    _event("nvlink_detect_failed", "RxDetectLinkMask", (r"NVRM: (?:GPU\d+ "
                                                        r")?\w*PostRxDetectLinkMask\w*: ")),
    _event("peermem_error", "nvidia-peermem ", r"nvidia-peermem \w+:\d+ ERROR "),
    # The process name, which a user chooses, comes first; the kernel prints all that follows.
    _event("nccl_segfault", " in libnccl", _SEGFAULT + r"libnccl[\w.-]*\["),
    _event("cuda_segfault", " in libcuda", _SEGFAULT + r"libcuda[\w.-]*\["),
    _event("nvidia_version_mismatch", "API mismatch: the client ", (r"NVRM: API mismatch: the "
                                                                    r"client ")),
)  # fmt: skip

EVENTS = tuple(dict.fromkeys(event.name for event in _TABLE))
"""Names of events."""


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
    """Return the expressions of one of `EVENTS`; a group `pci` is the device that a line names.

    ValueError: there is no such event.
    """
    if name not in EVENTS:
        message = f"{name} is not an event of the kernel log"
        raise ValueError(message)
    return [event.pattern.pattern for event in _TABLE if event.name == name]


def event(message: str) -> KernelEvent | None:
    """Return the event that a line of the kernel log reports, or None."""
    for name, part, pattern in _TABLE:
        if part in message and (match := pattern.match(message)):
            groups = match.groupdict()
            device = next((groups[key] for key in _GROUPS if groups.get(key)), "")
            if partition := _PARTITION.fullmatch(device):
                device = partition[1] or partition[2]
            return KernelEvent(name, device, int(groups.get("count") or 1))
    return None


class EventParser:
    """Parses the lines of one log in their order, with those that make up a record together.

    Errors that firmware reports (APEI) have their severity, their kind and their device in lines of
    their own, with the number of the record in front: drivers/firmware/efi/cper.c. Records of the
    previous boot have no number, and are none of this one.
    """

    def __init__(self) -> None:
        """Begin outside a record."""
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
        section, device = match["section"] or self._section, match["pci"] or ""
        self._section = section
        names = {}
        if section == "memory error":
            names = _MEMORY
        elif section.endswith("processor error"):
            names = _PROCESSOR
        elif section == "PCIe error" and device:
            names = _PCIE
        self._section = "" if names else section
        name = names.get(self._severity)
        return None if name is None else KernelEvent(name, device)
