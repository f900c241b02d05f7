"""NVLinks of every GPU from NVML: state and errors of each, and the traffic over all."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dshealthd.core.collector import Context, News, Sample
from dshealthd.nvml.collector import GpuCollector, SlowGpuCollectorOptions
from dshealthd.nvml.signs import LINK_COUNT, LINK_STATE, LINK_UP
from dshealthd.nvml.values import ALL_LINKS, MAX_LINKS, Fields, gpu_counter, gpu_gauge, told

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device, Gpu

UP = gpu_gauge(
    "dshealthd_nvlink_up",
    "1 if the link is active or asleep to save power, 0 if not; an unwired link is 0 too.",
    "link",
)
ERRORS = gpu_counter(
    "dshealthd_nvlink_errors_total",
    "Errors of a link by type, summed over links in dshealthd_gpu_nvlink_errors_total; only links "
    "with errors.",
    *("link", "type"),
)
BER = gpu_gauge(
    "dshealthd_nvlink_effective_bit_error_ratio",
    "Bit errors per bit after correction, on the GPU's worst link; NVLink 5.",
)
SUMS = gpu_counter(
    "dshealthd_gpu_nvlink_errors_total",
    "Errors over all links of the GPU, recovered or not. Up to NVLink 4: replay, recovery, crc "
    "(fields 161-163). NVLink 5: receive, link_recovery, retransmit (208, 215, 295). A link "
    "that stops answering keeps its last count.",
    "type",
)
SPEED = gpu_gauge(
    "dshealthd_nvlink_speed_bytes_per_second",
    "Speed of one link in one direction; the same for all active links of the GPU.",
)
TRANSMITTED = gpu_counter(
    "dshealthd_nvlink_transmit_bytes_total",
    "Data that the GPU sent over all its links, without protocol overhead.",
)
RECEIVED = gpu_counter(
    "dshealthd_nvlink_receive_bytes_total",
    "Data that the GPU received over all its links, without protocol overhead.",
)
LINKS = gpu_gauge(
    "dshealthd_nvlinks",
    "Links of the GPU, by version and by type of the remote end.",
    *("version", "remote"),
)
LINKS_UP = gpu_gauge(
    "dshealthd_nvlinks_up",
    "Links of the GPU that are up: the sum of dshealthd_nvlink_up as one series, for fleet "
    "queries.",
)

_WHOLE: Mapping[str, str | tuple[str, int]] = {
    "count": LINK_COUNT,
    "speed": "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON",
    "sent": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", ALL_LINKS),
    "received": ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", ALL_LINKS),
}
_GPU = Fields(*_WHOLE.values())
_ERRORS = {
    "replay": ("NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY", "NVML_NVLINK_ERROR_DL_REPLAY"),
    "recovery": ("NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY", "NVML_NVLINK_ERROR_DL_RECOVERY"),
    "crc": ("NVML_FI_DEV_NVLINK_ERROR_DL_CRC", "NVML_NVLINK_ERROR_DL_CRC_FLIT"),
}
"""Up to NVLink 4: the field, and the counter of the function for drivers without the field."""
_ERRORS_5 = {
    "receive": "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS",
    # Not "recovery": GPUs that have both fields count only in this one.
    "link_recovery": "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS",
    "retransmit": "NVML_FI_DEV_NVLINK_PLR_XMIT_RETRY_BLOCKS",
}
_BER = "NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_BER"
_EACH = (LINK_STATE, *(field for field, _ in _ERRORS.values()), *_ERRORS_5.values(), _BER)
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_REMOTES = {0: "gpu", 1: "npu", 2: "switch"}
_KIB = 1024


@functools.cache
def _link_fields(names: tuple[str, ...], links: int) -> Fields:
    """Return the fields to read, grouped by field, each for all NVLinks."""
    return Fields(*((name, link) for name in names for link in range(links)))


def _of_links(device: Device, names: tuple[str, ...], links: int) -> dict[str, list[float | None]]:
    values = device.fields(_link_fields(names, links))
    return {name: values[place * links : (place + 1) * links] for place, name in enumerate(names)}


def bit_error_ratio(code: float) -> float:
    """Return an NVLink's bit error ratio: bits 8-11 over 10 to the power of bits 0-7."""
    return (int(code) >> 8 & 0xF) * 10.0 ** -(int(code) & 0xFF)


