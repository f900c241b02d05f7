"""The thresholds that findings compare with.

They mirror `deploy/prometheus/thresholds.yml`, keyed by the name after `dshealthd:threshold:`; that
file gives units and sources. A test keeps the two in sync. If Prometheus loads an edited copy of
that file, findings still use the shipped values.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "dshealthd:threshold:"
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "rendezvous_time_wait_sockets": 100,
        "rendezvous_ports_ratio": 0.5,
        "time_wait_ratio": 0.8,
        "ephemeral_ports_ratio": 0.8,
        "ephemeral_ports_critical_ratio": 0.97,
        "orphan_listener_seconds": 60,
        "loopback_connect_seconds": 0.02,
        "memory_pressure_ratio": 0.1,
        "memory_available_ratio": 0.05,
        "open_files_ratio": 0.8,
        "open_files_critical_ratio": 0.95,
        "locked_memory_ratio": 0.9,
        "filesystem_used_ratio": 0.9,
        "filesystem_used_critical_ratio": 0.97,
        "path_write_seconds": 1,
        "shared_memory_bytes": 1e9,
        "aio_requests_ratio": 0.9,
        "clock_offset_seconds": 1,
        "gpu_temperature_celsius": 83,
        "gpu_temperature_critical_celsius": 90,
        "xid_recent_seconds": 600,
        "sram_uncorrected_aggregate": 4,
        "ras_idle_answers": 4,
        "nvlink_settle_seconds": 600,
        "nvlink_bit_error_ratio": 1e-12,
        "gpu_busy_ratio": 0.5,
        "roce_fabric_bytes": 1e9,
        "probe_silent_seconds": 300,
        "certificate_seconds": 1209600,
    }
)
