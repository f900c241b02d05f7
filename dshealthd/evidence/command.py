"""`dshealthd evidence`: takes a bundle now, of a job that need not hang, with what the running agent knows of it."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from dshealthd.address import listen_address
from dshealthd.evidence import members
from dshealthd.evidence.bundle import SUMMARY
from dshealthd.evidence.findings import Case
from dshealthd.evidence.service import Evidence
from dshealthd.evidence.step import Step, run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.config import Config

EXIT_FAILURE = 1
TIMEOUT = 5.0
MAX_ANSWER = 32 << 20
_ANYWHERE = "0.0.0.0"  # noqa: S104 - where an agent listens that is told no address
_LOCAL = {_ANYWHERE: "127.0.0.1", "::": "::1"}


def evidence(loaded: Config, job: str | None) -> int:
    """Take evidence of one job of this node, or of all; print the summary, and where the rest is. Status 0 where a bundle was made."""
    (step,) = run(
        [functools.partial(Step, "ranks", functools.partial(members.find, host=loaded.path.host, job=job or ""), 10.0, 0, _nothing)], 1
    )
    if step.problem:
        print(f"the processes of this node cannot be looked at: {step.problem}", file=sys.stderr)
        return EXIT_FAILURE
    if not step.answer["ranks"]:
        print(_nobody(job, step.answer), file=sys.stderr)
        return EXIT_FAILURE
    if not loaded.path.state.is_dir():
        print(f"path.state: {loaded.path.state} is not a directory; --path.state names another place for the bundle", file=sys.stderr)
        return EXIT_FAILURE
    agent = _Agent(loaded)
    probes = agent.status().get("probe")
    if agent.problem:
        print(f"the agent is not asked: {agent.problem}; steps, metrics and rounds will be missing", file=sys.stderr)
    print(f"looking at {len(step.answer['ranks'])} ranks; this takes 10 to {loaded.evidence.deadline:.0f} s", file=sys.stderr)
    taker = Evidence(
        loaded.evidence,
        loaded.path.state,
        loaded.path.host,
        metrics=agent.metrics,
        probes=lambda: probes,
        monotonic=time.monotonic,
        wall=time.time,
    )
    taken = asyncio.run(taker.take(Case(job=job or "", reason="requested", always_ask=True)))
    if not taken.bundle:
        print(f"no evidence was taken, {taken.outcome}: {taken.detail}", file=sys.stderr)
        return EXIT_FAILURE
    place = taker.directory / taken.bundle
    try:
        print((place / SUMMARY).read_text(encoding="utf-8"))
    except OSError as error:
        print(f"{place / SUMMARY}: {error.strerror}", file=sys.stderr)
    print(f"{taken.outcome}: {place}")
    return 0


def _nobody(job: str | None, answer: Mapping[str, Any]) -> str:
    """Say that there is nothing to look at, and what there is instead."""
    lines = [f"no job {job} on this node" if job else "no training process on this node"]
    if answer["jobs"]:
        lines.append(f"there are: {', '.join(answer['jobs'])}")
    lines += [f"{count} processes could not be looked at: {reason}" for reason, count in answer["unseen"].items()]
    if os.geteuid() != 0:
        lines.append("run as root to see those of other users")
    return "; ".join(lines)


def _nothing(_name: str, _data: bytes) -> None:
    """Keep nothing: the step emits no file."""


class _Agent:
    """The agent of this node, asked over HTTP; what cannot be had is left out, and `problem` says why."""

    def __init__(self, loaded: Config) -> None:
        host, self._port = listen_address(loaded.web.listen_address)
        self._host = _LOCAL.get(host or _ANYWHERE, host or "")
        self.problem = "it asks for TLS or a password (web.config_file)" if loaded.web.config_file is not None else ""

    def metrics(self) -> str:
        """Return its exposition; nothing if it does not answer."""
        return self._get("/metrics").decode(errors="replace")

    def status(self) -> Mapping[str, Any]:
        """Return its status document; an empty one if it does not answer."""
        body = self._get("/api/v1/status")
        try:
            found = json.loads(body) if body else {}
        except ValueError as error:
            self.problem = f"it gave no JSON: {error}"
            return {}
        return found if isinstance(found, dict) else {}

    def _get(self, path: str) -> bytes:
        if self.problem:
            return b""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER)
        except (OSError, http.client.HTTPException) as error:
            self.problem = f"http://{self._host}:{self._port}{path}: {error}"
            return b""
        finally:
            connection.close()
        if answer.status != http.client.OK:
            self.problem = f"http://{self._host}:{self._port}{path}: {answer.status} {answer.reason}"
            return b""
        return body
