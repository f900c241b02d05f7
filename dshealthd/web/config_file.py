"""The web config file, in the exporter-toolkit's format: users, headers, TLS.

TLS, basic authentication and response headers, in YAML; reloaded when it changes.

A key is supported only if this server does exactly what the exporter-toolkit does; any other key is
refused, so that a file never promises protection that does not exist.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core import background, documents
from dshealthd.core.child import StartError
from dshealthd.core.host import Signature, read_named, signatures
from dshealthd.core.options import ConfigError, Errors, unknown
from dshealthd.http import tls
from dshealthd.web import auth

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

SECTIONS = ("tls_server_config", "http_server_config", "basic_auth_users")
UNSUPPORTED = {
    "rate_limit": (
        "not supported; web.max_connections and web.max_connections_per_address limit "
        "clients instead"
    )
}
HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""Headers that may be set, each with its allowed values where they are limited."""
CHECK_INTERVAL = 1.0
"""Seconds between checks of the files for changes."""
CHECK_PATIENCE = 0.5
"""Seconds that a client waits for a check of the files.

A hung file system costs that once.
"""

THREAD = "web config file"


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The contents of a web config file."""

    users: Mapping[str, str]
    """Hashes by name; empty if no authentication is required."""
    headers: Mapping[str, str]
    """Headers of every answer; an empty value removes the server's own header of that name."""
    tls: tls.Tls | None
    files: tuple[str, ...]
    """Paths of the file itself and of the files it names."""


