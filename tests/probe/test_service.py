"""The probes of several agents together.

Who meets whom in each epoch, what they export of it, and what happens when agents go.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from dshealthd import __version__
from dshealthd.agent.probes import Probes
from dshealthd.config.config import Config
from dshealthd.core.exposition import render
from dshealthd.core.host import Signature, signatures
from dshealthd.core.options import Duration
from dshealthd.core.timing import happens
from dshealthd.probe import service
from dshealthd.probe.members import local_membership
from dshealthd.probe.options import MembershipOptions, PeerOptions, ProbeOptions
from dshealthd.probe.peers.credentials import Credentials
from dshealthd.probe.workers.worker_pool import WorkerPool
from tests.agents import running
from tests.probe.peering import KEY, PATIENT, may_block, secret
from tests.probe.services import NAMES, PERIOD, Agent, agents, snapshot
from tests.threads import running_threads
from tests.waiting import eventually

FILE = "probe-baselines.json"
LIGHT = ["light", "agent", "echo", 0, "", True]
ROW = [*LIGHT, 0, None, None, None, [0.5] * 16]


def partners(agent: Agent, epoch: int) -> list[str]:
    """Return the nodes that a node met in successful rounds of an epoch."""
    found = [
        entry for entry in agent.rounds if entry["epoch"] == epoch and entry["outcome"] == "ok"
    ]
    return [name for entry in found for name in entry["members"] if name != agent.name]


def epochs(members: Sequence[Agent]) -> list[int]:
    """Return the epochs in which all of these nodes have had a successful round, in order."""
    return sorted(
        set.intersection(
            *(
                {
                    entry["epoch"]
                    for entry in agent.rounds
                    if entry["outcome"] == "ok" and entry["epoch"]
                }
                for agent in members
            )
        )
    )


async def test_every_pair_meets(tmp_path: Path) -> None:
    """Four nodes have one round per epoch, in pairs that all meet; nothing is accused."""
    async with agents(tmp_path, 4) as members:
        await eventually(lambda: len(epochs(members)) >= 3)
        met = set()
        for epoch in epochs(members)[:3]:
            for agent in members:
                (partner,) = partners(agent, epoch)
                met.add(frozenset((agent.name, partner)))
        assert len(met) == 6
        for agent in members:
            assert agent.value("probe_rounds_total", "light", "ok") == agent.value(
                "probe_rounds_total"
            )
            assert agent.value("probe_skips_total", "no_python") == agent.value(
                "probe_rounds_total"
            )
            assert agent.suspects == []
            assert agent.value("probe_up") == 1
            assert agent.value("members") == 4
        assert len({agent.value("members_hash") for agent in members}) == 1
        selves = {agent.value("probe_member_hash", "self") for agent in members}
        assert len(selves) == 4
        # Whom each has met last: for whoever knows of none in this moment, in a next epoch.
        for agent in members:
            others = selves - {agent.value("probe_member_hash", "self")}
            await eventually(lambda: agent.value("probe_member_hash", "met") in others)  # noqa: B023
        for agent in members:
            assert agent.value("probe_operation_seconds", "light", "agent", "echo") > 0


async def test_half_the_agents_gone(tmp_path: Path) -> None:
    """If half of the agents end, the others say who is gone, and go on."""
    async with agents(tmp_path, 4) as members:
        await eventually(lambda: epochs(members))
        *gone, one, two = members
        await asyncio.gather(*(agent.service.close() for agent in gone))
        ended = one.wall() // PERIOD
        names = {agent.name for agent in gone}
        await eventually(lambda: {entry["component"] for entry in one.suspects} == names)
        assert {(entry["kind"], entry["reason"]) for entry in one.suspects} == {("node", "refused")}
        await eventually(lambda: any(epoch > ended for epoch in epochs([one, two])))
        met = one.value("probe_member_hash", "met")
        assert met in {0, two.value("probe_member_hash", "self")}, "nobody has met who is gone"


async def test_an_agent_s_probes_have_collectors_look(tmp_path: Path) -> None:
    """They ask for those that tell whether a job has started."""
    asked: list[str] = []
    nothing: Any = tuple
    probes = Probes(snapshot(), nothing, nothing, str, asked.extend, time.monotonic, time.time)
    key = secret(tmp_path, "key", KEY)
    options = ProbeOptions(
        members=MembershipOptions(nodes=NAMES[:2], name=NAMES[0]),
        peer=PeerOptions(listen_address=f"{NAMES[0]}:{free_port()}", key_file=key),
    )
    config = Config(path=replace(Config().path, state=tmp_path)).with_section(options)
    await probes.apply(config)
    try:
        assert probes._running is not None
        await probes._running._state.gpus.refresh()
    finally:
        await probes.close()
    assert asked == ["gpu_processes", "job_environment"]


def write(hostfile: Path, *names: str) -> None:
    """Write a hostfile of these nodes."""
    hostfile.write_text("".join(f"{name} slots=8\n" for name in names), encoding="ascii")


def reads(hostfile: Path) -> Callable[[ProbeOptions], ProbeOptions]:
    """Return the change of options that has agents take their members from a hostfile."""
    return lambda options: replace(
        options, members=MembershipOptions(hostfile=hostfile, name=options.members.name)
    )


async def test_hung_hostfile_does_not_stop_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the disk of the hostfile hangs, as NFS may on all nodes at once, rounds take place on
    time, and few threads hang. Later the list is reread.
    """
    hostfile, answers = tmp_path / "hostfile", threading.Event()
    answers.set()

    def hung_signatures(files: Iterable[Path]) -> tuple[Signature | None, ...]:
        answers.wait(10 * PATIENT)
        return signatures(files)

    try:
        write(hostfile, *NAMES[:2])
        monkeypatch.setattr(local_membership, "signatures", hung_signatures)
        monkeypatch.setattr(local_membership, "DEADLINE", 1.0)
        async with agents(tmp_path, 2, change=reads(hostfile)) as both:
            await eventually(lambda: epochs(both))
            answers.clear()
            hung_at = both[0].service.status()["epoch"]
            both[0].service.reload()
            await eventually(
                lambda: len([epoch for epoch in epochs(both) if epoch > hung_at + 1]) >= 4
            )
            assert running_threads("members") < 8  # not one for each epoch of each agent
            await eventually(lambda: all(agent.service.status()["detail"] for agent in both))
            for agent in both:
                assert f"{hostfile} could not be read" in agent.service.status()["detail"]
                assert agent.value("members_last_reload_successful") == 0
                assert agent.value("members") == 2
            write(hostfile, *NAMES[:3])
            answers.set()
            await eventually(lambda: all(agent.value("members") == 3 for agent in both))
            await eventually(lambda: not any(agent.service.status()["detail"] for agent in both))
    finally:
        answers.set()


