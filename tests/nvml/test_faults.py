"""Faults of NVML and the driver, under a real agent with the genuine pynvml.

Numbers 1 to 13 and 46 of the fault catalogue; `test_session` has 14 and 15.

Always: /metrics answers within a second (every scrape of these tests checks it), the other
collectors stay fresh, the failing one shows down with its reason, its samples are gone and not
zero, and when the fault ends the samples return without a restart.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.config import registry
from tests import frozen
from tests.agents import RunningAgent, Scrape, running, seconds_to_end
from tests.nvml.simulator import Simulator

TEMPERATURE = "dshealthd_gpu_temperature_celsius"
DEADLINE = 1.5
LASTS = float(os.environ.get("DSHEALTHD_HUNG_SECONDS", "4"))
"""Seconds for which all GPUs hang in `test_03`: twenty sweeps, beyond two back-offs."""
GPU_COLLECTORS = [
    name for name, kind in registry.all_collectors().items() if kind.worker == "device"
]
KEPT = {"memory", "gpu_bus", *GPU_COLLECTORS}
CONFIG = "\n".join(
    f"[collectors.{name}]\n"
    + ("interval = '200ms'\n" if name in KEPT else "enabled = false\n")
    + (f"deadline = '{round(1000 * DEADLINE)}ms'\n" if name in GPU_COLLECTORS else "")
    for name in registry.all_collectors()
)


class Node:
    """An agent on a machine with eight simulated GPUs."""

    def __init__(self, agent: RunningAgent, gpus: Simulator) -> None:
        """Both are running."""
        self.agent = agent
        self.gpus = gpus

    def until_gpus(self, *expected: int, seconds: float = 60.0) -> Scrape:
        """Wait until exactly these GPUs have a core temperature, and return the scrape."""
        wanted = {str(gpu) for gpu in expected}
        return self.agent.wait(lambda scrape: shown(scrape) == wanted, seconds)

    def until_down(self, reason: str) -> Scrape:
        """Wait until the collector is down for this reason and nothing of any GPU is shown."""
        return self.agent.wait(
            lambda s: (
                s.value("dshealthd_collector_up", collector="gpu") == 0
                and s.value("dshealthd_collector_failing", collector="gpu", reason=reason) == 1
                and not s.all(TEMPERATURE)
            )
        )

    def stays_fresh(self) -> None:
        """Check that host memory goes on being sampled."""
        before = last_success(self.agent.scrape(), "memory")
        self.agent.wait(lambda s: last_success(s, "memory") > before, 2.0)


def shown(scrape: Scrape) -> set[str]:
    """Return the indices of the GPUs that have a core temperature."""
    return {
        dict(labels)["gpu"]
        for labels in scrape.series.get(TEMPERATURE, {})
        if ("sensor", "core") in labels
    }


def last_success(scrape: Scrape, collector: str) -> float:
    """Return the Unix time of a collector's last success."""
    value = scrape.value("dshealthd_collector_last_success_timestamp_seconds", collector=collector)
    assert value is not None
    return value


