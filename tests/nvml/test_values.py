"""The most that a driver's count may be: one that cannot be true is malformed, for its field alone,
and costs no more than the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from dshealthd.core.collector import Context, Reason, SourceError
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome
from dshealthd.nvml import values
from dshealthd.nvml.session import Session
from tests.nvml.node import GPU_COLLECTORS, Node

MAX_GPUS = 32


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give two H100, the second of which has a MIG device."""
    with Node(tmp_path, gpus=2) as made:
        for key, value in (("mig_mode", 1), ("mig_devices", 1)):
            made.simulator.set(1, key, value)
        yield made


def test_maxima_are_those_of_pynvml() -> None:
    """No maximum is below what this version of NVML's header allows."""
    assert values.MAX_LINKS >= pynvml.NVML_NVLINK_MAX_LINKS


def test_count_in_a_field(node: Node) -> None:
    """A count that is none is a fault of its collector, and what it counts is unknown."""
    node.collect()
    for number in ("5000123", "0xfffffffe", "2.5", "-3.0", "1.0e300"):
        node.simulator.set(1, "field.91", number)
        seen = node.collect(advance=61.0)
        assert {name: seen.reasons(name) for name in GPU_COLLECTORS} == {
            name: {"gpu 1": Reason.MALFORMED} if name == "nvlink" else {} for name in GPU_COLLECTORS
        }, number
        assert not seen.values("nvlinks_up", gpu="1")
        assert seen.value("gpu_up", gpu="1", uuid=node.uuid(1)) == 1
        node.simulator.unset(1, "field.91")
        assert node.collect(advance=61.0).reasons("nvlink") == {}


def test_count_of_mig_devices(node: Node) -> None:
    """MIG devices are unknown where the driver says that a GPU may have more than 64."""
    node.simulator.set(1, "mig_max", 64)
    assert node.collect("mig").values("mig_device_info")
    node.simulator.set(1, "mig_max", 65)
    node.collect(advance=61.0)
    node.simulator.watch()
    for _ in range(2):  # the count is kept between enumerations
        seen = node.collect()
        assert seen.reasons("mig") == {"gpu 1": Reason.MALFORMED}
    assert not seen.values("mig_device_info")
    assert not node.simulator.calls()["nvmlDeviceGetMigDeviceHandleByIndex"]
    assert seen.reasons("gpu") == {}


@pytest.mark.parametrize("how", ["counter", "random"])
def test_count_of_processes(node: Node, how: str) -> None:
    """No list is longer than a GPU's may be, by the number needed or the one written."""
    node.simulator.set(None, "device_count", 2)
    node.simulator.set(1, "processes", "11:4096")
    node.simulator.set(None, "arbitrary", how)
    for _ in range(2):
        seen = node.collect("gpu_processes")
        assert seen.reasons("gpu_processes") == {"gpu 0": Reason.MALFORMED}
        assert {gpu for gpu, _ in seen.values("gpu_compute_processes")} == {"1"}


def test_count_of_gpus(node: Node) -> None:
    """The GPUs of the list stay, and those of the bus are there from the first sweep on."""
    node.simulator.set(None, "device_count", 5_000_123)
    for _ in range(2):
        seen = node.collect(advance=61.0)
        assert seen.results["gpu"].outcome is CollectionOutcome.OK
        assert seen.reasons("gpu") == {"nvml": Reason.MALFORMED}
        assert {gpu: up for (gpu, _), up in seen.values("gpu_up").items()} == {"0": 1, "1": 1}
        assert not seen.values("gpus_visible")
    node.simulator.unset(None, "device_count")
    seen = node.collect()
    assert seen.reasons() == {}
    assert seen.value("gpus_visible") == 2


def test_count_of_gpus_without_a_bus(tmp_path: Path) -> None:
    """Where nothing else says how many GPUs there are, none is invented."""
    with Node(tmp_path, pci=False) as node:
        node.simulator.set(None, "device_count", 5_000_123)
        result = node.collect("gpu").results["gpu"]
        assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)
        assert not result.samples


def test_count_that_changes(node: Node) -> None:
    """A GPU with another number of links than before shows those."""
    for count in (6, 18, 4):
        node.simulator.set(1, "nvlink_count", count)
        seen = node.collect("nvlink", advance=1.0)
        assert seen.results["nvlink"].outcome is CollectionOutcome.OK
        assert len(seen.values("nvlink_up", gpu="1")) == count


def test_versions_that_are_no_text(node: Node) -> None:
    """A version that is no UTF-8 is unknown, and the GPUs are read."""
    path = node.simulator.scenario
    path.write_bytes(path.read_bytes() + b"driver_version = \xff\xfe\nlibrary_version = \xff\xfe\n")
    seen = node.collect("gpu")
    assert seen.results["gpu"].outcome is CollectionOutcome.OK
    ((driver, *_),) = seen.values("gpu_driver_info")
    assert driver == ""
    assert len(seen.values("gpu_up")) == 2


def test_count_that_no_driver_has(tmp_path: Path) -> None:
    """As many GPUs as a driver can have are believed, one more are not."""
    session = Session(Context(host=Host(sysfs=tmp_path)))
    assert (session._counted(MAX_GPUS), session.fault) == (MAX_GPUS, None)
    with pytest.raises(SourceError, match="is no count"):
        session._counted(MAX_GPUS + 1)
