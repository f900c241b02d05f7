"""Keys: who may read their files, what is a key, and what happens when they change."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.cli import main as cli
from dshealthd.core import host
from dshealthd.probe.observation import Outcome
from dshealthd.probe.options import PeerOptions
from dshealthd.probe.peers import credentials as module
from dshealthd.probe.peers.credentials import CredentialError, Credentials, parse_keys, read
from tests.probe.peering import (
    KEY,
    OTHER_KEY,
    PATIENT,
    Time,
    calling,
    fails,
    keyed,
    listening,
    may_block,
    metric,
    ping,
    secret,
    talking,
)
from tests.waiting import eventually


def problem(options: PeerOptions) -> str:
    """Return what is wrong with secrets, in one line."""
    with pytest.raises(CredentialError) as caught:
        read(options.key_file)
    return str(caught.value)


def test_keys_of_a_file() -> None:
    """Keys stand one a line, with line ends of either kind, comments and empty lines."""
    assert parse_keys(f"# of 2026\n{KEY}\r\n\n  {OTHER_KEY}  ".encode()) == (
        KEY.encode(),
        OTHER_KEY.encode(),
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_a_reason(data: bytes) -> None:
    """Whatever a key file holds gives one or two good keys or an error that has nothing of it."""
    try:
        keys, problem = parse_keys(data), b""
    except ValueError as error:
        keys, problem = (), str(error).encode()
    assert not any(len(word) > 6 and word in problem for word in data.split())
    assert problem or 1 <= len(keys) <= 2
    assert all(len(key) >= 32 and key in data for key in keys)


@pytest.mark.parametrize(("lines", "reason"), [
    ((), "holds 0 keys; it must be one, or 2 during a rotation"),
    ((KEY, OTHER_KEY, KEY[::-1]), "holds 3 keys; it must be one, or 2 during a rotation"),
    ((KEY, "secret"), "key 2 has 6 characters; at least 32 are needed (openssl rand -hex 32)"),
    (("x" * 31,), "key 1 has 31 characters; at least 32 are needed (openssl rand -hex 32)"),
    (("a b " * 20,), "key 1 is not made of visible ASCII characters"),
    (("~" * 32 + "\x7f",), "key 1 is not made of visible ASCII characters"),
    (("x" * 4096,), "is larger than 4096 bytes"),
])  # fmt: skip
def test_key_files_that_cannot_be(tmp_path: Path, lines: tuple[str, ...], reason: str) -> None:
    """A key file that is no good is named with the reason, and with nothing of what it holds."""
    path = secret(tmp_path, "key", *lines)
    assert problem(keyed(path)) == f"key_file: {path} {reason}"


@pytest.mark.parametrize("lines", [("!~" * 16,), ("x" * 4095,), ("# new", KEY, "", OTHER_KEY)])
def test_key_files_that_will_just_do(tmp_path: Path, lines: tuple[str, ...]) -> None:
    """The shortest key, the longest file, two keys with a comment."""
    found = Credentials(keyed(secret(tmp_path, "key", *lines))).keys
    assert found == tuple(line.encode() for line in lines if line and line[0] != "#")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o610])
def test_key_file_that_others_reach(tmp_path: Path, mode: int) -> None:
    """A key that anybody but its owner can read or write is not used."""
    path = secret(tmp_path, "key", KEY)
    path.chmod(mode)
    assert problem(keyed(path)) == (
        f"key_file: {path} has mode {mode:04o}, so others than its owner can access it; "
        "it must be 0600"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_key_file_of_another_user(tmp_path: Path) -> None:
    """A key that another user can change is not used."""
    path = secret(tmp_path, "key", KEY)
    os.chown(path, 4321, -1)
    assert (
        problem(keyed(path))
        == f"key_file: {path} belongs to user 4321; it must belong to root or this process's user"
    )


def test_key_that_is_no_file(tmp_path: Path) -> None:
    """What is not there, or is no file, is said so; a pipe does not block."""
    assert (
        problem(keyed(tmp_path / "none"))
        == f"key_file: {tmp_path}/none cannot be read: No such file or directory"
    )
    assert problem(keyed(tmp_path)) == f"key_file: {tmp_path} is not a regular file"
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert problem(keyed(tmp_path / "pipe")) == f"key_file: {tmp_path}/pipe is not a regular file"


def test_key_among_the_credentials_of_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a slash is one of systemd's credentials, whose modes are its own."""
    secret(tmp_path, "probe-key", KEY).chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    options = PeerOptions(key_file=type(tmp_path)("probe-key"))
    assert read(options.key_file) == (KEY.encode(),)
    assert "has mode 0440" in problem(keyed(tmp_path / "probe-key"))


async def looked(credentials: Credentials, clock: Time) -> Any:
    """Return what is in force after the files have been looked at."""
    clock.now += 2
    credentials.current()
    await eventually(lambda: credentials._check is None)
    return credentials.current()


