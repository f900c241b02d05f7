"""Findings about GPUs that are lost, in error or not monitored, from NVML and the driver's log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from dshealthd.findings.finding import Sign
from dshealthd.findings.limits import source as limit_source
from dshealthd.findings.past import DAY, HOUR
from dshealthd.findings.series import (
    Point,
    Series,
    by,
    each,
    each_over,
    flagged,
    keyed,
    logged,
    some,
)
from dshealthd.findings.users import Users

HUNG = frozenset(("timeout", "stuck", "crashed"))
"""Reasons that mean a call did not return."""
OF_THE_AGENT = frozenset(
    ("permission_denied", "malformed", "cannot_start", "out_of_memory", "internal", "expired")
)
"""Reasons that lie with the agent: jobs may use a GPU that it cannot read."""
XIDS_APPLICATION = frozenset(
    ("11", "13", "14", "25", "31", "37", "43", "45", "68", "69", "106", "107", "137", "141")
)
"""Xids that an application causes, or that can be ignored, according to NVIDIA's catalogue: it has
the application checked after 11, 25, 37 and 137 (an illegal access over NVLink, which the GPU at
the other end logs); user space sends 14, and 106 and 107 are tests.
"""
XIDS_RECURRING = ("13", "31", "68", "69")
"""Those of them that a faulty GPU causes as well, in one application after the other."""
XIDS_MEMORY = frozenset(("48", "95"))
XIDS_EXCHANGE = frozenset(("64",))
XIDS_RESET = frozenset(("46", "62", "109", "110", "119", "120", "136", "140", "143", "158"))
_NO_ROW, _NO_REPAIR = "no spare row is left", "the memory cannot be repaired"
_ECC = "uncorrected ECC errors"
UNREPAIRABLE = (_NO_ROW, _NO_REPAIR, *(f"Xid {xid}" for xid in XIDS_EXCHANGE))
"""Reasons for a reset that mean that the GPU may have to be replaced."""
UNCORRECTED = (_ECC, *(f"Xid {xid}" for xid in XIDS_MEMORY))
"""Those that mean memory errors that were neither corrected nor contained."""
CONTAINED = "a memory error has ended one application, and was contained (Xid 94)"
XIDS_GSP = frozenset(("119", "120"))
XIDS_NVLINK = frozenset(("144", "145", "146", "147", "148", "149", "150"))
"""For these the log line gives the severity; 74 is always fatal to the link."""
XIDS_TOLD = (
    XIDS_APPLICATION
    | XIDS_MEMORY
    | XIDS_EXCHANGE
    | XIDS_RESET
    | {"63", "74", "79", "94", "154", "162", "171", "172", "177"}
)
"""Xids that have findings of their own, or need none: 162 says that power smoothing is back, 171
and 172 are "additional to Xid 48".
"""
XID_WORDS = {
    "8": "the GPU stopped processing",
    "32": "an invalid or corrupted push buffer stream",
    "38": "a driver firmware error",
    "54": "auxiliary power is not connected to the board",
    "57": "an error programming the memory interface",
    "58": "an unstable memory interface",
    "61": "a breakpoint or warning of an internal microcontroller",
    "80": "corrupted data were sent to the GPU",
    "92": "many single-bit ECC errors, which were corrected",
    "93": "the infoROM's wear limit is exceeded",
    "121": "errors of the link between CPU and GPU (C2C), which were corrected",
    "122": "the board's flash cannot be read",
    "123": "the board's flash cannot be written",
    "124": "the board's flash cannot be erased",
    "125": "an error of the infoROM's file system",
    "155": "an NVLink error that software defines",
    "156": "a faulty part of the GPU was retired",
    "157": "a faulty part of the GPU could not be retired",
    "160": "a faulty memory channel was marked for repair",
    "161": "a faulty memory channel could not be repaired",
    "163": "power smoothing is disengaged; it needs no reset",
    "164": "the power smoothing circuit nears its end of life",
    "165": "the power smoothing circuit is at its end of life",
    "168": "errors in its protected memory, as with ECC off",
}
"""What NVIDIA's catalogue says of Xids without a finding of their own (deploy/xid-errors)."""
RECOVERY = {
    1: "asks for a reset",
    2: "asks for a reboot",
    3: "asks for peers to be drained",
    5: "asks for IMEX recovery",
    6: "asks for a bus reset",
    7: "asks for a system reboot",
}
"""Recovery actions without which the GPU is no use (NVML's numbers); after 4, jobs go on."""
DRAIN_AND_RESET = 4
"""The GPU works with a part of it off line: running jobs may finish, then it wants a reset.

NVIDIA, GPU memory error management, "Error recovery and response flags";
nvmlDeviceGpuRecoveryAction_t.
"""
NVML = ("gpu", "ecc", "nvlink", "nvlink_domain", "pcie", "mig", "gpu_processes")
"""Collectors that call NVML."""
SECOND_DEADLINE = 12.0
"""Seconds after a missed deadline of 10 s in which a second one passes, a new worker's start
included: one missed deadline is no hang.
"""
RELEASED = 7200.0
"""Seconds of maintenance after which the file that releases the GPUs was forgotten."""
SETTLED = 300.0
"""Seconds that an infoROM must be corrupted, or a GPU off the bus: it may be so for a moment."""
SEVERAL = "GPUs"
"""The part, where a count shows that GPUs are missing: it is one fault, however many they are."""
RESET, REPAIR = "DshealthdGpuResetNeeded", "DshealthdGpuRepairDue"
MINUTES = 10
_NVML_SAYS = {
    "gpu_lost": "NVML: GPU is lost",
    "not_found": "NVML lists it no more",
    "frozen": "NVML: values are frozen",
}
PENDING = {
    "gpu_remapped_rows_pending": "replace a bad memory row",
    "gpu_retired_pages_pending": "retire a bad memory page",
    "gpu_repair_pending": "repair a memory bank, a memory channel or a TPC",
}
"""What a GPU needs a reset for, by the metric that says so."""
_XID, _ACTION = "xid_last_timestamp_seconds", "gpu_recovery_action"
_XID_ACTION = "xid_recovery_action_last_timestamp_seconds"


