"""The configuration: a typed TOML file, with all errors reported at once.

Flags override the file, which overrides the defaults.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from dshealthd.config import registry
from dshealthd.core.collector import CollectorOptions
from dshealthd.core.host import Host, read_named
from dshealthd.core.options import (
    COMMAND_LINE,
    ConfigError,
    Duration,
    Errors,
    Section,
    decode,
    join,
    option,
    unknown,
)
from dshealthd.core.sockets import listen_address

S = TypeVar("S", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Web:
    """Address and limits of the web server."""

    listen_address: str = option(
        ":10061",
        'Address to serve on: "HOST:PORT", ":PORT" for all addresses, "[IPv6]:PORT".',
        form="HOST:PORT",
    )
    config_file: Path | None = option(
        None,
        "File with TLS and basic authentication, in the format of Prometheus' "
        "exporter-toolkit; reloaded when it changes.",
        form="FILE",
    )
    hostnames: tuple[str, ...] = option(
        [],
        "Additional host names that browsers may use, such as a proxy's; the node's own name "
        "and addresses are always allowed.",
    )
    max_connections: int = option(
        128, "Maximum number of connections; new ones replace idle ones.", minimum=1
    )
    max_connections_per_address: int = option(
        8, "Maximum number of connections per client address.", minimum=1
    )
    header_timeout: Duration = option("5s", "Header read timeout.", minimum="100ms")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of `web` with unusable values, each with the reason."""
        try:
            listen_address(self.listen_address)
        except (ValueError, ArithmeticError) as error:
            yield "listen_address", str(error)


@dataclass(frozen=True, kw_only=True)
class Paths(Host):
    """Mount points of the host's file systems, and the agent's state directory."""

    state: Path = option(
        Path(os.environ.get("STATE_DIRECTORY", "/var/lib/dshealthd")),
        "Directory for state that survives a restart, such as baselines. Defaults to systemd's "
        "$STATE_DIRECTORY, if set.",
    )

    @property
    def host(self) -> Host:
        """Only the configured roots of `/proc`, `/sys` and the like."""
        return Host(procfs=self.procfs, sysfs=self.sysfs, dev=self.dev, rootfs=self.rootfs)


@dataclass(frozen=True, kw_only=True)
class Log:
    """The agent's log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Minimum log level.", aliases={"warn": "warning"}
    )
    format: Literal["logfmt", "json"] = option("logfmt", "Log format.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration."""

    web: Web = field(default_factory=Web)
    path: Paths = field(default_factory=Paths)
    log: Log = field(default_factory=Log)
    sections: Mapping[type[Section], Section] = field(default_factory=dict)
    """What packages declare; `section` reads them."""
    collectors: Mapping[str, CollectorOptions] = field(default_factory=dict)

    def section(self, schema: type[S]) -> S:
        """Return the section that a package declares by this class, with its defaults if unset."""
        found = self.sections.get(schema)
        return found if isinstance(found, schema) else schema()

    def with_section(self, section: Section) -> Config:
        """Return the same configuration with another section in the place of its own."""
        return dataclasses.replace(self, sections={**self.sections, type(section): section})


OWN: Mapping[str, type[Any]] = {"web": Web, "path": Paths, "log": Log}
SECTIONS: Mapping[str, type[Any]] = {**OWN, **registry.sections()}
"""The sections besides `collectors`: those declared here, then those of packages.

Each of their options is also a flag, `--section.option-name`, except those in nested tables.
"""


def load(file: Path | None, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Return the configuration from a file and flags; flags are tables by section, and win.

    Raise ConfigError with all errors.
    """
    config, wrong = usable(file, flags)
    if wrong is not None:
        raise wrong
    return config


def usable(
    file: Path | None, flags: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Config, ConfigError | None]:
    """Return what can be used of a file, with defaults for what is wrong in it, and its errors.

    Raise ConfigError for flags that are wrong.
    """
    try:
        document, errors = _document(file), Errors()
    except ConfigError as error:
        return load(None, flags), error
    for section, values in (flags or {}).items():
        table = document.setdefault(section, {})
        if isinstance(table, dict):
            table.update(values)
    config = from_document(document, errors)
    typed = {join(section, name) for section, values in (flags or {}).items() for name in values}
    of_flags = [error for error in errors if file is None or error.partition(": ")[0] in typed]
    of_file = [error for error in errors if error not in of_flags]
    wrong = ConfigError(str(file), of_file) if of_file else None
    if of_flags:
        raise ConfigError(COMMAND_LINE, of_flags) from wrong
    return config, wrong


def _document(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(read_named(file).decode())
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ConfigError(str(file), [reason]) from error
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError(str(file), [reason]) from error
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ConfigError(str(file), [f"is not TOML: {error}"]) from error


def from_document(document: Mapping[str, Any], errors: Errors) -> Config:
    """Return the configuration in a parsed TOML document; mistakes are added to `errors`."""
    for name in document:
        if name not in SECTIONS and name != "collectors":
            errors.add(join("", name), unknown(name, [*SECTIONS, "collectors"]))
    sections = {
        name: decode(schema, document.get(name, {}), name, errors)
        for name, schema in SECTIONS.items()
    }
    tables = document.get("collectors", {})
    if not isinstance(tables, dict):
        errors.add("collectors", "must be a table with one table for each collector")
        tables = {}
    known = registry.all_collectors()
    for name in tables:
        if name not in known:
            errors.add(join("collectors", name), unknown(name, known))
    collectors = {
        name: decode(kind.Options, tables.get(name, {}), f"collectors.{name}", errors)
        for name, kind in known.items()
    }
    return Config(
        **{name: sections.pop(name) for name in OWN},
        sections={type(section): section for section in sections.values()},
        collectors=collectors,
    )


def restart_needed(old: Config, new: Config) -> list[str]:
    """Return the configuration keys that changed and take effect only after a restart."""
    return [
        join(section, field.name)
        for section in OWN
        for field in dataclasses.fields(SECTIONS[section])
        if (section != "path" or field.name == "state")
        and getattr(getattr(old, section), field.name) != getattr(getattr(new, section), field.name)
    ]
