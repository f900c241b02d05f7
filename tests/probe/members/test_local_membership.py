"""The members as one agent knows them, while their source changes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dshealthd.probe.members.local_membership import HASH, MEMBERS, OK, LocalMembership
from dshealthd.probe.options import MembershipOptions
from tests.probe.peering import Time, may_block


@may_block
async def test_members_that_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A list is new if its members differ, or who of them this node is. One that cannot be used is
    said once, and the one before stays.
    """
    caplog.set_level(logging.INFO)
    file, host = tmp_path / "hostfile", ["a"]
    known = LocalMembership(MembershipOptions(hostfile=file), lambda: host[0], Time())
    with pytest.raises(LookupError):
        assert known.membership
    differs = []
    for text, name in (
        (None, "a"),
        ("a slots=8\nb slots=8\n", "a"),
        ("# the same\nb slots=8\na slots=8\n", "a"),
        ("a slots=8\nb slots=8\n", "b"),
        ("a slots=8\nb slots=4\n", "b"),
        ("a slots=?\n", "b"),
        ("a slots=?\n", "b"),
        ("a slots=8\nb slots=4\n", "b"),
    ):
        host[0] = name
        if text is not None:
            file.write_text(text, encoding="ascii")
        differs.append((await known.refresh(again=True), bool(known.errors)))
    assert differs == [
        *((False, True), (True, False), (False, False), (True, False), (True, False)),
        *((False, True), (False, True), (False, False)),
    ]
    assert (known.known, known.me, known.membership.names) == (True, "b", ("a", "b"))
    assert sum("not usable, keeping" in one.message for one in caplog.records) == 1
    found = {sample.metric: sample.value for sample in known.samples()}
    assert found == {MEMBERS: 2.0, HASH: float(known.membership.digest_number), OK: 1.0}


@may_block
async def test_members_are_read_when_they_change(tmp_path: Path) -> None:
    """A file that is as it was is not read again, unless it was no good or that is asked."""
    file = tmp_path / "hostfile"
    file.write_text("a slots=8\nb slots=8\n", encoding="ascii")
    known = LocalMembership(MembershipOptions(hostfile=file), lambda: "a", Time())
    reads = []
    load = known._load

    def counted(*, again: bool) -> object:
        found = load(again=again)
        reads.append(found is not None)
        return found

    known._load = counted  # type: ignore[method-assign,assignment]
    for again in (False, False, True, False):
        await known.refresh(again=again)
    assert reads == [True, False, True, False]
    known.errors = ("a name server did not answer",)
    await known.refresh()
    assert reads[-1]
    assert not known.errors