def off_bus(series: Series, wall: float) -> list[Point]:
    """Return GPUs off the bus (Xid 79) at Unix time `wall`, and when each Xid was logged.

    An Xid counts for ten minutes whatever NVML says, as a dying GPU may answer for a while; after
    that until NVML reads the GPU at its address.
    """
    up = {(labels["gpu"], labels["uuid"]) for labels, value in series("gpu_up") if value}
    read = {
        labels["pci"] for labels, _ in series("gpu_info") if (labels["gpu"], labels["uuid"]) in up
    }
    since = wall - series.limits.xid_recent_seconds
    return [
        point
        for point in series(_XID, xid="79")
        if point.value > since or point.labels["pci"] not in read
    ]


def _logged(series: Series, alert: str, xids: Collection[str]) -> Iterator[Sign]:
    """Yield a sign for each GPU with one of these Xids since its last reset."""
    for labels, at in series(_XID, xid=xids):
        yield Sign(alert, f"Xid {labels['xid']}", labels, source=_XID, since=at)


def lost(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for GPUs that are lost to the driver, or gone from the PCI bus."""
    alert = "DshealthdGpuLost"
    named = set()
    for labels, at in off_bus(series, wall):
        named.add(labels["gpu"])
        yield Sign(alert, "Xid 79", labels, source=_XID, since=at, hold=0.0)
    unread = {labels["gpu"] for labels, value in series("gpu_up") if not value}
    for labels, value in series("gpu_fault"):
        reason = labels["reason"]
        gone = reason in {"gpu_lost", "not_found"}
        other = reason not in HUNG | OF_THE_AGENT | {"reset_required"} and labels["gpu"] in unread
        if value and labels["gpu"] not in named and (gone or other):
            named.add(labels["gpu"])
            says = _NVML_SAYS.get(reason) or f"NVML: {reason.replace('_', ' ')}"
            # The driver resets no GPU that a process uses.
            hold = 0.0 if Users(series).of_gpu(labels) else None
            yield Sign(alert, says, labels, source="gpu_fault", hold=hold)
    missing = _unlisted(series)[0] - len(named)
    if missing > 0:
        # The driver tells of a GPU that it cannot start once, when it is loaded.
        failed = some(series("kernel_events_total", event=("gpu_init_failed", "gpu_off_bus")))
        yield Sign(
            alert,
            "the driver failed to start them" if failed else "on the PCI bus, but not in NVML",
            part=SEVERAL,
            value=missing,
            limit=0,
            limit_source="dshealthd_gpus_expected",
            source="gpus_visible",
        )
    here = series.value("gpus_expected")
    if here is None and series.value("collector_available", collector="gpu_bus") == 0:
        here = 0.0  # the collector says so if it has seen no GPU since it started
    before = series.limits.gpus or series.value("gpus_before")
    # A GPU that NVML cannot read has a finding of its own, on the bus or not.
    if here is not None and before is not None and before - here > len(unread):
        missing = before - here - len(unread)
        yield Sign(
            alert,
            "fewer on its PCI bus than it has had",
            part=SEVERAL,
            apart="bus",
            mild=True,
            hold=SETTLED,
            value=missing,
            limit=0,
            limit_source=limit_source("gpus"),
            source="gpus_expected",
        )


def _unlisted(series: Series) -> tuple[float, float]:
    """Return how many GPUs of the PCI bus NVML does not list: those that it should, and those that
    are hidden from this process.
    """
    visible = series.value("gpus_visible")
    if visible is None:
        return 0.0, 0.0
    unlisted = max(0.0, (series.value("gpus_expected") or 0.0) - visible)
    hidden = min(unlisted, series.value("gpus_hidden") or 0.0)
    return unlisted - hidden, hidden


def errors(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for GPUs in error: each GPU's worst, as lesser ones come with it."""
    told: set[str] = set()
    degrees: tuple[Callable[[Series], Iterator[Sign]], ...] = (_rows, _memory, _resets, _repairs)
    for degree in degrees:
        apart = told | _followed_by_requests(series, wall) if degree is _resets else told
        signs = [sign for sign in degree(series) if sign.labels.get("gpu") not in apart]
        yield from signs
        told = told | {sign.labels["gpu"] for sign in signs if "gpu" in sign.labels}
    yield from _worn(series)
    yield from _other_xids(series, wall)
    yield from _recurring(series)


def _followed_by_requests(series: Series, wall: float) -> set[str]:
    """Return the GPUs with a fault that has its own finding, and makes the driver ask for a
    reset.
    """
    unread = {labels["gpu"] for labels, value in series("gpu_up") if not value}
    unread -= {labels["gpu"] for labels, _ in series("gpu_fault", reason="reset_required")}
    logged = (
        *off_bus(series, wall),
        *series(_XID, xid="74"),
        *series("xid_nvlink_last_timestamp_seconds", severity="fatal"),
    )
    return unread | {labels["gpu"] for labels, _ in logged}


def _rows(series: Series) -> Iterator[Sign]:
    """Yield GPUs that could not replace a bad memory row."""
    # No reset by hand causes it.
    yield from flagged(series, RESET, "gpu_remapped_rows_failed", _NO_ROW, hold=0.0)
    yield from flagged(series, RESET, "gpu_memory_unrepairable", _NO_REPAIR, hold=0.0)
    yield from each(_logged(series, RESET, XIDS_EXCHANGE), hold=0.0)


def _memory(series: Series) -> Iterator[Sign]:
    """Yield GPUs with memory errors that the driver did not contain."""
    name = "gpu_ecc_errors_total"
    yield from each(_logged(series, RESET, XIDS_MEMORY), hold=0.0)
    # Where the driver contained the error, one application has ended: it logs that (Xid 94), and
    # asks for a reset once other jobs are done.
    contained = {labels["gpu"] for labels, _ in series(_XID, xid="94")}
    contained |= {labels["gpu"] for labels, value in series(_ACTION) if value == DRAIN_AND_RESET}
    for labels, value in series(name, type="uncorrected", counter="volatile"):
        if value > 0 and labels["gpu"] not in contained:
            yield Sign(RESET, _ECC, labels, value=value, limit=0, source=name, hold=0.0)


def _requests(series: Series) -> Iterator[tuple[Mapping[str, str], str, float]]:
    """Yield the GPUs whose last Xid 154 requests something: labels, action, time."""
    last: dict[str, Point] = {}
    for point in series(_XID_ACTION):
        pci = point.labels["pci"]
        if pci not in last or point.value > last[pci].value:
            last[pci] = point
    # NVML says what is asked for now, if the driver supports it.
    none = {labels["gpu"] for labels, value in series(_ACTION) if not value}
    for labels, at in last.values():
        if labels["action"] != "none" and labels["gpu"] not in none:
            yield labels, labels["action"], at


def _resets(series: Series) -> Iterator[Sign]:
    """Yield GPUs that are no use until they are reset, or their node is rebooted."""
    for labels, value in series(_ACTION):
        if value > 0 and value != DRAIN_AND_RESET:
            asks = f"the driver {RECOVERY.get(int(value), 'asks for recovery')}"
            yield Sign(RESET, asks, labels, value=value, limit=0, source=_ACTION)
    yield from _logged(series, RESET, XIDS_RESET)
    for labels, action, at in _requests(series):
        if action != "drain_and_reset":
            asks = f"Xid 154: {action.replace('_', ' ')}"
            yield Sign(RESET, asks, labels, source=_XID_ACTION, since=at)
    for labels, value in series("gpu_fault", reason="reset_required"):
        if value:
            yield Sign(RESET, "NVML: reset required", labels, source="gpu_fault")
    # On some releases no Xid follows that would name the GPU.
    if not series.has(_XID, xid=XIDS_GSP):
        lines = logged(series, RESET, "gpu_firmware_timeout", part="a GPU", seconds=HOUR)
        yield from each(lines, reason="its own processor (GSP) does not answer")


def _repairs(series: Series) -> Iterator[Sign]:
    """Yield GPUs that work, and that a reset would repair."""
    for name, reason in PENDING.items():
        yield from flagged(series, REPAIR, name, f"needs a reset to {reason}")
    # 177: "Bank Remapper: New bank marked for remapping, reset gpu to activate."
    for xid, name in (("63", "gpu_remapped_rows_pending"), ("177", "gpu_repair_pending")):
        known = {labels["gpu"] for labels, _ in series(name)}
        signs = [one for one in _logged(series, REPAIR, {xid}) if one.labels["gpu"] not in known]
        yield from each(signs, reason=f"needs a reset to {PENDING[name]} (Xid {xid})")
    yield from each(_logged(series, REPAIR, {"94"}), reason=CONTAINED)
    asks = "its driver asks for a drain and a reset"
    for labels, value in series(_ACTION):
        if value == DRAIN_AND_RESET:
            yield Sign(REPAIR, asks, labels, value=value, source=_ACTION)
    for labels, action, at in _requests(series):
        if action == "drain_and_reset":
            yield Sign(REPAIR, f"{asks} (Xid 154)", labels, source=_XID_ACTION, since=at)
    name, limit = "gpu_ecc_errors_total", "ecc_corrected_per_minute"
    rises = series.rise(name, MINUTES * 60.0, type="corrected", counter="volatile")
    reason = "it corrects memory errors all the time"
    yield from each_over(series, REPAIR, rises, limit, name, reason, divisor=MINUTES)


def _worn(series: Series) -> Iterator[Sign]:
    """Yield GPUs with worn SRAM, or a corrupted infoROM."""
    alert = "DshealthdGpuSramWornOut"
    yield from flagged(series, alert, "gpu_sram_threshold_exceeded", "above NVIDIA's threshold")
    judged = {labels["gpu"] for labels, _ in series("gpu_sram_threshold_exceeded")}
    name, limit = "gpu_ecc_location_errors_total", "sram_uncorrected_aggregate"
    for labels, value in series(name, location="sram", type="uncorrected", counter="aggregate"):
        if value > series.limit(limit) and labels["gpu"] not in judged:
            yield Sign(alert, "several in its life", labels, value=value, limit=limit, source=name)
    name, reason = "gpu_inforom_valid", "its infoROM is corrupted"
    corrupted = flagged(series, REPAIR, name, reason, at=0.0)
    yield from each(corrupted, apart="infoROM", hold=SETTLED)


def _other_xids(series: Series, wall: float) -> Iterator[Sign]:
    """Yield GPUs with a recent Xid that no other finding tells of."""
    fatal = by(series("xid_nvlink_last_timestamp_seconds", severity="fatal"), "pci", max)
    for labels, at in series(_XID):
        link = labels["xid"] in XIDS_NVLINK and at <= fatal.get(labels["pci"], -math.inf)
        new = at > wall - series.limits.xid_recent_seconds
        if new and labels["xid"] not in XIDS_TOLD and not link:
            xid = f"Xid {labels['xid']}"
            words = XID_WORDS.get(labels["xid"])
            reason = f"its driver has logged {xid}" + (f": {words}" if words else "")
            yield Sign(REPAIR, reason, labels, source=_XID, since=at, apart=xid)


def _recurring(series: Series) -> Iterator[Sign]:
    """Yield the only GPU on which applications of several jobs have failed within a day.

    An application's bug would hit its other GPUs, too, and one user's bug is that user's problem.
    """
    name = "xid_errors_total"
    rises = series.rise(name, DAY, from_zero=True, xid=XIDS_RECURRING)
    days = keyed((point for point in rises if point.value > 0), "gpu", "pci", "xid")
    hours = series.rise(name, HOUR, from_zero=True, xid=XIDS_RECURRING)
    jobs = keyed(series.highest("job_gpu_info", DAY), "gpu", "training_job")
    gpus_of = {xid: {gpu for gpu, _, other in days if other == xid} for _, _, xid in days}
    for labels, rise in hours:
        gpu, xid = labels["gpu"], labels["xid"]
        earlier = days.get((gpu, labels["pci"], xid), 0.0) > rise > 0
        if earlier and gpus_of[xid] == {gpu} and sum(gpu == other for other, _ in jobs) > 1:
            reason = f"Xid {xid} recurs there in different jobs, and on no other GPU"
            yield Sign(REPAIR, reason, labels, value=rise, source=name, apart=f"Xid {xid}")


def driver(series: Series, wall: float) -> Iterator[Sign]:
    """Yield findings for NVML that hangs or fails as a whole, and for GPUs that nobody monitors."""
    broken, unwatched = "DshealthdNvmlBroken", "DshealthdGpusUnwatched"
    hung = series.has("collector_failing", collector=NVML, reason=HUNG)
    if (hung or some(series("worker_stuck", worker="device"))) and not off_bus(series, wall):
        where = sorted(labels["gpu"] for labels, value in series("gpu_fault", reason=HUNG) if value)
        reason = "a call did not return" + (f", at GPU {' '.join(where)}" if where else "")
        yield Sign(broken, reason, source="collector_failing", hold=SECOND_DEADLINE)
    whole = series.value("collector_up", collector="gpu") == 0 and not series.has("gpu_up")
    for labels, _ in series("collector_failing", collector="gpu"):
        reason = labels["reason"]
        if whole and reason not in HUNG | {"waiting", "expired", "internal"}:
            alert = unwatched if reason in OF_THE_AGENT else broken
            yield Sign(alert, reason.replace("_", " "), source="collector_failing")
    for labels, value in series("gpu_fault", reason=OF_THE_AGENT):
        if value and series.value("gpu_up", gpu=labels["gpu"], uuid=labels["uuid"]) == 0:
            part = f"GPU {labels['gpu']}"
            reason = f"{part}: {labels['reason'].replace('_', ' ')}"
            yield Sign(unwatched, reason, part=part, source="gpu_fault")
    # Not for a command in a container or a job, which has that one's GPUs on purpose.
    if series.remembers and (hidden := _unlisted(series)[1]):
        reason, name = "the agent may not open their device files", "gpus_hidden"
        yield Sign(unwatched, reason, part="hidden GPUs", value=hidden, source=name)
    if amd := series.value("gpus_unmonitored"):
        reason, name = "they are AMD's, which the agent cannot read", "gpus_unmonitored"
        yield Sign(unwatched, reason, part="AMD GPUs", value=amd, source=name)
    name = "gpus_expected"
    expected = series.value(name)
    if expected and series.value("collector_available", collector="gpu") == 0:
        reason, part = "released by an operator", "released GPUs"
        yield Sign(unwatched, reason, part=part, value=expected, source=name, hold=RELEASED)
    elif expected and not any((*series("gpu_up"), *series("collector_failing", collector="gpu"))):
        yield Sign(unwatched, "no metrics, and no error", value=expected, source=name)


def checksums(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield the one GPU whose matrix products differ from those of this node's other GPUs.

    With two GPUs, or several that differ, this node cannot tell which is right.
    """
    numbers: dict[str, list[Point]] = {}
    for point in series("probe_checksum"):
        numbers.setdefault(point.labels["library"], []).append(point)
    for points in numbers.values():
        usual, agree = Counter(value for _, value in points).most_common(1)[0]
        if len(points) > 2 and len(points) - agree == 1:  # noqa: PLR2004 - of two, either
            odd = next(point for point in points if point.value != usual)
            # A ticket until identical bits have been seen on real GPUs of each kind.
            alert = "DshealthdComputesWrong"
            reason = "its bits differ from those of this node's other GPUs"
            yield Sign(alert, reason, odd.labels, source="probe_checksum", mild=True)


RULES = (lost, errors, driver, checksums)
