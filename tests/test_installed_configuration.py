"""The installed configuration file, which each command on a node reads unless told another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dshealthd.cli import commands, free_port
from dshealthd.cli import main as cli
from dshealthd.config import flags
from dshealthd.doctor import command as doctor
from tests.status.nodes import HEALTHY, run, snapshot
from tests.web.serving import serving

BROKEN = "[log]\nlevel = 1\n"
"""A mistake beside what a command needs of the file."""
PARSERS = {
    "doctor": (doctor.parser, []),
    "free-port": (free_port.parser, []),
    **{
        command.name: (commands.parser, [command.name, *words])
        for command in commands.COMMANDS
        for words in [
            {"keys": ["show"], "maintenance": ["show"], "slurm": ["health"]}.get(command.name, [])
        ]
    },
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the installed file, where there is none yet."""
    file = tmp_path / "installed.toml"
    monkeypatch.setattr(flags, "INSTALLED", file)
    return file


def own(table: str) -> str:
    """Return a configuration with a mistake, and this table."""
    return f"{BROKEN}{table}"


@pytest.mark.parametrize("command", PARSERS)
def test_default(command: str, installed: Path) -> None:
    """Each command reads it if it exists, even one that it may not read, so that it says so; a
    file that is given replaces it.
    """
    made, words = PARSERS[command]
    assert made().parse_args(words).config_file is None
    installed.symlink_to(installed.name)  # a loop: there is a file, but not one to read
    assert made().parse_args(words).config_file == installed
    installed.unlink()
    installed.touch()
    assert made().parse_args(words).config_file == installed
    given = made().parse_args([*words, "--config.file", "/other.toml"])
    assert given.config_file == Path("/other.toml")


def test_commands_use_it(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its values count, and flags override them."""
    state, key = installed.parent / "state", installed.parent / "none.key"
    state.mkdir()
    with serving(snapshot(*HEALTHY)) as served:
        installed.write_text(
            f"[web]\nlisten_address = '127.0.0.1:{served.port}'\n[path]\nstate = '{state}'\n"
            f"[probe.members]\nnodes = ['n1']\n[probe.peer]\nkey_file = '{key}'\n"
            "[collectors.rendezvous]\nports = '29999'\n",
            encoding="utf-8",
        )
        assert run("status") == 0
        assert run("jobs") == 0
    assert run("status") == 3
    capsys.readouterr()
    assert run("check-config") == 0
    assert capsys.readouterr().out.startswith(f"{installed}: ok, ")
    assert run("targets") == 0
    assert json.loads(capsys.readouterr().out)[0]["targets"] == [f"n1:{served.port}"]
    assert run("targets", "--web.listen-address", ":7") == 0
    assert json.loads(capsys.readouterr().out)[0]["targets"] == ["n1:7"]
    assert run("keys", "show") == 1
    assert str(key) in capsys.readouterr().err
    assert run("maintenance", "show") == 0
    assert run("free-port") in {0, 1}
    assert "29999" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "command",
    ["run", "check-config", "metrics", "probe", "targets", "keys", "maintenance", "slurm"],
)
@pytest.mark.parametrize("content", [BROKEN.encode(), b"[", b"\xff", None])
def test_broken_file_stops_what_acts_by_it(
    command: str, content: bytes | None, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the file."""
    installed.mkdir() if content is None else installed.write_bytes(content)
    assert cli.main(PARSERS[command][1]) == 2
    assert capsys.readouterr().err.startswith(f"{installed}: ")


def test_which_commands_go_on() -> None:
    """Those that ask an agent, and those that need little or nothing of the file; `doctor` and
    `free-port` as well.
    """
    going_on = {command.name for command in commands.COMMANDS if command.forgives}
    assert going_on == {"status", "jobs", "history", "evidence", "test-alert", "launches"}


@pytest.mark.parametrize("command", ["status", "jobs", "history"])
def test_broken_file_does_not_silence_the_agent(
    command: str, installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that runs is queried at the address that the file has, and the mistake is told; a
    file that was given, or a flag, must be right.
    """
    with serving(snapshot(*HEALTHY)) as served:
        installed.write_text(own(f"[web]\nlisten_address = '127.0.0.1:{served.port}'\n"))
        assert run(command) == 0
        shown = capsys.readouterr()
        assert shown.err.startswith(f"{installed}: log.level: ")
        assert len(shown.err.splitlines()) == 1
        assert shown.out
        assert run(command, "--log.format", "xml") == 3
        assert capsys.readouterr().err.startswith("command line: log.format: ")
        installed.write_text("[", encoding="utf-8")
        assert run(command, "--web.listen-address", f"127.0.0.1:{served.port}") == 0
        assert capsys.readouterr().err.startswith(f"{installed}: is not TOML: ")
        other = installed.with_name("other.toml")
        other.write_text(BROKEN, encoding="utf-8")
        assert run(command, "--config.file", str(other)) == 3


def test_broken_file_does_not_stop_a_job(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that starts a training gets its port."""
    installed.write_text(own("[collectors.rendezvous]\nports = '29000-29099'\n"))
    assert run("free-port") == 0
    port, error = capsys.readouterr()
    assert 29000 <= int(port) <= 29099
    assert error.startswith(f"{installed}: log.level: ")


def test_broken_file_does_not_stop_a_test_page(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It needs no configuration."""
    installed.write_text(BROKEN, encoding="utf-8")
    assert run("test-alert", "--alertmanager", "http://127.0.0.1:1") == 1
    assert "STOPPED" in "".join(capsys.readouterr())


def test_doctor_finds_a_broken_file(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a result, which `--hosts` reads too; the remedy ends it."""
    installed.write_text(own("[doctor]\nopen_files = 1\n"), encoding="utf-8")
    words = ("doctor", "--json", "--no-agent", "--only", "agent")
    assert run(*words) == 1
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    ((found,),) = [check["results"] for check in node["checks"]]
    assert found["outcome"] == "warning"
    assert found["component"] == "configuration"
    assert f"{installed}: log.level: " in found["text"]
    assert "`dshealthd check-config`" in found["remedy"]
    installed.write_text("", encoding="utf-8")
    assert run("check-config") == 0
    assert run(*words) == 0


def test_mistake_is_of_who_made_it(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag's mistake is not the file's, even if the file has a right value for the key."""
    installed.write_text("[web]\nmax_connections = 5\n", encoding="utf-8")
    assert run("check-config", "--web.max-connections", "many") == 2
    wrong = "command line: web.max_connections: must be an integer, not a string (many)\n"
    assert capsys.readouterr().err == wrong
    installed.write_text("[web]\nmax_connections = 'many'\n", encoding="utf-8")
    assert run("check-config") == 2
    assert capsys.readouterr().err.startswith(f"{installed}: web.max_connections: ")
    assert run("check-config", "--web.max-connections", "5") == 0
