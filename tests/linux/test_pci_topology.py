"""How GPUs and adapters are joined, on trees of sysfs as real nodes have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.linux.pci import describe
from tests.collectors.bench import write

GPU = ("0x10de", "0x030200", "0x2330")
ADAPTER = ("0x15b3", "0x020700", "0x1021")
ROOT, OTHER_ROOT = "pci0000:00/0000:00:01.0", "pci0000:00/0000:00:02.0"
SWITCH = f"{ROOT}/0000:01:00.0"
FAR = "pci0000:80/0000:80:01.0"


class Node:
    """A sysfs with devices."""

    def __init__(self, sysfs: Path) -> None:
        self.host = Host(sysfs=sysfs)

    def put(self, path: str, identity: tuple[str, str, str], numa: str = "0") -> Path:
        """Add a device at a place below /sys/devices; its name is the last part."""
        place = self.host.sysfs / "devices" / path
        names = ("vendor", "class", "device", "numa_node")
        write(place, dict(zip(names, (*identity, numa), strict=True)))
        bus = self.host.sysfs / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        (bus / place.name).symlink_to(place)
        return place

    def wired(self, shift: int = 0) -> Node:
        """Add four GPUs and an adapter of two ports; `shift` numbers the bus differently."""

        def at(bus: int) -> str:
            return f"0000:{bus + shift:02x}:00.0"

        self.put(f"{SWITCH}/0000:02:00.0/{at(3)}", GPU)
        self.put(f"{SWITCH}/0000:02:01.0/{at(4)}", GPU)
        self.put(f"{SWITCH}/0000:02:02.0/{at(5)}", ADAPTER)
        self.put(f"{SWITCH}/0000:02:02.0/{at(5)[:-1]}1", ADAPTER)
        self.put(f"{OTHER_ROOT}/{at(0x21)}", GPU)
        self.put(f"{FAR}/{at(0x81)}", GPU, "1")
        return self


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without devices."""
    return Node(tmp_path)


def test_words_of_nvidia_smi(node: Node) -> None:
    """Devices of one switch are PIX, of another root port PHB, of the other socket SYS."""
    assert describe(node.wired().host) == (
        "gpu:0x2330 0 X PIX PIX PIX PHB SYS\ngpu:0x2330 0 PIX X PIX PIX PHB SYS\nadapter:0x1021 0 "
        "PIX PIX X PIX PHB SYS\nadapter:0x1021 0 PIX PIX PIX X PHB SYS\ngpu:0x2330 0 PHB PHB PHB "
        "PHB X SYS\ngpu:0x2330 1 SYS SYS SYS SYS SYS X"
    )


def test_switches_below_each_other_and_roots_of_a_socket(node: Node) -> None:
    """Two switches between devices are PXB, two host bridges of a NUMA node NODE."""
    node.put(f"{SWITCH}/0000:02:00.0/0000:03:00.0", GPU)
    node.put(f"{SWITCH}/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0", GPU)
    node.put("pci0000:40/0000:40:01.0/0000:41:00.0", GPU)
    assert describe(node.host) == (
        "gpu:0x2330 0 X PXB NODE\ngpu:0x2330 0 PXB X NODE\ngpu:0x2330 0 NODE NODE X"
    )


def test_alike_but_for_addresses(tmp_path: Path) -> None:
    """A node whose firmware numbers the bus differently is joined alike."""
    one, other, moved = (Node(tmp_path / name) for name in ("a", "b", "c"))
    assert describe(one.wired().host) == describe(other.wired(shift=1).host)
    moved.put(f"{SWITCH}/0000:02:00.0/0000:03:00.0", GPU)
    moved.put(f"{SWITCH}/0000:02:01.0/0000:04:00.0", GPU)
    moved.put(f"{OTHER_ROOT}/0000:21:00.0", GPU)
    moved.put(f"{FAR}/0000:81:00.0", GPU, "1")
    moved.put(f"{FAR}/0000:82:00.0", ADAPTER, "1")
    moved.put(f"{FAR}/0000:82:00.1", ADAPTER, "1")
    assert describe(moved.host) != describe(one.host)


def test_what_does_not_count(node: Node) -> None:
    """Virtual functions, other vendors' cards and a node without GPUs tell nothing."""
    node.put(f"{ROOT}/0000:01:00.0", ADAPTER)
    assert describe(node.host) is None
    node.put(f"{ROOT}/0000:02:00.0", GPU)
    before = describe(node.host)
    virtual = node.put(f"{ROOT}/0000:01:00.1", ADAPTER)
    (virtual / "physfn").symlink_to(virtual.parent / "0000:01:00.0")
    node.put(f"{ROOT}/0000:05:00.0", ("0x8086", "0x020000", "0x1572"))
    assert describe(node.host) == before
    assert describe(Host(sysfs=node.host.sysfs / "absent")) is None