class ErrorSums:
    """Sums of errors over a GPU's links that grow only by new errors, whichever links answer.

    A link that falls silent keeps its last count, as a sum that drops looks like a counter reset.
    The past errors of a link that first answers after the others are left out, as a sum that jumps
    looks like new errors.
    """

    def __init__(self, memory: dict[str, dict[str, dict[str, list[float]]]]) -> None:
        """Continue with `memory`: by GPU, type and link, the link's past and current counts.

        It outlives the worker process; without it sums would change when the worker restarts.
        """
        self._memory = memory

    def add(self, uuid: str, kind: str, counts: Sequence[float | None]) -> float | None:
        """Return the current sum of one type of NVLink errors; None if no link reports it.

        `counts` has one entry per link of the GPU, None if the link does not report it.
        """
        if all(count is None for count in counts):
            return None
        known = self._memory.setdefault(uuid, {})
        first_look = kind not in known
        links = known.setdefault(kind, {})
        for link, count in enumerate(counts):
            if count is None:
                continue
            past, last = links.get(str(link), (0.0 if first_look else count, count))
            # A counter that was reset does not include the past errors.
            links[str(link)] = [past if count >= last else 0.0, count]
        return sum(last - past for past, last in links.values())


class Nvlink(GpuCollector):
    """Reads all links of a GPU in one or two calls."""

    wakes_on = frozenset({News.GPU_ERROR, News.NVLINK})

    def __init__(self, options: SlowGpuCollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._counted = ErrorSums(context.memory.setdefault("nvlink_errors", {}))

    def read(self, gpu: Gpu, device: Device) -> Iterator[Sample]:
        """Yield the state, errors and traffic of a GPU's NVLinks; nothing if it has none."""
        whole = dict(zip(_WHOLE, device.fields(_GPU), strict=True))
        count = device.count(LINK_COUNT, whole["count"], MAX_LINKS)
        if not count:
            return
        yield from told(SPEED, whole["speed"], *gpu.labels, scale=1e6)
        yield from told(TRANSMITTED, whole["sent"], *gpu.labels, scale=_KIB)
        yield from told(RECEIVED, whole["received"], *gpu.labels, scale=_KIB)
        kinds = device.keep(("links", count), lambda: _kinds(device, count))
        for (version, remote), links in kinds.items():
            yield LINKS(links, *gpu.labels, version, remote)
        labels = [(*gpu.labels, str(link)) for link in range(count)]
        field = _of_links(device, _EACH, count)
        states = [
            device.query("nvmlDeviceGetNvLinkState", link) if state is None else state
            for link, state in enumerate(field[LINK_STATE])
        ]
        for link, state in enumerate(states):
            if state is not None:
                yield UP(float(state in LINK_UP), *labels[link])
        if None not in states:
            yield LINKS_UP(sum(state in LINK_UP for state in states), *gpu.labels)
        errors = {
            kind: [
                device.query("nvmlDeviceGetNvLinkErrorCounter", link, older)
                if count is None
                else count
                for link, count in enumerate(field[name])
            ]
            for kind, (name, older) in _ERRORS.items()
        } | {kind: field[name] for kind, name in _ERRORS_5.items()}
        yield from self._errors(gpu, labels, errors)
        # No errors are 15e-255: 0 is no ratio, but a field that is deprecated from NVML 13 on.
        ratios = [bit_error_ratio(code) for code in field[_BER] if code]
        yield from told(BER, max(ratios, default=None), *gpu.labels)

    def _errors(
        self,
        gpu: Gpu,
        labels: Sequence[tuple[str, ...]],
        errors: Mapping[str, Sequence[float | None]],
    ) -> Iterator[Sample]:
        for kind, counts in errors.items():
            yield from told(SUMS, self._counted.add(gpu.uuid, kind, counts), *gpu.labels, kind)
        for label, of_link in zip(labels, zip(*errors.values(), strict=True), strict=True):
            if any(of_link):
                for kind, count in zip(errors, of_link, strict=True):
                    yield from told(ERRORS, count, *label, kind)


def _kinds(device: Device, count: int) -> Counter[tuple[str, str]]:
    return Counter(
        (
            _VERSIONS.get(device.query("nvmlDeviceGetNvLinkVersion", link), ""),
            _REMOTES.get(device.query("nvmlDeviceGetNvLinkRemoteDeviceType", link), "unknown"),
        )
        for link in range(count)
    )
