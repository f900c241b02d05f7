"""The address that the host name resolves to: where gloo and torchrun listen."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.host import read
from dshealthd.core.sockets import name_is_unknown
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.findings.finding import State
from dshealthd.linux.local_network import container_networks

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

ALONE = "fine for single-node jobs"


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _here(address: str) -> bool:
    """Return whether an interface of this node has the address, by binding to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _remedy(context: NodeContext, name: str) -> str:
    """Return the command that gives a name the node's address instead of Debian's 127.0.1.1.

    Where another line or DNS names it, the command only shows that: the line may be localhost's.
    """
    word = rf"(\s(.*\s)?{re.escape(name)}(\s|\.|$))"
    hosts = read(context.host.root("/etc/hosts"))
    if not re.search(rf"^127\.0\.1\.1{word}", hosts, re.MULTILINE):
        return f"getent ahosts {name}; grep -n '^127' /etc/hosts; hostname -I"
    address = "$(hostname -I | cut -d' ' -f1)"
    return f'sudo sed -i.old -E "s/^127\\.0\\.1\\.1{word}/{address}\\1/" /etc/hosts'


def _run(context: NodeContext) -> Iterator[Result]:
    name = socket.gethostname()
    outcome = State.WARNING if context.several else State.OK
    try:
        addresses = _resolve(name)
    except socket.gaierror as error:
        if not name_is_unknown(error):
            yield unknown(
                f"no name server answered for the host name {name}: {error.strerror}",
                remedy=f"getent ahosts {name}; cat /etc/resolv.conf",
                component=name,
            )
            return
        yield warning(
            f"the host name {name} does not resolve: {error.strerror}",
            remedy=f"echo \"$(hostname -I | cut -d' ' -f1) {name}\" | sudo tee -a /etc/hosts",
            component=name,
        )
        return
    shown = ", ".join(addresses)
    parsed = [ipaddress.ip_address(address) for address in addresses]
    if all(address.is_loopback for address in parsed):
        yield Result(
            outcome,
            f"the host name {name} resolves to {shown}: in a multi-node job, gloo and torchrun "
            f"would listen on the loopback interface{'' if context.several else '; ' + ALONE}",
            remedy=_remedy(context, name) if context.several else "",
            component=name,
        )
        return
    networks = container_networks(context.host)
    usable = [address for address in parsed if not address.is_loopback]
    behind = [
        address
        for address in usable
        if isinstance(address, ipaddress.IPv4Address)
        and any(address in network for network in networks)
    ]
    if behind:
        yield Result(
            outcome,
            f"the host name {name} resolves to {behind[0]}, a container bridge of this node that "
            f"other nodes cannot reach{'' if context.several else '; ' + ALONE}",
            remedy="export MASTER_ADDR=$(hostname -I | cut -d' ' -f1)" if context.several else "",
            component=name,
        )
    elif not any(_here(str(address)) for address in usable):
        yield warning(
            f"the host name {name} resolves to {shown}, but no interface of this node has it",
            remedy=f"getent hosts {name}; ip -br addr",
            component=name,
        )
    else:
        yield ok(f"the host name {name} resolves to {shown}, an address of this node")


HOST_NAME: Check[NodeContext] = Check(
    "container-address", "host-name", "The host name resolves to an address of this node", _run
)