def read(path: Path, errors: Errors) -> WebConfig:
    """Return the contents of the web config file; mistakes are added to `errors`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reports duplicate keys; YAML forbids them, but PyYAML lets the last one win."""

        def construct_mapping(
            self,
            node: yaml.MappingNode,
            deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML's own
        ) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    errors.add(
                        key.value,
                        f"is given twice, the second time on line {key.start_mark.line + 1}",
                    )
                elif isinstance(key, yaml.ScalarNode):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    document: Any = None
    try:
        document = Loader(read_named(path).decode()).get_single_data()
    except OSError as error:
        errors.append(f"cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        errors.append(f"is not UTF-8: {error.reason} at byte {error.start}")
    except (yaml.YAMLError, *documents.MISSHAPEN) as error:  # a tag that its value does not fit
        errors.append(f"is not YAML: {' '.join(str(error).split())}")
    return from_document({} if document is None else document, str(path), errors)


def from_document(document: Any, path: str, errors: Errors) -> WebConfig:
    """Return the web configuration in a parsed file; mistakes are added to `errors`."""
    if not isinstance(document, dict):
        errors.append("must be a mapping at its top level")
        document = {}
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, table in document.items():
        if name in UNSUPPORTED:
            errors.add(name, UNSUPPORTED[name])
        elif name not in SECTIONS:
            errors.add(str(name), unknown(str(name), SECTIONS))
        elif isinstance(table, dict):
            sections[name] = table
        elif table is not None:
            errors.add(name, "must be a mapping")
    directory = os.path.dirname(path)
    table = sections["tls_server_config"]
    return WebConfig(
        users=_users(sections["basic_auth_users"], errors),
        headers=_headers(sections["http_server_config"], errors),
        tls=tls.build(table, directory, "tls_server_config", errors) if table else None,
        files=(path, *tls.files(table, directory).values()),
    )


def _users(table: dict[str, Any], errors: Errors) -> dict[str, str]:
    users = {}
    for name, hash in table.items():
        key = f"basic_auth_users.{name}"
        if not isinstance(name, str) or not isinstance(hash, str):
            errors.add(key, "name and hash must be strings; quote a value that looks like a number")
        elif ":" in name:
            errors.add(key, "a name with a colon cannot be sent")
        elif (problem := auth.problem(hash)) is not None:
            errors.add(key, problem)
        else:
            users[name] = hash
    return users


def _headers(table: dict[str, Any], errors: Errors) -> dict[str, str]:
    for name, value in table.items():
        if name not in {"http2", "headers"}:
            errors.add(f"http_server_config.{name}", unknown(str(name), ("http2", "headers")))
        elif name == "http2" and value is not False:
            errors.add(
                "http_server_config.http2", "not supported; leave the key out, or set it to false"
            )
    given = table.get("headers")
    if given is None:
        return {}
    if not isinstance(given, dict):
        errors.add("http_server_config.headers", "must be a mapping")
        return {}
    headers = {}
    for name, value in given.items():
        key = f"http_server_config.headers.{name}"
        if name not in HEADERS:
            errors.add(key, f"cannot be set; only {', '.join(HEADERS)} can")
        elif not isinstance(value, str) or not value.isprintable() or not value.isascii():
            errors.add(key, "must be a string of printable ASCII characters")
        elif HEADERS[name] and value not in HEADERS[name]:
            errors.add(key, f'"{value}" is not one of {", ".join(HEADERS[name])}')
        else:
            headers[name] = value
    return headers


def _loosened(before: WebConfig, after: WebConfig) -> list[str]:
    """Return the protections that a change to the web config file removes.

    The file may be half-written, so removing a protection needs a restart.
    """
    taken = []
    if before.users and not after.users:
        taken.append("basic_auth_users: removing the last user needs a restart")
    if before.tls is not None and after.tls is None:
        taken.append("tls_server_config: turning TLS off needs a restart")
    elif before.tls is not None and after.tls is not None and after.tls.loosens(before.tls):
        taken.append("tls_server_config: relaxing client certificate checks needs a restart")
    return taken


class WebConfigFile:
    """The web config file in force. If a change is invalid, the previous contents stay in force."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Read the file, or raise ConfigError."""
        self._path = path
        self._monotonic = monotonic
        errors = Errors()
        self.config, self._signature = _read(path, errors)
        if errors:
            raise ConfigError(str(path), errors)
        self._watched = self.config.files
        self._checked = monotonic()
        self._check: asyncio.Task[None] | None = None
        self._overdue: asyncio.Task[None] | None = None
        self.ok = True
        """Whether the last read was valid."""
        self.failures = 0
        """Number of reads that were not valid."""

    async def current(self) -> WebConfig:
        """Return the web configuration in force, after a check for changed files.

        Does not wait for a hung file system.
        """
        if self._check is None and self._monotonic() - self._checked >= CHECK_INTERVAL:
            self._check = asyncio.create_task(self._refresh(), name="web config file")
        check = self._check
        if check is not None and check is not self._overdue:
            _, pending = await asyncio.wait({check}, timeout=CHECK_PATIENCE)
            if pending:
                self._overdue = check
        return self.config

    async def _refresh(self) -> None:
        try:
            look = functools.partial(signatures, self._watched)
            if await background.call(look, THREAD, None) == self._signature:
                return
            errors = Errors()
            again = functools.partial(_read, self._path, errors)
            config, self._signature = await background.call(again, THREAD, None)
            self._watched = config.files
            for loss in _loosened(self.config, config):
                errors.append(loss)
            self.ok = not errors
            if self.ok:
                self.config = config
                log.info("%s: reloaded", self._path)
            else:
                self.failures += 1
                log.error(
                    "web config file not used, keeping the previous one:\n%s",
                    ConfigError(str(self._path), errors),
                )
        except StartError as error:  # retried after CHECK_INTERVAL
            log.warning("%s; keeping the previous one", error)
        finally:
            self._checked = self._monotonic()
            self._check = None


def _read(path: Path, errors: Errors) -> tuple[WebConfig, tuple[Signature | None, ...]]:
    """Read the web config file, and the signatures of its files from before they were read.

    A half-written file is thus read again.
    """
    files: tuple[str, ...] = (str(path),)
    while True:
        before = signatures(files)
        errors.clear()
        config = read(path, errors)
        if config.files == files:
            return config, before
        files = config.files