async def test_waits_for_what_is_missing(tmp_path: Path) -> None:
    """Without a usable key the probes are down with the reason, and start once there is one."""
    async with agents(tmp_path, 2) as (one, two):
        (tmp_path / two.name / "key").chmod(0o644)
        await two.service.close()
        two.service.start()
        await eventually(lambda: two.service.status()["detail"])
        assert "mode 0644" in two.service.status()["detail"]
        assert two.value("probe_up") == 0
        (tmp_path / two.name / "key").chmod(0o600)
        two.service.reload()
        await eventually(lambda: two.value("probe_up") == 1)
        await eventually(lambda: epochs([one, two]))


async def test_a_loopback_address_is_a_reason(tmp_path: Path) -> None:
    """Where this node's own name is one of 127.0.0.0/8, as in Debian's /etc/hosts, the probes are
    down: they would call others, who would find all their calls refused.
    """

    def at_localhost(options: ProbeOptions) -> ProbeOptions:
        port = options.peer.listen_address.rpartition(":")[2]
        members = MembershipOptions(nodes=("gpu1", "gpu2"), name="gpu1")
        peer = replace(options.peer, listen_address=f"localhost:{port}")
        return replace(options, members=members, peer=peer)

    async with agents(tmp_path, 1, change=at_localhost) as (one,):
        await eventually(lambda: one.service.status()["detail"])
        assert "no other node reaches it" in one.service.status()["detail"]
        assert one.value("probe_up") == 0


