"""Queries this node's agent for its findings over HTTP, for Slurm's hooks."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core.address import listen_address
from dshealthd.http.client import Access
from dshealthd.http.local_agent import Impostor, deadline, identify
from dshealthd.nvrx.fitness import OF_THE_AGENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dshealthd.config import Config
    from dshealthd.slurm.options import SlurmOptions

SCHEMA = 1
"""Supported version of the findings, see docs/status-api.md: any other drains no node."""
TIMEOUT = 1.5
"""Seconds for the agent to answer, which `deadline` enforces for the whole call."""
XID_RECENT = 600.0
"""Seconds for which an Xid belongs to a finding of its GPU, as in the alerts."""
_LARGEST = 16 << 20
"""Most bytes of a status document to read; a node with 16 GPUs has some 0.5 MB."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:/-]+")


class AgentSilent(Exception):
    """The agent is dead, hung, absent, or not the genuine one: nothing is known."""


@dataclass(frozen=True, slots=True)
class CriticalFinding:
    """A critical finding."""

    slug: str
    alert: str
    part: str
    """`gpu=3`, `nic=mlx5_0/1`; empty for the node as a whole."""
    xid: str
    """Number of the last Xid that the driver logged for the GPU; empty without one."""

    @property
    def reason(self) -> str:
        """Return the agent's finding in the form of Slurm's reason: `gpu-lost gpu=3 xid=79`."""
        xid = f"xid={self.xid}" if self.xid else ""
        return " ".join(filter(None, (self.slug, self.part, xid)))


@dataclass(frozen=True, slots=True)
class AgentVerdict:
    """The agent's verdict on the node."""

    findings: tuple[CriticalFinding, ...]
    """The critical findings."""
    clean: bool
    """Whether everything could be checked and nothing is critical."""


def ask(config: Config, alerts: Iterable[str]) -> AgentVerdict:
    """Return the verdict of this machine's agent for these alerts. Raises AgentSilent.

    Only an agent of root, of this process's user or of the user `dshealthd` is trusted: the port is
    not privileged, and if no agent runs any user can listen on it.
    """
    secure = config.web.config_file is not None and _serves_tls(config)
    headers = _headers(config.slurm)
    host, port = listen_address(config.web.listen_address)
    address = _reachable(host)
    connection: http.client.HTTPConnection
    if secure:
        connection = http.client.HTTPSConnection(
            address, port, timeout=TIMEOUT, context=_tls(config.slurm)
        )
    else:
        connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT)
    try:
        with deadline(TIMEOUT):
            connection.connect()
            identify(connection.sock, TIMEOUT)  # first: only the genuine agent gets a password
            connection.request("GET", "/api/v1/status", headers=headers)
            answer = connection.getresponse()
            body = answer.read(_LARGEST)
    except Impostor as error:
        raise AgentSilent(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        message = f"the agent on {address}:{port} does not answer: {error or type(error).__name__}"
        raise AgentSilent(message) from error
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        what = "rejects" if config.slurm.user else "requires a password (401): set"
        message = f"the agent on {address}:{port} {what} slurm.user and slurm.password_file"
        raise AgentSilent(message)
    if answer.status != http.client.OK:
        message = f"the agent on {address}:{port} answered {answer.status} {answer.reason}"
        raise AgentSilent(message)
    try:
        return parse(json.loads(body), frozenset(alerts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the agent on {address}:{port} sent a document that cannot be parsed: {error!r}"
        raise AgentSilent(message) from error


def parse(document: dict[str, Any], alerts: frozenset[str]) -> AgentVerdict:
    """Return the verdict in the agent's status document. Raises ValueError, KeyError or TypeError
    for anything else.
    """
    if document["schema"] != SCHEMA:
        message = f"schema {document['schema']!r} is not {SCHEMA}"
        raise ValueError(message)
    critical = []
    for item in document["findings"]:
        asked = item["severity"] == "critical" and item["alert"] in alerts
        # A GPU that the agent is not allowed or able to read may be healthy.
        if asked and item.get("reason") not in OF_THE_AGENT:
            part = _part(item["component"], item["part"])
            xid = _xid(document, part.removeprefix("gpu=")) if part.startswith("gpu=") else ""
            critical.append(
                CriticalFinding(
                    _word(item["slug"], 40), _word(item["alert"], 60), part, _word(xid, 5)
                )
            )
    clean = not critical and document["verdict"] in {"ok", "warning"}
    return AgentVerdict(tuple(critical), clean)


def _part(component: str, part: str) -> str:
    """Return a part in the form of Slurm's reason, `gpu=3` for `GPU 3`; text from elsewhere is
    reduced to harmless characters.
    """
    words = part.split()
    if not words or component == "node":
        return ""
    return f"{_word(component, 10)}={_word(words[-1], 40)}"


def _xid(document: dict[str, Any], gpu: str) -> str:
    """Return a GPU's last Xid from the agent's answer, if it is recent."""
    family = document.get("metrics", {}).get("dshealthd_xid_last_timestamp_seconds", {})
    logged = [
        (float(sample["value"]), str(sample["labels"]["xid"]))
        for sample in family.get("samples", ())
        if sample["labels"].get("gpu") == gpu
    ]
    at, xid = max(logged, default=(0.0, ""))
    return xid if document["time"] - at < XID_RECENT else ""


def _word(text: str, most: int) -> str:
    return _UNSAFE.sub("_", text)[:most]


def _headers(options: SlurmOptions) -> dict[str, str]:
    """Return the headers of the Slurm hooks' request to the agent.

    Raises AgentSilent if the file of `slurm.password_file` cannot be read.
    """
    access = Access(user=options.user, password_file=options.password_file)
    try:
        return {"Accept": "application/json", **access.headers()}
    except (OSError, ValueError) as error:
        message = f"slurm.password_file cannot be read: {error}"
        raise AgentSilent(message) from error


def _tls(options: SlurmOptions) -> ssl.SSLContext:
    """Return the TLS context for the agent, with a client certificate if one is configured.

    The agent's certificate is not verified: the kernel says who answers, which is stronger proof.
    """
    context = ssl._create_unverified_context()  # noqa: S323, SLF001 - see above
    if options.cert_file is not None:
        try:
            context.load_cert_chain(options.cert_file, options.key_file)
        except OSError as error:  # ssl.SSLError is one
            message = f"slurm.cert_file and slurm.key_file cannot be used: {error}"
            raise AgentSilent(message) from error
    return context


def _serves_tls(config: Config) -> bool:
    """Tell whether the agent serves HTTPS. Raises AgentSilent if its web config is unreadable."""
    import yaml

    try:
        text = config.web.config_file.read_text(encoding="utf-8")  # type: ignore[union-attr] # is set
        return bool((yaml.safe_load(text) or {}).get("tls_server_config"))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        message = f"web.config_file cannot be read: {error}"
        raise AgentSilent(message) from error


def _reachable(host: str | None) -> str:
    """Return the address at which to reach the agent; loopback if it listens on all addresses."""
    if host is None:
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"  # noqa: PLR2004 - of the protocol
    return host
