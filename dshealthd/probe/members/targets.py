"""Targets for Prometheus: the probed nodes in its format for file and HTTP service discovery."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dshealthd.config.flags import EXIT_FAILURE
from dshealthd.core import documents, state_file
from dshealthd.core.options import COMMAND_LINE, ConfigError
from dshealthd.core.sockets import listen_address
from dshealthd.core.text import print_lines
from dshealthd.probe.members.hostlist import MembershipError, numeric
from dshealthd.probe.members.membership import Membership, load
from dshealthd.probe.options import MembershipOptions, ProbeOptions

if TYPE_CHECKING:
    from dshealthd.config.config import Config


def document(membership: Membership, port: int) -> bytes:
    """Return every member at `port`, with the labels `node` and, where it is known, `leaf`."""
    groups = []
    for name in membership.names:
        leaf = membership.leaves.get(name, "")
        labels = {"node": name, "leaf": leaf} if leaf else {"node": name}
        groups.append(documents.dumps({"targets": [_address(name, port)], "labels": labels}))
    lines = ",\n".join(groups)
    return f"[\n{lines}\n]\n".encode()


def addresses(loaded: Config) -> list[str]:
    """Return the configured members as `HOST:PORT`. Raise MembershipError or OSError."""
    port = listen_address(loaded.web.listen_address)[1]
    return [_address(name, port) for name in load(loaded.section(ProbeOptions).members).names]


def _address(name: str, port: int) -> str:
    is_bare = isinstance(numeric(name), ipaddress.IPv6Address)
    return f"[{name}]:{port}" if is_bare else f"{name}:{port}"


def targets(loaded: Config, hostfile: str | None, output: str | None) -> int:
    """Print the targets, or replace a file; it stays as it is if the members are unknown. Raises
    ConfigError if nothing says who they are.
    """
    options = loaded.section(ProbeOptions).members
    if hostfile is not None:
        options = MembershipOptions(hostfile=Path(hostfile))
    elif not options.sources:
        raise ConfigError(COMMAND_LINE, ["--hostfile: give one, or set probe.members"])
    try:
        text = document(load(options), listen_address(loaded.web.listen_address)[1])
        if output is None:
            sys.stdout.write(text.decode())
        else:
            state_file.replace(output, text, durable=True)
    except MembershipError as error:
        print_lines(error, error=True)
        return EXIT_FAILURE
    except OSError as error:  # names the file beside it, which is renamed
        print_lines(f"--output: {output}: {error.strerror or error}", error=True)
        return EXIT_FAILURE
    return 0
