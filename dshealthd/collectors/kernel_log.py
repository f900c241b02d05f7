"""Faults in the kernel log, counted across restarts of the agent.

Xids, NVSwitch and NVLink errors, OOM kills, hung tasks, I/O, link and bus errors; from `/dev/kmsg`,
or from systemd's journal in a container that may not open it.

Only records of the kernel's own facility count. Every record is read once or counted as lost. A
state file keeps the position and the counts, so that a restarted agent continues within the same
boot. Reading needs CAP_SYSLOG where kernel.dmesg_restrict is 1.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from dshealthd.core import documents, schema, state_file
from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    News,
    NotAvailable,
    Reason,
    Sample,
    SourceError,
    Worker,
    counter,
    gauge,
)
from dshealthd.core.host import Host, read
from dshealthd.core.options import Duration, constant, option
from dshealthd.core.persistent_counters import OTHER, PersistentCounters, Row
from dshealthd.core.result import fault_of
from dshealthd.core.state_writer import LatestWriter
from dshealthd.linux import kernel_lines as lines
from dshealthd.linux.journal import JournalReader, kernel_log_reader
from dshealthd.linux.kmsg import KERNEL, KernelLogReader, KernelLogRecord
from dshealthd.linux.pci import bus

log = logging.getLogger(__name__)

_GPU = ("gpu", "pci")
XIDS = counter(
    "dshealthd_xid_errors_total",
    "Xid lines of the GPU driver since boot, as far back as the log reached. One fault may log "
    "several. gpu is the position of the PCI device among NVIDIA's, which is NVML's index; \"\" "
    "if the device is gone.",
    *_GPU,
    "xid",
)
LAST_XID = gauge(
    "dshealthd_xid_last_timestamp_seconds",
    "Unix time at which the last such Xid line was read. Lines logged before the agent first "
    "started in this boot have the kernel's timestamp, which drifts from the system clock over "
    "weeks.",
    *_GPU,
    "xid",
)
LAST_RECOVERY = gauge(
    "dshealthd_xid_recovery_action_last_timestamp_seconds",
    "Unix time of the last Xid 154 that requested this action; no later Xid withdraws a request.",
    *_GPU,
    "action",
)
NVLINK = counter(
    "dshealthd_xid_nvlink_errors_total",
    'NVLink errors in Xid lines (74; 144 to 150 on NVLink 5), by link; link is "" if the line has '
    "none.",
    *_GPU,
    *("link", "severity"),
)
LAST_NVLINK = gauge(
    "dshealthd_xid_nvlink_last_timestamp_seconds",
    "Unix time of the last NVLink error of this severity in an Xid line, on any link.",
    *_GPU,
    "severity",
)
SXIDS = counter(
    "dshealthd_sxid_errors_total",
    "Errors reported by the NVSwitch driver (SXid) since boot, as far back as the log reached.",
    *("nvswitch", "pci", "sxid", "severity"),
)
EVENTS = counter(
    "dshealthd_kernel_events_total",
    "Faults in the kernel log since boot, as far back as the log reached. The kernel "
    "rate-limits some of these lines. device is what the line names: a disk without its "
    "partition, a PCI address (of the GPU where it is that of the port above one), an interface, "
    'a CPU, a DIMM, a server; "" if it names none, other after the first 32 devices of an event.',
    *("event", "device"),
)
LOST = counter(
    "dshealthd_kernel_log_records_lost_total",
    "Records of this boot that were overwritten before they were read; their events are not "
    "counted.",
)

_OF_GPU = frozenset({XIDS, LAST_XID, LAST_RECOVERY, NVLINK, LAST_NVLINK})
"""Metrics whose label `gpu` is looked up on export, and no part of the key they are counted by."""
_WIDTHS = {metric: len(metric.labels) - (metric in _OF_GPU) for metric in (*_OF_GPU, SXIDS, EVENTS)}
_SERIES = 500
"""Most series of Xids, SXids and NVLinks; further ones are counted as other."""
_DEVICES = 32
"""Most devices of an event that are counted apart, so that a storm of one hides no other's."""
_FORGETFUL_SAVE = 60
"""How many times less often a change of position alone is saved than a changed count."""
_GPU_REFRESH = 60.0
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class KernelLogOptions(CollectorOptions):
    """How much of the log one collection reads, and how often the position is saved."""

    interval: Duration = option("1s", "Minimum time between reads.", minimum="100ms")
    read_time: Duration = constant("20ms")
    """How long one collection may read, in the agent's loop; the next one reads the rest."""
    read_records: int = constant(10_000)
    """How many records one collection may read."""
    save_interval: Duration = constant("5s")
    """Minimum time between writes of the state file: what a crash counts twice."""
    journal: bool = option(
        False,
        "Read the kernel log from systemd's journal below path.rootfs, not from /dev/kmsg, "
        "which only a privileged container can open.",
    )


