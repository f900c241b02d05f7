"""The configuration: what is accepted, and the exact message for what is not."""

from __future__ import annotations

import ast
import contextlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dshealthd.config import config, registry
from dshealthd.config.config import Config
from dshealthd.core.options import ConfigError, Errors
from dshealthd.core.sockets import listen_address
from dshealthd.probe.options import ProbeOptions
from dshealthd.slurm.options import SlurmOptions

BAD = {
    "[wbe]": "wbe: unknown key; did you mean web?",
    "[zzz]": (
        "zzz: unknown key; known are collectors, doctor, evidence, findings, log, nvrx, "
        "path, probe, slurm, web"
    ),
    "web = 1": "web: must be a table, not an integer (1)",
    "[web]\nlisten_adress = ':1'": "web.listen_adress: unknown key; did you mean listen_address?",
    "[web]\nlisten_address = 1": "web.listen_address: must be a string, not an integer (1)",
    "[web]\nlisten_address = 'x'": (
        'web.listen_address: "x" is not "HOST:PORT" or ":PORT" with a port from 0 to 65535'
    ),
    "[web]\nlisten_address = ':65536'": (
        'web.listen_address: ":65536" is not "HOST:PORT" or ":PORT" with a port from 0 to 65535'
    ),
    "[web]\nlisten_address = '::1:80'": (
        'web.listen_address: "::1:80": an IPv6 address is written in brackets'
    ),
    "[web]\nlisten_address = '[::g]:80'": 'web.listen_address: "::g" is not an IPv6 address',
    "[web]\nmax_connections = 0": "web.max_connections: must be at least 1, not 0",
    "[web]\nmax_connections = 1.5": "web.max_connections: must be an integer, not a float (1.5)",
    "[web]\nmax_connections = true": (
        "web.max_connections: must be an integer, not a boolean (true)"
    ),
    "[web]\nheader_timeout = 5": (
        'web.header_timeout: must be a duration such as "5s", not an integer (5)'
    ),
    "[web]\nheader_timeout = '5'": (
        'web.header_timeout: "5" is not a duration such as "250ms", "5s", "1m30s", "2h" or "30d"'
    ),
    "[web]\nheader_timeout = ''": (
        'web.header_timeout: "" is not a duration such as "250ms", "5s", "1m30s", "2h" or "30d"'
    ),
    "[log]\nlevel = 'loud'": 'log.level: "loud" is not one of "debug", "info", "warning", "error"',
    "[evidence]\nmax_bytes = '1 apple'": (
        'evidence.max_bytes: "1 apple" is not a size such as "512MiB", "1GB" or 65536'
    ),
    "[evidence]\nmax_bytes = 1.5": (
        'evidence.max_bytes: must be a size such as "512MiB" or an integer, not a float (1.5)'
    ),
    "[evidence]\nmax_bytes = '1KB'": "evidence.max_bytes: must be at least 1MiB, not 1000",
    "[path]\nprocfs = ['/proc']": "path.procfs: must be a string with a path, not an array",
    **{
        f"[{section}]\n{name} = ''": f'{section}.{name}: "" is not a path'
        for section, name in (("path", "state"), ("web", "config_file"))
    },
    '[path]\nstate = "a\\u0000b"': 'path.state: "a\0b" is not a path',
    **{
        f"[slurm]\nbudget_ratio = {value}": f"slurm.budget_ratio: {value} is not a finite number"
        for value in ("nan", "inf", "-inf")
    },
    "[findings.limits]\ngradient_norm_ratio = nan": (
        "findings.limits.gradient_norm_ratio: nan is not a finite number"
    ),
    "collectors = 'all'": "collectors: must be a table with one table for each collector",
    "[collectors]\nmemory = false": "collectors.memory: must be a table, not a boolean (false)",
    "[collectors.memroy]": "collectors.memroy: unknown key; did you mean memory?",
    "[collectors.'a b']": (
        f'collectors."a b": unknown key; known are {", ".join(sorted(registry.all_collectors()))}'
    ),
    "[collectors.memory]\ninterval = '1ms'": (
        "collectors.memory.interval: must be at least 100ms, not 1ms"
    ),
    "[collectors.memory]\nenabled = 'yes'": (
        "collectors.memory.enabled: must be true or false, not a string (yes)"
    ),
    "[collectors.memory]\ninterval = '5s": 'is not TOML: Expected "\'" (at end of document)',
}


