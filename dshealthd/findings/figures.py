"""The figures of which a node keeps the last hour, by their metrics."""

from __future__ import annotations

from typing import NamedTuple

CAUSES = {"dshealthd_gpu_throttle_active": "dshealthd_gpu_temperature_celsius"}
"""Metrics of findings about which another one's trend says more."""
_GIB = 2.0**-30
"""GiB in a byte."""


class Figure(NamedTuple):
    """What a metric is called on the page, and its unit there."""

    what: str
    """A template of the metric's labels."""
    unit: str
    factor: float = 1.0
    is_counter: bool = False
    """Whether the line is the counter's rate per second, times the factor."""

    @property
    def slope(self) -> str:
        """The unit of a figure's slope: a difference of temperatures is in kelvins."""
        return f"{'K' if self.unit == '°C' else self.unit}/min"


_SENDS, _RECEIVES = (Figure(what, "Gb/s", 8e-9, is_counter=True) for what in ("sends", "receives"))
_ERRORS = Figure("errors", "per minute", 60.0, is_counter=True)
FIGURES = {
    "dshealthd_gpu_temperature_celsius": Figure("{sensor} temperature", "°C"),
    "dshealthd_gpu_power_watts": Figure("power", "W"),
    "dshealthd_gpu_utilization_ratio": Figure("utilization", "%", 100.0),
    "dshealthd_gpu_memory_used_bytes": Figure("memory", "GiB", _GIB),
    "dshealthd_infiniband_port_transmit_bytes_total": _SENDS,
    "dshealthd_infiniband_port_receive_bytes_total": _RECEIVES,
    "dshealthd_infiniband_port_errors_total": _ERRORS,
    "dshealthd_network_transmit_bytes_total": _SENDS,
    "dshealthd_network_receive_bytes_total": _RECEIVES,
    "dshealthd_network_transmit_errors_total": _ERRORS,
    "dshealthd_network_receive_errors_total": _ERRORS,
    "dshealthd_job_step_seconds": Figure("step time", "s"),
    "dshealthd_memory_available_bytes": Figure("available memory", "GiB", _GIB),
    "dshealthd_load_average": Figure("load over {minutes} min", ""),
    "dshealthd_tcp_sockets": Figure("sockets in {state}", ""),
}
"""By metric. Metrics of one collector that share a figure are added up if they count, and otherwise
drawn as one line, from the lowest to the highest."""
