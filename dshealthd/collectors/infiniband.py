"""InfiniBand and RoCE ports, from `/sys/class/infiniband`.

State, rate, traffic, errors, congestion, flaps, temperatures.

Reading most of these files queries the adapter's firmware and hangs if the firmware hangs, so this
collector runs in a worker. It keeps no file open, which would prevent unloading the driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Metric,
    NotAvailable,
    Reason,
    Sample,
    SourceError,
    Worker,
    counter,
    gauge,
)
from dshealthd.core.options import option
from dshealthd.core.result import fault_of
from dshealthd.core.text import plural
from dshealthd.linux.infiniband import (
    Adapter,
    PortHistory,
    adapters,
    elsewhere,
    identity,
    parse_rate,
    parse_state,
    read_attribute,
)

if TYPE_CHECKING:
    from dshealthd.core.host import Host

_PORT = ("device", "port")
UP = gauge(
    "dshealthd_infiniband_port_up",
    "1 if the port is ACTIVE with its link up; 0 if not, or if its device was seen earlier and is "
    "gone. Absent for virtual functions, seen from their host, as is all of a port's state.",
    *_PORT,
)
STATE = gauge(
    "dshealthd_infiniband_port_state",
    "1 for the port's logical state: down, init, armed, active, active_defer, nop, unknown, gone "
    "with its device, or elsewhere: its device is in another network namespace, or in a bond's.",
    *_PORT,
    "state",
)
PHYSICAL_STATE = gauge(
    "dshealthd_infiniband_port_physical_state",
    "1 for the port's physical state: sleep, polling, disabled, training, link_up, "
    "link_error_recovery, phy_test, unknown. RoCE's is disabled whenever its interface has no "
    "carrier.",
    *_PORT,
    "state",
)
RATE = gauge(
    "dshealthd_infiniband_port_rate_bytes_per_second",
    "Rate of an active port: 5e+10 is 400 Gb/s.",
    *_PORT,
)
FLAPS = counter(
    "dshealthd_infiniband_port_flaps_total",
    "Times the port left ACTIVE since the collector started, from samples and link_downed.",
    *_PORT,
)
TRANSMIT_BYTES = counter(
    "dshealthd_infiniband_port_transmit_bytes_total",
    "Data sent; port_xmit_data, which counts 4-byte words.",
    *_PORT,
)
RECEIVE_BYTES = counter(
    "dshealthd_infiniband_port_receive_bytes_total",
    "Data received; port_rcv_data, which counts 4-byte words.",
    *_PORT,
)
TRANSMIT_WAIT = counter(
    "dshealthd_infiniband_port_transmit_wait_total",
    "Ticks during which data waited for credits or arbitration; port_xmit_wait. The length of a "
    "tick depends on the adapter: compare values, do not convert them to seconds.",
    *_PORT,
)
ERRORS = counter(
    "dshealthd_infiniband_port_errors_total",
    "Errors by kind, named after the driver's file. Files in counters/ may be narrow and saturate "
    "(link_downed at 255); the *_flush_error kinds also grow when a job ends.",
    *_PORT,
    "type",
)
CONGESTION = counter(
    "dshealthd_infiniband_port_congestion_total",
    "Congestion notifications by kind, named after the driver's file in hw_counters/; not errors "
    "in themselves.",
    *_PORT,
    "type",
)
INFO = gauge(
    "dshealthd_infiniband_device_info",
    "1; identity of the adapter: board (PSID), driver, firmware version, node GUID, model, PCI "
    "address.",
    *("device", "board", "driver", "firmware", "guid", "model", "pci"),
)
PORT_INFO = gauge(
    "dshealthd_infiniband_port_info",
    "1; link layer (InfiniBand or Ethernet, which is RoCE) and network interface of the port.",
    *_PORT,
    *("interface", "link_layer"),
)
TEMPERATURE = gauge(
    "dshealthd_infiniband_temperature_celsius",
    "Temperature of the adapter (asic) and its modules, from its hwmon.",
    *("device", "sensor"),
)

_CLASS = "class/infiniband"
_ACTIVE, _LINK_UP = 4, 5
_STATES = {0: "nop", 1: "down", 2: "init", 3: "armed", _ACTIVE: "active", 5: "active_defer"}
_PHYSICAL_STATES = {
    1: "sleep", 2: "polling", 3: "disabled", 4: "training", _LINK_UP: "link_up",
    6: "link_error_recovery", 7: "phy_test",
}  # fmt: skip
_TRAFFIC = {
    # metric: the files that a driver may have for it, and how many units of theirs make one of it
    TRANSMIT_BYTES: (("port_xmit_data", 0.25), ("tx_bytes", 1), ("ip4OutOctets ip6OutOctets", 1)),
    RECEIVE_BYTES: (("port_rcv_data", 0.25), ("rx_bytes", 1), ("ip4InOctets ip6InOctets", 1)),
    TRANSMIT_WAIT: (("port_xmit_wait", 1),),
}
"""The second of a metric are AWS's and Broadcom's, in hw_counters/, the third Intel's."""
_LINK_ERRORS = """
    symbol_error link_error_recovery link_downed port_rcv_errors port_rcv_remote_physical_errors
    port_rcv_switch_relay_errors port_xmit_discards port_xmit_constraint_errors
    port_rcv_constraint_errors local_link_integrity_errors excessive_buffer_overrun_errors
    VL15_dropped
"""
_MLX5_ERRORS = """
    duplicate_request implied_nak_seq_err local_ack_timeout_err out_of_buffer out_of_sequence
    packet_seq_err req_cqe_error req_cqe_flush_error req_remote_access_errors
    req_remote_invalid_request req_rnr_retries_exceeded req_transport_retries_exceeded
    resp_cqe_error resp_cqe_flush_error resp_local_length_error resp_remote_access_errors
    rnr_nak_retry_err roce_adp_retrans roce_adp_retrans_to roce_slow_restart roce_slow_restart_trans
    rx_icrc_encapsulated
"""
_EFA_ERRORS = """
    rx_drops rdma_read_wr_err rdma_write_wr_err retrans_timeout_events unresponsive_remote_events
    impaired_remote_conn_events
"""
# Not recoverable_errors, which counts broadcasts (the kernel's bnxt_re_ib_get_hw_stats).
_BNXT_ERRORS = """
    bad_resp_err local_protection_err local_qp_op_err max_retry_exceeded missing_resp oos_drop_count
    remote_access_err remote_invalid_req_err remote_op_err rnr_naks_rcvd rx_out_of_buffer
    rx_roce_discards rx_roce_errors seq_err_naks_rcvd to_retransmits tx_roce_discards tx_roce_errors
    unrecoverable_err
"""
# Later drivers name those of tcp without it.
_IRDMA_ERRORS = """
    ip4InDiscards ip4InTruncatedPkts ip4OutNoRoutes ip6InDiscards ip6InTruncatedPkts ip6OutNoRoutes
    rxVlanErrors tcpRetransSegs tcpInOptErrors tcpInProtoErrors RetransSegs InOptErrors
    InProtoErrors
"""
_ERRORS = frozenset(
    (_LINK_ERRORS + _MLX5_ERRORS + _EFA_ERRORS + _BNXT_ERRORS + _IRDMA_ERRORS).split()
)
_CONGESTION = frozenset((
    "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored",
    "roce_slow_restart_cnps", "rx_cnp_pkts", "rx_ecn_marked_pkts", "tx_cnp_pkts",
    "cnpHandled", "cnpIgnored", "cnpSent", "RxECNMrkd",
))  # fmt: skip
_INFO_FILES = {"board": "board_id", "firmware": "fw_ver", "guid": "node_guid", "model": "hca_type"}
_REFRESH = 300.0
"""Seconds until a device is described again: its interface and sensors may come later."""