def errors_of(text: str, tmp_path: Path) -> list[str]:
    """Return what `load` says of a file with this text."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert all(line.startswith(f"{file}: ") for line in str(caught.value).splitlines())
    return caught.value.errors


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_bad_config(text: str, message: str, tmp_path: Path) -> None:
    """Each mistake gets one message with the path of its key and what would be right."""
    assert errors_of(text, tmp_path) == [message]


def test_all_errors_at_once(tmp_path: Path) -> None:
    """Every error of a file is listed, so that one edit mends it."""
    text = (
        "[web]\nlisten_address = 'x'\nnonsense = 1\n[log]\nlevel = "
        "3\n[collectors.memory]\ndeadline = 'soon'"
    )
    assert [error.split(":")[0] for error in errors_of(text, tmp_path)] == [
        "web.nonsense",
        "web.listen_address",
        "log.level",
        "collectors.memory.deadline",
    ]


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that is missing, or is no text, is an error that names it."""
    with pytest.raises(ConfigError, match=r"missing\.toml: cannot be read: No such file"):
        config.load(tmp_path / "missing.toml")
    (tmp_path / "binary.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(
        ConfigError, match=r"binary\.toml: is not UTF-8: invalid start byte at byte 5"
    ):
        config.load(tmp_path / "binary.toml")


def test_flags_over_file_over_defaults(tmp_path: Path) -> None:
    """A flag wins over the file, the file over the default, key by key."""
    file = tmp_path / "dshealthd.toml"
    file.write_text("[web]\nlisten_address = ':1'\nmax_connections = 7\n", encoding="utf-8")
    loaded = config.load(file, {"web": {"listen_address": ":2"}, "path": {"procfs": "/host/proc"}})
    assert (loaded.web.listen_address, loaded.web.max_connections, loaded.web.header_timeout) == (
        ":2",
        7,
        5.0,
    )
    assert loaded.path.procfs == Path("/host/proc")


def test_reference_file_is_complete_and_means_the_defaults() -> None:
    """The reference file names every option of every section and collector, and loading it gives
    the defaults.
    """
    file = Path(__file__).parents[1] / "docs/dshealthd.toml"
    document: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    errors = Errors()
    assert config.from_document(document, errors) == config.load(None)
    assert not errors
    assert set(document["collectors"]) == set(registry.all_collectors())


def test_level_warn_is_warning(tmp_path: Path) -> None:
    """The short name that other tools have for a level means the same."""
    (tmp_path / "c.toml").write_text("[log]\nlevel = 'warn'\n", encoding="utf-8")
    assert config.load(tmp_path / "c.toml").log.level == "warning"


def test_listen_addresses() -> None:
    """All forms of an address are understood; an empty host means all addresses."""
    assert listen_address(":10061") == (None, 10061)
    assert listen_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert listen_address("[::1]:80") == ("::1", 80)


def test_changes_that_need_a_restart() -> None:
    """A reload can say which changed keys take effect only after a restart."""
    old = config.load(None)
    new = config.load(
        None,
        {
            "web": {"listen_address": ":1"},
            "log": {"level": "debug"},
            "path": {"state": "/x", "procfs": "/y"},
        },
    )
    assert config.restart_needed(old, old) == []
    assert config.restart_needed(old, new) == ["web.listen_address", "path.state", "log.level"]
    assert isinstance(new, Config)


def test_sections_are_those_that_packages_declare() -> None:
    """A package's options become the section of its name, before or after the file is read."""
    slurm = config.SECTIONS["slurm"]
    assert slurm.__module__ == "dshealthd.slurm.options"
    names = list(config.SECTIONS)
    assert (names[:3], names[3:]) == (["web", "path", "log"], sorted(names[3:]))
    loaded = config.load(None, {"slurm": {"bad_checks": 3}})
    assert loaded.section(SlurmOptions) == SlurmOptions(bad_checks=3)
    assert Config().section(SlurmOptions) == SlurmOptions()
    other = loaded.with_section(SlurmOptions(node="n1"))
    assert other.section(SlurmOptions).bad_checks == SlurmOptions().bad_checks
    assert other.section(ProbeOptions) == loaded.section(ProbeOptions)


def test_the_configuration_knows_no_package_that_declares_a_section() -> None:
    """A package is added without a change here: nothing below the agent is imported by name."""
    source = Path(config.__file__).read_text(encoding="utf-8")
    assert not [name for name in registry.sections() if f"import {name}" in source]
    assert not [name for name in registry.sections() if f"dshealthd.{name}" in source]


SELDOM = {"alertmanager", "deploy", "fleet", "lab", "nccl", "neighbors", "soak"}
"""Folders of tests of which some run elsewhere, or seldom."""
MISSPELT = {"intervall", "listen_adress", "prot"}
"""Keys that these tests misspell on purpose."""


def test_configurations_of_tests_that_run_seldom(tmp_path: Path) -> None:
    """Options that are gone would end their agents before anything is tested."""
    folder, found, path = Path(__file__).parent, 0, tmp_path / "c.toml"
    for file in sorted(folder.rglob("*.py")):
        if SELDOM.isdisjoint(file.relative_to(folder).parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Constant) or not re.match(
                r"\[[a-z_.]+\]\n", str(node.value)
            ):
                continue
            with contextlib.suppress(tomllib.TOMLDecodeError):  # a part of a configuration
                tomllib.loads(str(node.value))
                if not any(word in str(node.value) for word in MISSPELT):
                    path.write_text(str(node.value), encoding="utf-8")
                    assert config.load(path), file
                    found += 1
    assert found
