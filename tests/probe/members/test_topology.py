"""Which nodes share a leaf switch, from files in the format of Slurm's topology.conf."""

from __future__ import annotations

import pytest

from dshealthd.probe.members.hostlist import MembershipError
from dshealthd.probe.members.topology import leaves, parse

TREE = """\
##################################################################
# Slurm's network topology configuration file
##################################################################
SwitchName=s0 Nodes=dev[0-5]
switchname=s1 NODES=dev[6-7],dev[8-11]   LinkSpeed=4 # the old one
SwitchName=s2 Nodes="dev[12-13], dev[14-17]"

SwitchName=s3 \\
    Switches=s[0-2]
"""


def test_tree() -> None:
    """Comments, quotes, continued lines and keys in either case are read; leaves have nodes."""
    switches = parse(TREE, "topology.conf")
    assert {name: len(nodes) for name, nodes in switches.items()} == {"s0": 6, "s1": 6, "s2": 6}
    assert leaves(switches, ["dev0", "dev7", "dev17", "dev18"]) == {
        "dev0": "s0",
        "dev7": "s1",
        "dev17": "s2",
        "dev18": "",
    }


def test_blocks() -> None:
    """Blocks count as leaves too."""
    switches = parse(
        "BlockName=b1 Nodes=n[01-18]\nBlockName=b2 Nodes=n[19-36]\nBlockSizes=18\n", "t"
    )
    assert leaves(switches, ["n01", "n36"]) == {"n01": "b1", "n36": "b2"}


def test_rails() -> None:
    """A node on several leaf switches shares a leaf with nodes on the same ones."""
    switches = parse("SwitchName=r2 Nodes=a,b\nSwitchName=r1 Nodes=b,a,c\n", "t")
    assert leaves(switches, "abc") == {"a": "r1+r2", "b": "r1+r2", "c": "r1"}


def test_long_and_short_names() -> None:
    """A long name matches a short one in the file and the reverse, unless that is ambiguous. An
    address has no short name.
    """
    short = {"s": ["gpu1", "10"]}
    assert leaves(short, ["gpu1.example.org", "10.0.0.1"]) == {
        "gpu1.example.org": "s",
        "10.0.0.1": "",
    }
    long = {"s": ["gpu1.a", "gpu2.a"], "t": ["gpu1.b"]}
    assert leaves(long, ["gpu1", "gpu2", "gpu1.c"]) == {"gpu1": "", "gpu2": "s", "gpu1.c": ""}


def test_every_bad_line_is_named() -> None:
    """All errors are reported at once, with file and the first line of a continued one. What is
    above the leaves is not read.
    """
    text = """\
SwitchName=s0 Nodes=n[1-2
SwitchName=s1 Nodes=n1
Nodes=n2
SwitchName=s3 Switches=s[0-2],s9
SwitchName=a,b \\
  Nodes=n5
SwitchName=s5 Nodes=n6 Nodes=n7
what is this
"""
    with pytest.raises(MembershipError) as error:
        parse(text, "/etc/topology.conf")
    assert error.value.errors == (
        '/etc/topology.conf:1: "n[1-2" has nested brackets or an unmatched one',
        '/etc/topology.conf:3: "Nodes=n2" has no valid SwitchName= or BlockName=',
        '/etc/topology.conf:5: "SwitchName=a,b    Nodes=n5" has no valid SwitchName= or BlockName=',
        '/etc/topology.conf:7: "SwitchName=s5 Nodes=n6 Nodes=n7" has Nodes twice',
        '/etc/topology.conf:8: "what is this" is not KEY=VALUE',
    )


def test_empty_file() -> None:
    """A file without a switch is an error, as it cannot be intended."""
    with pytest.raises(MembershipError, match=r"^t: defines no switch$"):
        parse("# nothing yet\n", "t")


def test_what_a_file_may_write_out_is_bounded() -> None:
    """Many lines that each expand to the maximum cannot add up without limit."""
    with pytest.raises(MembershipError) as error:
        parse("\n".join(f"SwitchName=s{i} Nodes=n[1-65536]" for i in range(12)), "t")
    assert len(error.value.errors) == 4