@dataclass(frozen=True, slots=True)
class KernelLogState:
    """What outlives the agent within a boot, whose end clears the log.

    It is not synced to the disk: within a boot every reader sees a renamed file whole.
    """

    boot_id: str
    version: int
    position: Annotated[int, schema.Integer()]
    lost: Annotated[int, schema.Integer()]
    counts: list[Row]
    journal: bool = False


class KernelLog(Collector):
    """Reads a device that never blocks, in the agent; the journal in a worker."""

    Options = KernelLogOptions
    keeps_state = True

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self._reader = self._open()
        self._tally = PersistentCounters(_WIDTHS, _SERIES, fixed=(EVENTS,))
        self._lost_before = 0
        self._parser = lines.EventParser()
        self._devices: dict[str, set[str]] | None = None
        """The devices that events are counted for, by the event's name; None to read the counts."""
        self._writer: LatestWriter | None = None
        self._boot_id = ""
        self._fault: Fault | None = None
        self._begun = False
        self._known = False
        self._resumed = False
        self._saved_position = 0
        self._written = 0
        self._saved = float("-inf")
        self._gpus: dict[str, str] = {}
        self._gpus_read = float("-inf")
        self._ports: dict[str, str] = {}
        """Each GPU by the port above it: a slot that loses its link takes the GPU off the bus."""
        self._shown: list[Sample] | None = None

    def _open(self) -> KernelLogReader | JournalReader:
        return kernel_log_reader(self.host, self.context.monotonic, journal=self.options.journal)

    @classmethod
    def runs_in(cls, options: Any) -> Worker | None:
        """Return the worker for the journal: whatever hangs on another disk does not delay Xids."""
        return Worker.LOGS if options.journal else None

    @classmethod
    def absent(cls, options: Any, host: Host) -> str | None:
        """Return why the collector is absent if there is no kernel log, as in most containers."""
        if options.journal:  # on a disk that may hang
            return None
        path = host.device("kmsg")
        return None if os.path.exists(path) else f"there is no {path}"

    def collect(self) -> Iterator[Sample | Fault]:
        """Read new records of the kernel log and yield all counts, before raising any error."""
        if self.options.journal and (fault := self.context.entering("journal")) is not None:
            yield from self._samples() if self._known else ()
            yield fault
            return
        if not self._begun:
            self._scan_bus()
            self._resume()
        failure: OSError | SourceError | None = None
        try:
            self._read()
        except (OSError, SourceError) as error:
            if isinstance(error, FileNotFoundError) and not self._known:
                raise NotAvailable(str(error)) from error
            failure = error
        if self._known:
            self._save()
            yield from self._samples()
        if self._fault is not None:
            yield self._fault
        if failure is not None:
            raise failure

    @property
    def descriptor(self) -> int | None:
        """The kernel log's own, so that new lines are read at once."""
        return self._reader.descriptor

    def close(self) -> None:
        """Start saving the position in the kernel log, and close the log."""
        if self._known:
            self._save(now=True)
        self._reader.close()

    def _read(self) -> None:
        reader = self._reader
        before = reader.position, reader.drained
        try:
            for record in reader.read(self.options.read_records, self.options.read_time):
                if record.facility == KERNEL and record.whole:
                    self._count(record)
        finally:
            if before != (reader.position, reader.drained):
                self._known, self._shown = True, None
        if reader.behind():
            what = "the saved position is beyond the end of the log; counting restarts"
            self._troubled(what, Reason.MALFORMED)
            reader.close()
            self._reader = self._open()
            self._lost_before, self._resumed = 0, False
            self._tally.clear()
            self._devices = None
            self._read()

    def _count(self, record: KernelLogRecord) -> None:
        message = record.message
        if message.startswith("NVRM: Xid "):
            if (xid := lines.xid(message)) is not None:
                code = str(xid.code) if xid.code in lines.XIDS else OTHER
                when = self._time(record)
                self._wake_gpus()
                self._tally.count(XIDS, xid.pci_bus_id, code)
                self._tally.put(when, LAST_XID, xid.pci_bus_id, code)
                if (action := lines.recovery_action(xid)) is not None:
                    self._tally.put(when, LAST_RECOVERY, xid.pci_bus_id, action)
                elif (link := lines.link_error(xid)) is not None:
                    self._tally.count(NVLINK, xid.pci_bus_id, link.link, link.severity)
                    self._tally.put(when, LAST_NVLINK, xid.pci_bus_id, link.severity)
        elif message.startswith("nvidia-nvswitch"):
            if (sxid := lines.sxid(message)) is not None:
                code = str(sxid.code) if sxid.code in lines.SXIDS else OTHER
                self._wake_gpus()
                self._tally.count(SXIDS, sxid.switch, sxid.pci_bus_id, code, sxid.severity)
        elif (event := self._parser.event(message)) is not None:
            self._tally.count(EVENTS, event.name, self._device(event), by=event.errors)

    def _device(self, event: lines.KernelEvent) -> str:
        device = self._ports.get(event.device, event.device)
        if self._devices is None:
            self._devices = {}
            for metric, labels, _ in self._tally:
                if metric is EVENTS:
                    self._devices.setdefault(labels[0], set()).add(labels[1])
        known = self._devices.setdefault(event.name, set())
        if device and device not in known and len(known - {"", OTHER}) >= _DEVICES:
            return OTHER
        known.add(device)
        return device

    def _wake_gpus(self) -> None:
        """Wake the GPU collectors for a log line, unless it predates the agent."""
        if self._resumed or self._reader.drained:
            self.context.tell(News.GPU_ERROR)

    def _time(self, record: KernelLogRecord) -> float:
        """Return a kernel log record's Unix time: when it was read, unless it predates the agent.

        Alerts look for recent records. By the kernel's clock, which drifts, a new record would look
        old after months of uptime; so would one that was written while no agent ran.
        """
        now = self.context.wall()
        if self._resumed or self._reader.drained:
            return round(now, 3)
        return round(now - self.context.monotonic() + record.timestamp, 3)

    def _samples(self) -> list[Sample]:
        """Return the kernel log's counts as samples; the same list if nothing is new."""
        if self._shown is None:
            # An unseen event is known to be 0 only once the whole log has been read. Before, counts
            # of lines that were there already would rise, as those of new lines do.
            events: dict[tuple[str, ...], float] = {}
            if self._reader.drained:
                events = {(name, ""): 0.0 for name in lines.EVENTS}
            shown = []
            for metric, labels, value in self._tally:
                if metric is EVENTS:
                    if self._resumed or self._reader.drained:
                        events[labels] = value
                elif metric in _OF_GPU:
                    shown.append(metric(value, self._gpu(labels[0]), *labels))
                else:
                    shown.append(metric(value, *labels))
            shown += [EVENTS(value, *labels) for labels, value in events.items()]
            if not self.options.journal:  # which does not tell what journald missed
                shown.append(LOST(self._lost_before + self._reader.lost))
            self._shown = shown
        return self._shown

    def _gpu(self, pci_bus_id: str) -> str:
        """Return the index of a GPU that the kernel log names; rescan the bus if it is unknown."""
        now = self.context.monotonic()
        if pci_bus_id and pci_bus_id not in self._gpus and now - self._gpus_read > _GPU_REFRESH:
            self._gpus_read = now
            self._scan_bus()
        return self._gpus.get(pci_bus_id, "")

    def _scan_bus(self) -> None:
        """Look up the GPUs' indices and ports; one that fell off the bus keeps its own."""
        try:
            gpus, ports = bus(self.host).gpus(), bus(self.host).ports()
        except OSError as error:
            log.info("no GPU indices for Xids: %s", error)
            return
        self._gpus = {address: str(index) for index, address in enumerate(gpus)} | self._gpus
        self._ports = ports | self._ports

    def _resume(self) -> None:
        self._begun = True
        if self.context.state is None:
            return
        try:
            self._boot_id = read(self.host.proc("sys/kernel/random/boot_id")).strip()
        except OSError as error:
            what = "the position in the log is not kept: the boot ID cannot be read"
            self._troubled(what, error)
            return
        place = f"{self.context.state}/{self.name}.json"
        write = functools.partial(state_file.replace_in_child, place)
        self._writer = LatestWriter(write, self.name)
        try:
            text = self.context.read_state(place)
            saved: KernelLogState = schema.of(KernelLogState).read(schema.document(text), place)
            if saved.boot_id != self._boot_id or saved.journal is not self.options.journal:
                return  # nothing of this boot, or the numbers of another log
            if saved.version != _VERSION:
                schema.misfit(place, f"has version {saved.version}")
            self._tally.restore(saved.counts)
        except FileNotFoundError:
            return
        except OSError as error:
            self._troubled("the saved position cannot be read; counting restarts", error)
        except (ValueError, ArithmeticError) as error:
            self._troubled("the saved position is invalid; counting restarts", error)
        else:
            self._reader.position = self._saved_position = saved.position
            self._lost_before = saved.lost
            self._resumed = True

    def _save(self, *, now: bool = False) -> None:
        """Save the log's position and counts if they changed and it is time, or `now`."""
        if self._writer is None:
            return
        self._check_saved(self._writer)
        position = self._reader.position
        # A position alone matters less than a count: losing it only means reading the same harmless
        # lines again.
        if self._tally.changed or position != self._saved_position:
            age = self.context.monotonic() - self._saved
            wait = self.options.save_interval * (1 if self._tally.changed else _FORGETFUL_SAVE)
            if now or age >= wait:
                self._saved = self.context.monotonic()
                state = KernelLogState(
                    self._boot_id,
                    _VERSION,
                    position,
                    self._lost_before + self._reader.lost,
                    self._tally.rows(),
                    self.options.journal,
                )
                try:
                    self._writer.put(documents.dumps(state, separators=documents.COMPACT).encode())
                except OSError as error:
                    self._tally.changed = True
                    self._troubled("position in the log cannot be saved", error)
                else:
                    self._saved_position = position

    def _check_saved(self, writer: LatestWriter) -> None:
        """Report the outcome of the last write of the kernel log's counts, and a hung write."""
        hung = writer.hung_for()
        if hung > self.options.deadline:
            self._troubled("position in the log is not saved: the disk hangs", Reason.TIMEOUT)
        elif writer.error is not None:
            self._tally.changed = True
            error, writer.error = writer.error, None
            self._troubled("position in the log cannot be saved", error)
        elif writer.written > self._written and not writer.busy:
            self._written, self._fault = writer.written, None

    def _troubled(self, what: str, why: Exception | Reason) -> None:
        if isinstance(why, Reason):
            fault = Fault("state", why, what)
        else:
            fault = fault_of("state", why)._replace(detail=f"{what}: {why}")
        if fault != self._fault:
            log.warning("kernel_log: %s", fault.detail)
        self._fault = fault