@pytest.mark.parametrize(
    "content",
    ["", KEY[:20], f"{KEY}\n{OTHER_KEY[:9]}"],
    ids=["empty", "half a key", "half a second one"],
)
async def test_half_written_key_is_not_used(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is half-written, gone or open to others leaves the key before in force. It counts
    once and is logged without the key.
    """
    with caplog.at_level(logging.DEBUG):
        path, clock = secret(tmp_path, "key", KEY), Time()
        credentials = Credentials(keyed(path), clock)
        path.write_text(content, encoding="ascii")
        for _ in range(3):
            assert (await looked(credentials, clock)) == (KEY.encode(),)
        assert metric(credentials, "credentials_last_reload_successful") == 0
        assert caplog.text.count("new credentials rejected") == 1
        path.unlink()
        assert (await looked(credentials, clock)) == (KEY.encode(),)
        secret(tmp_path, "key", OTHER_KEY).chmod(0o644)
        assert (await looked(credentials, clock)) == (KEY.encode(),)
        assert caplog.text.count("new credentials rejected") == 3
        path.chmod(0o600)
        assert (await looked(credentials, clock)) == (OTHER_KEY.encode(),)
        assert metric(credentials, "credentials_last_reload_successful") == 1
    assert KEY[:9] not in caplog.text
    assert OTHER_KEY[:9] not in caplog.text
    caplog.clear()


async def test_key_that_could_not_be_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails once, or descriptors that run out, keep no new key out."""

    def failing(_path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    path, clock = secret(tmp_path, "key", KEY), Time()
    credentials = Credentials(keyed(path), clock)
    secret(tmp_path, "key", OTHER_KEY)
    with monkeypatch.context() as patch:
        patch.setattr(module, "read_secret", failing)
        assert (await looked(credentials, clock)) == (KEY.encode(),)
    assert (await looked(credentials, clock)) == (OTHER_KEY.encode(),)


async def test_key_that_is_being_written_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that changes meanwhile is read later: it may be the first half of a key."""
    looks: list[object] = []

    def signatures(files: Any) -> Any:
        looks.append(found := host.signatures(files))
        return found

    path, clock = secret(tmp_path, "key", KEY), Time()
    credentials = Credentials(keyed(path), clock)
    secret(tmp_path, "key", OTHER_KEY[:40])
    monkeypatch.setattr(module, "signatures", signatures)
    looking = asyncio.create_task(looked(credentials, clock))
    await eventually(lambda: bool(looks))
    secret(tmp_path, "key", OTHER_KEY)
    assert (await looking) == (KEY.encode(),)
    assert (await looked(credentials, clock)) == (OTHER_KEY.encode(),)


async def test_no_call_waits_for_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a look at the files hangs, the keys before stay in force; there is one look."""
    hanging, looks = threading.Event(), []

    def signatures(files: Any) -> Any:
        looks.append(files)
        hanging.wait(PATIENT)
        return host.signatures(files)

    path, clock = secret(tmp_path, "key", KEY), Time()
    credentials = Credentials(keyed(path), clock)
    secret(tmp_path, "key", OTHER_KEY)
    monkeypatch.setattr(module, "signatures", signatures)
    for _ in range(20):
        clock.now += 2
        assert credentials.current() == (KEY.encode(),)
        await asyncio.sleep(0)
    assert len(looks) == 1
    hanging.set()
    await eventually(lambda: credentials.keys == (OTHER_KEY.encode(),))


async def test_switch_turns_calls_off_and_on(tmp_path: Path) -> None:
    """While the file of the switch exists, calls are declined; strangers are told nothing of it."""
    clock, switch = Time(), tmp_path / "off"
    options = keyed(secret(tmp_path, "key", KEY), off_file=switch)
    credentials = Credentials(options, clock)
    async with talking(options, credentials=credentials) as (node, client):
        await ping(client)
        switch.touch()
        await looked(credentials, clock)
        await fails(ping(client), Outcome.DECLINED, "switched_off")
        other = keyed(secret(tmp_path, "other", OTHER_KEY))
        async with calling(other, node.port) as stranger:
            await fails(ping(stranger), Outcome.UNAUTHORIZED, "rejected")
        switch.unlink()
        await looked(credentials, clock)
        await ping(client)
        assert node.refused("switched_off") == 1


@may_block
async def test_rotation(tmp_path: Path) -> None:
    """`keys rotate` three times, with each file at the listener before the caller has it: every
    call succeeds. After that nobody accepts the first key, on a connection that it was used on
    neither.
    """
    clocks = Time(), Time()
    files = [secret(tmp_path, name, KEY) for name in ("listener", "caller")]
    options = [keyed(file) for file in files]
    ours, theirs = map(Credentials, options, clocks)
    async with (
        listening(options[0], credentials=ours) as node,
        calling(options[1], node.port, credentials=theirs) as client,
        calling(keyed(secret(tmp_path, "first", KEY)), node.port) as last,
    ):
        await ping(last)
        for _ in range(3):
            assert cli.main(["keys", "rotate", "--file", str(files[0])]) == 0
            await looked(ours, clocks[0])
            await ping(client)
            secret(tmp_path, "caller", files[0].read_text(encoding="ascii"))
            await looked(theirs, clocks[1])
            await ping(client)
        assert node.refused("key") == 0
        assert KEY.encode() not in ours.keys
        await fails(ping(last), Outcome.UNAUTHORIZED, "rejected")
        assert node.refused("key") == 1
