"""Checks that show findings: where they could not look, they do not say ok."""

from __future__ import annotations

import dataclasses

import pytest

from dshealthd.doctor.snapshot_check import SnapshotCheck
from tests.doctor.looks import named, results
from tests.doctor.test_snapshot_check import Scene, seen

GPU = ("gpu_up", 1, "3", "GPU-d")
PORTS = ("rendezvous_ports", 101)
OWNED = (("rendezvous_listeners", 2, "false"), ("rendezvous_listeners", 0, "unknown"), PORTS)
WIDTHS = (("pcie_link_width", 16, "3", "GPU-d"), ("pcie_link_width_max", 16, "3", "GPU-d"))
PROBES = ("probe_up", 1)
OF_PROBES = (named("link-suspects"), named("probe-failures"), named("straggler"))


@pytest.mark.parametrize(
    ("check", "scene", "said", "well"),
    [
        pytest.param(
            named("listeners"),
            (("rendezvous_listeners", 2, "false"), ("rendezvous_listeners", 1, "unknown"), PORTS),
            "the owner of 1 listener on rendezvous ports is unknown",
            OWNED,
            id="a listener whose owner is not found",
        ),
        pytest.param(
            named("gpus"),
            (("gpus_expected", 8),),
            "8 NVIDIA GPUs on the PCI bus, but no NVML to query them",
            (("gpus_expected", 8), ("gpus_visible", 8)),
            id="GPUs without a driver's library",
        ),
        pytest.param(
            named("gpu-throttling"),
            (GPU, ("gpu_temperature_celsius", 60, "3", "GPU-d", "core")),
            "GPU 3 does not report whether it is throttled",
            (GPU, ("gpu_throttle_active", 0, "3", "GPU-d", "hw_slowdown")),
            id="a GPU that does not tell what slows it down",
        ),
        pytest.param(
            named("pcie"),
            (GPU,),
            "GPU 3 does not report its PCIe link width",
            (GPU, *WIDTHS),
            id="a GPU that does not tell how wide its link is",
        ),
        *(
            pytest.param(
                check,
                (PROBES, ("probe_rounds_total", 9, "light", outcome)),
                "no round with another node has had a result yet",
                (PROBES, ("probe_rounds_total", 1, "light", "ok")),
                id=f"{check.name}, all rounds {outcome}",
            )
            for check in OF_PROBES
            for outcome in ("declined", "inconclusive", "unreachable", "unauthorized")
        ),
        *(
            pytest.param(
                check,
                (PROBES,),
                "no round with another node has had a result yet",
                (PROBES, ("probe_rounds_total", 1, "light", "hung")),
                id=f"{check.name}, no round",
            )
            for check in OF_PROBES
        ),
    ],
)
def test_unknown(check: SnapshotCheck, scene: Scene, said: str, well: Scene) -> None:
    """What nothing is known of is unknown, with a command to look oneself, and ok once it is
    known.
    """
    (found,) = results(check, seen(check, scene))
    assert (found.outcome.value, said in found.text) == ("unknown", True), found
    assert found.remedy
    (found,) = results(check, seen(check, well))
    assert found.outcome.value == "ok", found


@pytest.mark.parametrize("check", OF_PROBES)
def test_no_probes(check: SnapshotCheck) -> None:
    """Where no probes are configured that is said, and no number of rounds."""
    (found,) = results(check, seen(check, ()))
    assert (found.outcome.value, found.text) == ("ok", "no probes are configured")


@pytest.mark.parametrize(
    ("file", "found"),
    [("config", ["configuration"]), ("members", ["configuration", "list of members"])],
)
def test_a_configuration_that_the_agent_refuses_is_told_once(file: str, found: list[str]) -> None:
    """By its finding, or by the file's own errors, beside what it refuses otherwise."""
    context = seen(named("agent"), ((f"{file}_last_reload_successful", 0),))
    broken = dataclasses.replace(context, broken=("dshealthd.toml: unknown key",))
    assert [one.component for one in results(named("agent"), broken)] == found


def test_slots_that_are_not_seen() -> None:
    """A virtual machine's links are not called as wide as its slots, which it does not see."""
    (found,) = results(named("pcie"), seen(named("pcie"), (GPU, WIDTHS[0])))
    assert (found.outcome.value, "virtual machine" in found.text) == ("ok", True)