async def test_hung_key_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk of the key hangs, the probes say so; they start once it answers."""
    answers = threading.Event()

    def hung_credentials(options: PeerOptions) -> Credentials:
        answers.wait(10 * PATIENT)
        return Credentials(options)

    async def soon(event: asyncio.Event, seconds: float) -> bool:
        waits.append(seconds)
        return await happens(event, 0.1)

    prepared, patience = service._prepared, [0.3]

    async def hasty(read: Callable[[], Any], what: str, seconds: float) -> Any:
        limits[what] = seconds
        return await prepared(read, what, patience[-1])

    waits: list[float] = []
    limits: dict[str, float] = {}
    try:
        monkeypatch.setattr(service, "Credentials", hung_credentials)
        monkeypatch.setattr(service, "_prepared", hasty)
        monkeypatch.setattr(service, "happens", soon)
        async with agents(tmp_path, 1) as (one,):
            await eventually(lambda: one.service.status()["detail"])
            assert one.service.status()["detail"] == "peer credentials: no answer within 0.3 s"
            assert one.value("probe_up") == 0
            patience.append(PATIENT)
            answers.set()
            await eventually(lambda: one.value("probe_up") == 1)
            assert not one.service.status()["detail"]
        assert {*waits} == {5.0}
        assert limits["peer credentials"] == 10.0
    finally:
        answers.set()


async def test_so_many_members_are_listed(tmp_path: Path) -> None:
    """Sixty-four of any number."""

    def of_many(options: ProbeOptions) -> ProbeOptions:
        names = tuple(f"127.0.0.{number}" for number in range(21, 86))
        return replace(options, members=replace(options.members, nodes=names))

    async with agents(tmp_path, 1, change=of_many) as (one,):
        await eventually(lambda: one.value("members") == 65)
        listed = [each["name"] for each in one.service.status()["peers"]]
    assert (len(listed), listed[0]) == (64, one.name)


async def test_baselines_outlive_the_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are saved at its end, and read at its start; a file that is none is said, once, and
    replaced.
    """
    document = json.dumps({"stamp": f"dshealthd {__version__}", "classes": [ROW]})
    found = dict(zip(NAMES, ("{", document), strict=False))

    def put(options: ProbeOptions) -> ProbeOptions:
        name = options.members.name
        (tmp_path / name / FILE).write_text(found[name], encoding="ascii")
        return options

    async with agents(tmp_path, 2, change=put) as both:
        await eventually(lambda: epochs(both))
    said = [one.message for one in caplog.records if "baselines" in one.message]
    assert said == ["probe: baselines start from scratch: body is not JSON"]
    # Of two agents in one process, the end of only one waits for its file.
    await eventually(lambda: (tmp_path / NAMES[0] / FILE).read_text() != "{")
    kept = [json.loads((tmp_path / name / FILE).read_bytes())["classes"] for name in found]
    times = [one[-1] for classes in kept for one in classes if one[: len(LIGHT)] == LIGHT]
    assert (len(times), times[-1][:16]) == (len(kept), [0.5] * 16)


async def test_rounds_do_not_wait_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While torch is imported, which may take a minute, an agent answers and has light rounds: who
    calls it must not find its calls refused. Saved baselines, of a version of torch that is not
    known yet, stay as they are.
    """

    async def hang(_: WorkerPool, deadline: float) -> str:
        await asyncio.sleep(deadline * 1000)
        return ""

    def put(options: ProbeOptions) -> ProbeOptions:
        (tmp_path / options.members.name / FILE).write_text("{}", encoding="ascii")
        return replace(options, python=Path(sys.executable))

    monkeypatch.setattr(WorkerPool, "prepare", hang)
    async with agents(tmp_path, 2, change=put) as both:
        await eventually(lambda: epochs(both))
        assert all(agent.value("probe_skips_total", "warming_up") for agent in both)
    assert {(tmp_path / name / FILE).read_text() for name in NAMES[:2]} == {"{}"}


@may_block
async def test_real_workers(tmp_path: Path) -> None:
    """With torch the rounds are collectives, and their baselines survive a restart."""
    change = lambda options: replace(  # noqa: E731
        options, python=Path(sys.executable), period=Duration(2.0), large_every=0
    )
    async with agents(tmp_path, 2, change=change) as members:
        await eventually(
            lambda: all(agent.value("probe_rounds_total", "pair", "ok") >= 2 for agent in members),
            150.0,  # torch is imported first
        )
        one = members[0]
        assert (
            one.value("probe_bus_bandwidth_bytes_per_second", "pair", "gloo", "all_reduce", "65536")
            > 0
        )
        assert one.value("probe_gpu_seconds_total") == 0
        assert one.suspects == []
        text = render(one.service.samples())
        assert 'dshealthd_probe_duration_seconds_bucket{kind="pair",le="+Inf"}' in text
    kept = tmp_path / members[0].name / "probe-baselines.json"
    assert b"all_reduce" in kept.read_bytes()


def test_in_the_agent(tmp_path: Path) -> None:
    """A running agent with a section `probe` exports its metrics and shows it in its status.
    Without that section, the status shows that probes are off.
    """
    with running(tmp_path) as agent:
        assert json.loads(agent.get("/api/v1/status"))["probe"] == {"state": "off"}
    secret(tmp_path, "key", KEY)
    config = f"""
        [probe]
        period = "1s"
        [probe.members]
        nodes = ["127.0.0.31", "127.0.0.32"]
        name = "127.0.0.31"
        [probe.peer]
        listen_address = "127.0.0.31:{free_port()}"
        key_file = "{tmp_path}/key"
    """
    with running(tmp_path, config) as agent:
        scrape = agent.wait(
            lambda s: s.value("dshealthd_probe_rounds_total", kind="light", outcome="refused")
        )
        assert scrape.value("dshealthd_members") == 2
        status = json.loads(agent.get("/api/v1/status"))["probe"]
        assert (status["state"], status["name"], status["members"]) == ("ok", "127.0.0.31", 2)
        assert status["rounds"][0]["late"] == ["127.0.0.32"]
