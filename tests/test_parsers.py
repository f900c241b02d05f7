"""Every parser of what others write, on text that it was not made for.

It returns something, or refuses with ValueError or an error of its own; nothing else, and in time
that grows no faster than the text. A parser without a property test is found.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.core import documents
from dshealthd.core.options import Errors

ROOT = Path(__file__).parent.parent
WORDS = [
    *("0", "1", "-1", "18446744073709551616", "nan", "inf", "1e999", "0x", ":", "::", "/", ","),
    *(";", "=", "-", ".", "..", "[", "]", "{", "}", "(", ")", "#", "%", "@", "é", "1:", "cpu"),
    *("cpu0", "btime", "some", "avg10", "total", "MemTotal:", "kB", "Inter-|", "Tcp:", "sl"),
    *(":0050", "0100007F", "PRETTY_NAME", "Package:", "Status:", "install", "Version:"),
    *("socket:[", "+--", "LOCAL", "32", "host", "eth0:", "Max", "Limit", "unlimited", "Uid:"),
    *("nan%", "slots=", "null", "true", "29500-29600"),
    # A number that no float holds, one that Python does not convert, dates that no zone has.
    *("1" + "0" * 400, "9" * 5000, "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"),
    # Separators of other kinds and digits of other scripts, which Python takes for blanks and
    # digits.
    *("\x1d", "\x85", "\u2028", "\xa0", "\u0663", "\u00b2"),
]
PIECES = st.sampled_from([*WORDS, '"', "'", "\\", "\n", "\t", "\r", "\0", "\x1b"])
TEXT = st.lists(st.one_of(PIECES, st.text(max_size=6)), max_size=40).map(" ".join)
LINES = st.lists(TEXT, max_size=8).map("\n".join)
BYTES = st.one_of(
    st.binary(max_size=400), LINES.map(lambda text: text.encode(errors="surrogatepass"))
)
DOCUMENTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
ANSWERS = st.dictionaries(
    st.text(max_size=8) | st.sampled_from(["findings", "verdict", "state"]), DOCUMENTS, max_size=4
)


def module(name: str) -> Any:
    """Return a module of ours."""
    return importlib.import_module(f"dshealthd.{name}")


def encoded(document: Any) -> bytes:
    """Return a document as it is sent."""
    return json.dumps(document).encode()


def plain(name: str, function: str, more: Sequence[Any]) -> Callable[[Any], object]:
    """Return a call of a parser that takes the text as it is, and perhaps `more`."""

    def call(text: Any) -> object:
        found = getattr(module(name), function)(text, *more)
        return list(found) if hasattr(found, "__next__") else found

    return call


def _but_no_shape(parser: Callable[..., object], *arguments: Any) -> object:
    """Call a parser that says so by any error over a shape, which its callers take."""
    try:
        return parser(*arguments)
    except documents.MISSHAPEN as error:
        raise ValueError(str(error)) from error


HERE: dict[tuple[str, str], tuple[Callable[[Any], object], st.SearchStrategy[Any]]] = {
    (name, function): (plain(name, function, more), strategy)
    for name, function, strategy, *more in (
        ("collectors.disk", "parse_diskstats", LINES),
        ("collectors.job_activity", "parse_io", BYTES),
        ("collectors.job_activity", "parse_interfaces", BYTES),
        ("collectors.kernel", "parse_cpus", LINES),
        ("collectors.kernel", "parse_loadavg", LINES),
        ("collectors.memory", "parse_arcstats", LINES),
        ("collectors.memory", "parse_meminfo", LINES),
        ("collectors.memory", "parse_oom_kills", LINES),
        ("collectors.network", "parse_columns", LINES),
        ("collectors.network", "parse_net_dev", LINES),
        ("collectors.open_files", "parse_file_nr", LINES),
        ("collectors.pressure", "parse_pressure", LINES),
        ("collectors.rendezvous", "parse_ports", TEXT),
        ("collectors.software", "parse_command_line", TEXT),
        ("collectors.software", "parse_configuration", LINES),
        ("collectors.software", "parse_os_release", LINES),
        ("linux.local_network", "parse_range", TEXT),
        ("linux.local_network", "parse_reserved", TEXT),
        ("linux.local_network", "parse_routes", LINES),
        ("evidence.bundle", "parse_name", TEXT),
        ("evidence.summary", "parse", LINES),
        ("evidence.stacks", "parse", BYTES),
        ("linux.activity", "parse_activity", BYTES),
        ("linux.mounts", "parse_fuse", BYTES),
        ("linux.starvation", "parse_run_queue", BYTES),
        ("jobs.installation", "parse_assignments", LINES),
        ("jobs.installation", "parse_settings", LINES),
        ("jobs.installation", "parse_distributions", st.lists(TEXT)),
        ("jobs.loaded", "parse_maps", BYTES),
        ("jobs.nccl.inspector", "parse", LINES),
        ("jobs.nccl.release", "parse_maps", BYTES),
        ("jobs.nccl.settings", "parse_selection", TEXT),
        ("jobs.nccl.settings", "parse_configuration", BYTES),
        ("jobs.network_devices", "parse_names", LINES),
        ("jobs.environment", "parse_environ", BYTES),
        ("jobs.ras.address", "parse_address", TEXT),
        ("linux.ipv6", "parse_bound", LINES),
        ("jobs.ras.from_json", "parse_json", BYTES),
        ("linux.pids_cgroup", "parse_pids_path", LINES),
        ("linux.credentials", "parse_real_user", BYTES),
        ("linux.credentials", "parse_user", BYTES),
        ("linux.imex", "parse_nodes", LINES),
        ("linux.imex", "parse_settings", LINES),
        ("linux.infiniband", "parse_rate", BYTES),
        ("linux.infiniband", "parse_state", BYTES),
        ("linux.kmsg", "parse", BYTES),
        ("linux.mounts", "parse_mountinfo", LINES),
        ("doctor.job.sources.deepspeed_config", "parse", LINES | DOCUMENTS.map(json.dumps)),
        ("doctor.options", "parse_accepted", LINES),
        ("http.document", "parse", ANSWERS.map(encoded)),
        ("http.document", "parse_history", DOCUMENTS.map(encoded)),
        ("linux.process", "parse_stat", BYTES),
        ("maintenance.file", "parse", LINES | DOCUMENTS.map(json.dumps)),
        ("linux.process_limits", "parse_limits", BYTES),
        ("linux.process_limits", "parse_locked", BYTES),
        ("linux.sock_diag", "parse", st.binary(max_size=200), 1),
        ("linux.tcp_tables", "parse_end", TEXT),
        ("linux.socket_owners", "parse_inode", TEXT),
        ("linux.tcp_sockets", "parse_sockstat", LINES),
        ("linux.tcp_tables", "parse_tcp", LINES),
        ("probe.members.membership", "parse_hostfile", LINES, "file"),
        ("probe.members.membership", "parse_nodes", st.lists(TEXT)),
        ("probe.members.topology", "parse", LINES, "file"),
        ("probe.peers.credentials", "parse_keys", BYTES),
        ("probe.peers.protocol", "parse_challenge", BYTES),
        ("training.message", "decode", BYTES),
        ("training.message", "newest_message", BYTES),
        ("web.hostnames", "parse_domains", LINES),
    )
}
HERE |= {
    ("doctor.node.gpu_direct", "parse_acs"): (
        lambda data: module("doctor.node.gpu_direct").parse_acs(((data or b"0") * 4096)[:4096]),
        BYTES,
    ),
    ("doctor.report", "parse_node"): (
        lambda document: _but_no_shape(module("doctor.report").parse_node, document, "node-1"),
        DOCUMENTS,
    ),
    ("doctor.job.sources.launcher_command", "parse"): (
        lambda text: module("doctor.job.sources.launcher_command").parse(
            ["srun", "bash", "-c", f"torchrun {text}"], {"A": "1"}
        ),
        LINES,
    ),
    ("doctor.job.sources.slurm_script", "parse"): (
        lambda text: module("doctor.job.sources.slurm_script").parse(
            f"#!/bin/sh\n#SBATCH {text}\nexport A={text}\ndeepspeed {text}"
        ),
        LINES,
    ),
    ("doctor.job.sources.manifest", "parse"): (
        lambda document: [
            [
                pod.command
                for pod in module("doctor.job.sources.manifest")
                .from_json(module("doctor.job.sources.manifest").parse(text))
                .pods
            ]
            for text in (json.dumps(document), json.dumps({"kind": "Pod", "spec": document}))
        ],
        DOCUMENTS,
    ),
    ("slurm.controller", "parse_nodes"): (
        lambda text: module("slurm.controller").parse_nodes(text.replace(" ", "\x1f"), "\x1f"),
        LINES,
    ),
    ("web.config_file", "from_document"): (
        lambda document: module("web.config_file").from_document(document, "file", Errors()),
        DOCUMENTS,
    ),
}
REFUSALS: dict[tuple[str, str], tuple[str, str]] = {
    ("probe.members.membership", "parse_hostfile"): ("probe.members.hostlist", "MembershipError"),
    ("probe.members.membership", "parse_nodes"): ("probe.members.hostlist", "MembershipError"),
    ("probe.members.topology", "parse"): ("probe.members.hostlist", "MembershipError"),
    ("slurm.controller", "parse_nodes"): ("slurm.controller", "ControllerError"),
}
"""Errors of their own, which their callers take."""
OURS = {
    ("core.exposition", "parse_selectors"): "files of this repository",
    ("symptoms.entry", "parse"): "files of this repository",
    ("explain.patterns", "parse"): "files of this repository",
    ("doctor.job.arguments", "parse"): "the user's own arguments",
    ("probe.cli.command", "parse_steps"): "the administrator's own arguments",
}
"""Parsers of what nobody else writes."""


def parsers() -> set[tuple[str, str]]:
    """Return module and name of each parser that the product has, by its name."""
    found = set()
    for file in (ROOT / "dshealthd").rglob("*.py"):
        name = ".".join(file.relative_to(ROOT / "dshealthd").with_suffix("").parts)
        text = file.read_text(encoding="utf-8")
        found |= {(name, one) for one in re.findall(r"^def (parse(?:_\w+)?)\(", text, re.MULTILINE)}
    return found


def test_no_parser_is_without_a_property() -> None:
    """One that is new is added to the table here, or to those of our own files."""
    assert parsers() - HERE.keys() - OURS.keys() == set()
    assert OURS.keys() <= parsers()


def refused(place: tuple[str, str]) -> tuple[type[Exception], ...]:
    """Return the errors by which a parser refuses a text."""
    own = REFUSALS.get(place)
    return (ValueError, getattr(module(own[0]), own[1])) if own else (ValueError,)


@pytest.mark.parametrize("place", sorted(HERE), ids=".".join)
def test_parser(place: tuple[str, str]) -> None:
    """Whatever it is given, it returns or refuses."""
    call, strategy = HERE[place]

    @settings(max_examples=15)
    @given(strategy)
    def refuses(text: Any) -> None:
        try:
            call(text)
        except refused(place) as error:
            json.dumps(str(error))

    refuses()


MUCH = (
    "9" * 5000,
    "1" + "0" * 400,
    "1e999",
    "[" * 20_000,
    '{"a":' * 20_000,
    "a=" * 20_000,
    "x:1\n" * 20_000,
    "\x1d\x85\u2028" * 5_000,
)


@pytest.mark.parametrize(
    "place",
    sorted(place for place, (_, kind) in HERE.items() if kind in (BYTES, LINES, TEXT)),
    ids=".".join,
)
def test_parser_of_much(place: tuple[str, str]) -> None:
    """What is large, deep or long is refused as well, or read."""
    call, strategy = HERE[place]
    for text in MUCH:
        with contextlib.suppress(*refused(place)):
            call(text.encode() if strategy is BYTES else text)