class CounterSeries(NamedTuple):
    """Files of one number each and the series of their sum, whose unit is `per_unit` of theirs."""

    places: tuple[str, ...]
    metric: Metric
    labels: tuple[str, ...]
    per_unit: float


@dataclass(slots=True)
class _Device:
    adapter: Adapter
    constants: list[Sample] = field(default_factory=list)
    interfaces: set[str] = field(default_factory=set)
    sensors: list[CounterSeries] = field(default_factory=list)
    counters: dict[str, list[CounterSeries]] = field(default_factory=dict)
    """By port."""
    described: float | None = None
    """Monotonic time of the last description."""


@dataclass(slots=True)
class _Port:
    """A port that was seen, also once its adapter is gone."""

    adapter: Adapter
    history: PortHistory = field(default_factory=PortHistory)


@dataclass(frozen=True, kw_only=True)
class InfinibandOptions(CollectorOptions):
    """Options of this collector."""

    exclude: tuple[str, ...] = option([], 'Devices to leave out, as shell patterns: "mlx5_bond_*".')


class Infiniband(Collector):
    """Reads some fifty small files per port; what fails does not affect the others."""

    Options = InfinibandOptions
    worker = Worker.FABRIC

    def __init__(
        self, options: Any, context: Context, read: Callable[[str], bytes] = read_attribute
    ) -> None:
        super().__init__(options, context)
        self._reader = read
        self._devices: dict[str, _Device] = {}
        self._ports: dict[tuple[str, ...], _Port] = {}

    @classmethod
    # the contract's signature
    def absent(cls, options: Any, host: Host) -> str | None:  # noqa: ARG003
        """Return why the collector is absent if no InfiniBand driver is loaded."""
        return None if os.path.isdir(host.sys(_CLASS)) else f"{host.sys(_CLASS)} does not exist"

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the samples of each InfiniBand device, and `port_up` 0 for ports that are gone."""
        # No adapters if the driver was unloaded a moment ago.
        names = self._wanted(adapters(self.host))
        others = self._wanted(elsewhere(self.host))
        if not names and not self._ports and not others:
            raise NotAvailable(f"{self.host.sys(_CLASS)} has no device")
        working, fault = False, None
        for name in names:
            for item in self._device(name):
                if isinstance(item, Fault):
                    fault = item
                elif item.metric is UP:
                    working = True
                yield item
        yield from self._gone(names, others)
        if fault is not None and not working:
            raise SourceError(fault.reason, f"no port can be read: {fault.detail}")

    def _wanted(self, names: list[str]) -> list[str]:
        exclude = self.options.exclude
        return [name for name in names if not any(fnmatchcase(name, one) for one in exclude)]

    def _device(self, name: str) -> Iterator[Sample | Fault]:
        part = f"infiniband {name}"
        try:
            device = self._known(name)
            if (quarantine := self.context.entering(part)) is not None:
                yield quarantine
                return
            now = self.context.monotonic()
            if device.described is None or now - device.described >= _REFRESH:
                _describe(device)
                device.described = now
        except OSError as error:
            yield fault_of(part, error)
            return
        yield from device.constants
        yield from _read(device.adapter, device.sensors, part)
        for port in device.adapter.ports:
            yield from self._port(device, port)

    def _port(self, device: _Device, port: str) -> Iterator[Sample | Fault]:
        adapter, labels = device.adapter, (device.adapter.name, port)
        part, place = f"infiniband {adapter.name} port {port}", f"{adapter.place}/ports/{port}"
        downed = None
        for item in _read(adapter, device.counters[port], part):
            if isinstance(item, Sample) and item.labels[-1] == "link_downed":
                downed = int(item.value)
            yield item
        if adapter.virtual:  # its state is that of the port that it shares
            return
        try:
            state = parse_state(self._reader(f"{place}/state"))
            physical = parse_state(self._reader(f"{place}/phys_state"))
            history = self._ports[labels].history
            history.observe(active=state == _ACTIVE, downed=downed)
            yield Sample(UP, labels, float(state == _ACTIVE and physical == _LINK_UP))
            yield Sample(STATE, (*labels, _STATES.get(state, "unknown")), 1)
            yield Sample(PHYSICAL_STATE, (*labels, _PHYSICAL_STATES.get(physical, "unknown")), 1)
            yield Sample(FLAPS, labels, history.flaps)
            # In any other state the file holds the lowest rate that the port can fall back to.
            if state == _ACTIVE:
                yield Sample(RATE, labels, parse_rate(self._reader(f"{place}/rate")))
        except OSError as error:
            yield fault_of(part, error)
        except (ValueError, ArithmeticError) as error:
            yield Fault(part, Reason.MALFORMED, f"{place}: {error}")

    def _gone(self, names: list[str], others: list[str]) -> Iterator[Sample]:
        """Yield the samples of ports that are gone or elsewhere, and forget the devices that are,
        and the ports of those that have another name.
        """
        for name in self._devices.keys() - names:
            del self._devices[name]
        for name in set(others).difference(name for name, _ in self._ports):  # since the start
            yield Sample(STATE, (name, "1", "elsewhere"), 1)
        for labels, known in list(self._ports.items()):
            name, port = labels
            if name in names and (
                name not in self._devices or port in self._devices[name].adapter.ports
            ):
                continue
            if name not in names and not set(names).isdisjoint(known.adapter.siblings):
                del self._ports[labels]
            elif name in others or (name not in names and self._bonded(known.adapter)):
                yield Sample(STATE, (*labels, "elsewhere"), 1)
            else:
                known.history.observe(active=False, downed=None)
                yield Sample(UP, labels, 0.0)
                yield Sample(STATE, (*labels, "gone"), 1)
                yield Sample(FLAPS, labels, known.history.flaps)

    def _bonded(self, gone: Adapter) -> bool:
        """Return whether an adapter that is gone is part of a bond's (mlx5_bond_0)."""
        return any(device.interfaces & gone.bonds for device in self._devices.values())

    def _known(self, name: str) -> _Device:
        """Return the InfiniBand device; a new one if the driver has registered it again."""
        link = self.host.sys(f"{_CLASS}/{name}")
        device = self._devices.get(name)
        if device is None or device.adapter.identity != identity(link):
            device = self._devices[name] = _Device(Adapter.at(link, self._reader))
            for port in () if device.adapter.virtual else device.adapter.ports:
                self._ports.setdefault((name, port), _Port(device.adapter)).adapter = device.adapter
        return device