@contextlib.contextmanager
def node(
    directory: Path, config: str = CONFIG, *, library: bool = True, port: int = 0
) -> Iterator[Node]:
    """Run an agent with eight simulated GPUs, whose driver's library is there at first or not."""
    gpus = Simulator(directory)
    gpus.pci_sysfs(directory / "sys")
    if not library:
        gpus.hide_library()
    flags = ("--path.sysfs", str(directory / "sys"))
    with running(
        directory, config, environment=gpus.environment(), flags=flags, port=port
    ) as agent:
        yield Node(agent, gpus)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Run one node for all tests after whose fault it is as it was before."""
    with node(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture
def healthy(lasting: Node) -> Node:
    """Give a node that shows all its GPUs and has no stuck worker."""
    lasting.gpus.clear_faults()
    lasting.until_gpus(*range(8))
    lasting.agent.wait(lambda s: s.value("dshealthd_worker_stuck", worker="device") == 0)
    return lasting


def test_01_call_that_never_returns(healthy: Node) -> None:
    """NVML hangs: GPU samples are gone, `up` is 0, the age of the last success stands still."""
    healthy.gpus.fault("hang")
    scrape = healthy.until_down("timeout")
    assert scrape.value("dshealthd_collector_up", collector="gpu") == 0
    healthy.stays_fresh()
    assert last_success(healthy.agent.scrape(), "gpu") == last_success(scrape, "gpu")
    assert len(healthy.agent.workers()) <= 1
    healthy.gpus.clear_faults()
    healthy.until_gpus(*range(8))


def test_01_hung_gpu_keeps_its_uuid(healthy: Node) -> None:
    """The worker that replaces a hung one knows the UUID of the GPU that it must leave alone."""
    uuid = healthy.gpus.value(3, "uuid")
    healthy.agent.wait(lambda s: s.value("dshealthd_gpu_up", gpu="3", uuid=uuid) == 1)
    healthy.gpus.fault("hang", gpu=3)
    healthy.agent.wait(lambda s: s.value("dshealthd_gpu_up", gpu="3", uuid=uuid) == 0)
    scrape = healthy.until_gpus(0, 1, 2, 4, 5, 6, 7)
    assert scrape.value("dshealthd_gpu_fault", gpu="3", uuid=uuid, reason="timeout") == 1
    assert scrape.value("dshealthd_gpu_up", gpu="3", uuid="") is None


def test_02_unkillable_call(healthy: Node, tmp_path: Path) -> None:
    """A call that no signal reaches costs one stuck worker, or two; seven GPUs are reported."""
    with frozen.mounted(tmp_path) as mount:
        mount.freeze()
        healthy.gpus.fault("dstate", f"{mount.directory}/x", gpu=3)
        healthy.until_gpus(0, 1, 2, 4, 5, 6, 7)
        scrape = healthy.agent.wait(
            lambda s: s.value("dshealthd_gpu_fault", gpu="3", reason="stuck")
        )
        stuck = scrape.value("dshealthd_worker_stuck", worker="device")
        assert stuck in {1, 2}
        starts = scrape.value("dshealthd_worker_starts_total", worker="device")
        time.sleep(3)  # longer than the first back-off
        scrape = healthy.until_gpus(0, 1, 2, 4, 5, 6, 7)
        assert scrape.value("dshealthd_worker_stuck", worker="device") == stuck
        assert scrape.value("dshealthd_worker_starts_total", worker="device") == starts
        healthy.gpus.clear_faults()
        mount.thaw()
        healthy.until_gpus(*range(8))
        healthy.agent.wait(lambda s: s.value("dshealthd_worker_stuck", worker="device") == 0)


def test_03_all_gpus_unkillable(healthy: Node, tmp_path: Path) -> None:
    """All GPUs are so: one stuck worker for each, and a second at most for those that a collector
    beside `gpu` was just reading. However long it lasts no more are started.
    """
    with frozen.mounted(tmp_path, frozen.THAW_SECONDS + LASTS) as mount:
        mount.freeze()
        for gpu in range(8):
            healthy.gpus.fault("dstate", f"{mount.directory}/x", gpu=gpu)
        healthy.until_down("stuck")
        scrape = healthy.agent.wait(
            lambda s: len(s.all("dshealthd_gpu_fault", reason="stuck")) == 8
        )
        stuck = scrape.value("dshealthd_worker_stuck", worker="device")
        assert stuck is not None
        assert 8 <= stuck <= 16
        starts = scrape.value("dshealthd_worker_starts_total", worker="device")
        assert starts is not None
        end = time.monotonic() + LASTS
        while time.monotonic() < end:
            time.sleep(2)
            scrape = healthy.agent.scrape()
            assert scrape.value("dshealthd_worker_stuck", worker="device") == stuck
            assert scrape.value("dshealthd_worker_starts_total", worker="device") == starts
            assert not scrape.all(TEMPERATURE)
            healthy.stays_fresh()
        healthy.gpus.clear_faults()
        mount.thaw()
        healthy.until_gpus(*range(8))


def test_04_sigkill_with_an_unkillable_worker(tmp_path: Path) -> None:
    """The agent is killed while its worker cannot be: the port binds again at once."""
    with contextlib.ExitStack() as stack:
        mount = stack.enter_context(frozen.mounted(tmp_path))
        with node(tmp_path) as first:
            first.until_gpus(*range(8))
            mount.freeze()
            first.gpus.fault("dstate", f"{mount.directory}/x", gpu=0)
            first.agent.wait(lambda s: s.value("dshealthd_worker_stuck", worker="device") == 1)
            port = first.agent.port
            first.agent.process.kill()
            first.agent.process.wait(60)
            with node(tmp_path, port=port) as second:
                assert second.agent.port == port
                second.stays_fresh()
                mount.thaw()


@pytest.mark.parametrize(("kind", "value", "reason"), [
    pytest.param("delay", 45, "timeout", id="the deadline rules, not the driver"),
    pytest.param("fail", 999, "unknown_error", id="Unknown Error from every GPU"),
    pytest.param("fail", 4, "permission_denied", id="no permission"),
])  # fmt: skip
def test_05_07_09_all_calls(healthy: Node, kind: str, value: int, reason: str) -> None:
    """Calls that are slow or fail take the collector down, with no GPU shown as healthy."""
    healthy.gpus.fault(kind, value)
    scrape = healthy.until_down(reason)
    assert 1 not in scrape.all("dshealthd_gpu_up")
    healthy.stays_fresh()
    healthy.gpus.clear_faults()
    healthy.until_gpus(*range(8))


def test_06_07_one_gpu_fails(healthy: Node) -> None:
    """One of eight GPUs fails: seven are reported, the eighth is down with its reason."""
    healthy.gpus.fault("fail", 15, gpu=5)
    healthy.until_gpus(0, 1, 2, 3, 4, 6, 7)
    scrape = healthy.agent.wait(lambda s: s.value("dshealthd_gpu_up", gpu="5") == 0)
    lost = {"collector": "gpu", "reason": "gpu_lost"}
    assert scrape.value("dshealthd_collector_failing", **lost) == 1
    assert (scrape.value("dshealthd_collector_errors_total", **lost) or 0) >= 1
    assert scrape.value("dshealthd_gpus_expected") == 8
    healthy.gpus.clear_faults()
    healthy.until_gpus(*range(8))


def test_08_driver_library_mismatch(healthy: Node) -> None:
    """After an update of the driver the old library answers with a mismatch."""
    starts = healthy.agent.scrape().value("dshealthd_worker_starts_total", worker="device")
    assert starts is not None
    healthy.gpus.fault("fail", 18)
    healthy.until_down("version_mismatch")
    healthy.gpus.clear_faults()
    healthy.gpus.set(None, "driver_version", "590.10")
    healthy.until_gpus(*range(8))
    scrape = healthy.agent.wait(lambda s: s.all("dshealthd_gpu_driver_info", driver="590.10"))
    assert (scrape.value("dshealthd_worker_starts_total", worker="device") or 0) > starts


def test_10_library_appears(tmp_path: Path) -> None:
    """GPUs on the PCI bus without a driver library are an error, not an ordinary machine."""
    with node(tmp_path, library=False) as made:
        scrape = made.agent.wait(lambda s: s.value("dshealthd_collector_up", collector="gpu") == 0)
        assert not scrape.all(TEMPERATURE)
        assert scrape.value("dshealthd_gpus_expected") == 8
        made.gpus.show_library()
        made.until_gpus(*range(8))


def test_11_segmentation_fault(healthy: Node) -> None:
    """The library crashes at one GPU: the others are reported, and that one says why."""
    healthy.gpus.fault("crash", "segv", gpu=2)
    healthy.until_gpus(0, 1, 3, 4, 5, 6, 7)
    scrape = healthy.agent.wait(lambda s: s.value("dshealthd_gpu_up", gpu="2") == 0)
    assert scrape.value("dshealthd_collector_failing", collector="gpu", reason="crashed") == 1
    healthy.gpus.clear_faults()
    healthy.until_gpus(*range(8))


def test_12_count_changes_and_order(healthy: Node) -> None:
    """Seven of eight GPUs remain, in another order."""
    before = by_uuid(healthy.agent.scrape())
    healthy.gpus.order(7, 6, 5, 4, 2, 1, 0)
    scrape = healthy.agent.wait(
        lambda s: s.value("dshealthd_gpus_visible") == 7 and len(by_uuid(s)) == 7
    )
    after = by_uuid(scrape)
    assert all(before[uuid] == value for uuid, value in after.items())
    (missing,) = before.keys() - after.keys()
    assert scrape.value("dshealthd_gpu_up", uuid=missing) == 0
    assert scrape.value("dshealthd_gpus_expected") == 8
    healthy.gpus.unset(None, "order")
    healthy.until_gpus(*range(8))


def by_uuid(scrape: Scrape) -> dict[str, float]:
    """Return the core temperatures by UUID."""
    return {
        dict(labels)["uuid"]: value
        for labels, value in scrape.series.get(TEMPERATURE, {}).items()
        if ("sensor", "core") in labels
    }


def test_13_driver_unloads(healthy: Node) -> None:
    """The driver goes away: every handle is released, and after it is back the samples return."""
    healthy.gpus.watch()
    healthy.gpus.set(None, "no_driver", 1)
    healthy.agent.wait(
        lambda s: s.value("dshealthd_collector_up", collector="gpu") != 1 and not s.all(TEMPERATURE)
    )
    assert [event for event, _, _ in healthy.gpus.trace()][-1:] == ["shutdown"]
    healthy.gpus.set(None, "no_driver", 0)
    healthy.until_gpus(*range(8))


def test_13_operator_releases_the_gpus(tmp_path: Path) -> None:
    """While the release file exists the worker is gone, so that the driver can be unloaded."""
    release = tmp_path / "root/run/dshealthd/release-gpus"
    release.parent.mkdir(parents=True)
    with node(tmp_path, f"[path]\nrootfs = '{tmp_path}/root'\n{CONFIG}") as made:
        agent = made.agent
        made.until_gpus(*range(8))
        release.touch()
        agent.wait(lambda s: s.value("dshealthd_worker_up", worker="device") == 0)
        agent.wait(lambda _: agent.workers() == [])
        scrape = agent.wait(
            lambda s: s.value("dshealthd_collector_available", collector="gpu") == 0
        )
        assert not scrape.all("dshealthd_collector_up", collector="gpu")
        release.unlink()
        made.until_gpus(*range(8))


def test_46_sigterm_with_a_blocked_worker(tmp_path: Path) -> None:
    """SIGTERM ends the agent within 20 s, though one worker hangs and one is unkillable."""
    with frozen.mounted(tmp_path) as mount, node(tmp_path) as ending:
        ending.until_gpus(*range(8))
        mount.freeze()
        ending.gpus.fault("dstate", f"{mount.directory}/x", gpu=3)
        ending.agent.wait(lambda s: s.value("dshealthd_worker_stuck", worker="device") == 1)
        ending.gpus.fault("hang", gpu=4)
        time.sleep(0.3)
        assert seconds_to_end(ending.agent.process) < 20
        assert ending.agent.process.wait() == 0
        mount.thaw()