def _describe(device: _Device) -> None:
    """Fill in the near-constant facts of a registered adapter, and the files that it has."""
    adapter = device.adapter
    info = {label: adapter.text(file) for label, file in _INFO_FILES.items()}
    info |= {
        "device": adapter.name,
        "driver": adapter.target("device/driver"),
        "pci": adapter.target("device"),
    }
    constants = [INFO(1, *(info[label] for label in INFO.labels))]
    device.interfaces.clear()
    for port in adapter.ports:
        interface, layer = adapter.interface(port), adapter.text(f"ports/{port}/link_layer")
        device.interfaces.add(interface)
        constants.append(PORT_INFO(1, adapter.name, port, interface, layer))
        device.counters[port] = list(_readings(adapter, port))
    device.constants = constants
    device.sensors = [
        CounterSeries((place,), TEMPERATURE, (adapter.name, name), 1000)
        for name, place in adapter.sensors()
    ]


def _readings(adapter: Adapter, port: str) -> Iterator[CounterSeries]:
    """Yield the counters of an InfiniBand port; of two files with one series, the first."""
    labels = adapter.name, port
    files: dict[str, str] = {}
    for name, place in adapter.counters(port):
        files.setdefault(name, place)
    for metric, kinds in _TRAFFIC.items():
        for names, per_unit in kinds:
            if places := tuple(files[name] for name in names.split() if name in files):
                yield CounterSeries(places, metric, labels, per_unit)
                break
    for name, place in files.items():
        if name in _ERRORS or name in _CONGESTION:
            metric = ERRORS if name in _ERRORS else CONGESTION
            yield CounterSeries((place,), metric, (*labels, name), 1)


def _read(adapter: Adapter, readings: list[CounterSeries], part: str) -> Iterator[Sample | Fault]:
    """Yield a sample for each reading of a port, and one fault for all failures."""
    faults = []
    for places, metric, labels, per_unit in readings:
        try:
            numbers = [adapter.number(place) for place in places]
        except (OSError, ValueError, ArithmeticError) as error:
            faults.append(fault_of(part, error))
        else:
            known = [number for number in numbers if number is not None]
            if len(known) == len(numbers):  # a part of the traffic is not the traffic
                yield Sample(metric, labels, sum(known) / per_unit)
    if faults:
        first, *rest = faults
        more = f", and {plural(len(rest), 'more file')}" if rest else ""
        yield first._replace(detail=first.detail + more)
