"""The commands, as a user types them."""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd import __version__
from dshealthd.cli import commands, warnings
from dshealthd.cli import main as cli
from dshealthd.cli.arguments import Command
from dshealthd.config import config, registry
from dshealthd.config.flags import default_text, seconds, tables_of_flags
from dshealthd.core.options import Duration, Errors
from tests.command_line import dshealthd


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the package's version."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"dshealthd {__version__}\n"


def test_explain_imports_no_more_than_it_needs() -> None:
    """`explain` reads most logs in less time than asyncio, aiohttp and the commands take to
    import.
    """
    code = (
        "import sys; from dshealthd.cli import main as cli\ntry: cli.main(['explain', "
        "'/dev/null'])\nfinally: print(*sorted({'asyncio', 'aiohttp', 'dshealthd.cli.commands', "
        "'dshealthd.config.config', 'subprocess', 'ctypes'} & set(sys.modules)))"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert said.splitlines()[-1] == ""


def test_check_config(tmp_path: Path) -> None:
    """`check-config` says ok and 0, or lists what is wrong and gives 2."""
    file = tmp_path / "c.toml"
    file.write_text("[log]\nlevel = 'debug'\n", encoding="utf-8")
    good = dshealthd("check-config", "--config.file", str(file))
    assert (good.returncode, good.stderr) == (0, "")
    kinds = list(registry.all_collectors().values())
    enabled = sum(kind.Options().enabled for kind in kinds)
    assert good.stdout == f"{file}: ok, {enabled} of {len(kinds)} collectors enabled\n"
    file.write_text("[log]\nlevel = 1\n[wbe]\n", encoding="utf-8")
    bad = dshealthd("check-config", "--config.file", str(file))
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 2


def test_metrics_of_this_machine_are_sound(tmp_path: Path) -> None:
    """`metrics` prints one scrape of this machine, with which promtool finds no fault, and no
    series has a pid but those that name a job's first process, a rank's page and one in trouble.
    """
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's prometheus; ./dev test installs it"
    done = dshealthd("metrics", "--path.state", str(tmp_path))
    assert done.returncode == 0
    assert 'dshealthd_collector_up{collector="memory"} 1.0' in done.stdout
    named = ("process_info", "heartbeat_page_info", "rank_trouble_seconds")
    named_rows = tuple(f"dshealthd_job_{name}{{" for name in named)
    lasting = [row for row in done.stdout.splitlines() if not row.startswith(named_rows)]
    assert [row for row in lasting if "pid=" in row] == []
    check = subprocess.run(
        [promtool, "check", "metrics"],
        input=done.stdout,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help of a command."""
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", commands.COMMANDS, ids=lambda command: command.name)
def test_help(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """A command's help has its own options first, then the file, and examples; that of `run` has
    the flags by section.
    """
    text = shown(command.name, capsys)
    run = command.name == "run"
    sections = re.findall(r"^(\w+) options:$", text, re.MULTILINE)
    assert sections == (list(config.SECTIONS) if run else [])
    own, _, flags = text.partition("\nconfiguration:\n")
    assert not re.findall(r"^  --\w+\.", own, re.MULTILINE)
    described = re.split(r"^  (?=--)", flags.partition("\nexamples:\n")[0], flags=re.MULTILINE)[1:]
    assert len(described) > 30 if run else len(described) == 1
    assert ("`dshealthd run --help` lists them" in flags) is not run
    for flag in described:
        assert re.match(r"(?:--\S+, )*--\S+ [A-Z]|(?:--\S+, )*--\S+ \w+\|\w+", flag), flag
        assert "(default:" in " ".join(flag.split()), flag
    parser = commands.parser()
    for example in command.examples:
        assert f"\n  {example}\n" in f"{text}\n"
        words = shlex.split(example.partition("|")[0])
        assert parser.parse_args(words[1:]).command is command.function


@pytest.mark.parametrize(("words", "message"), [
    (["targets"], "--hostfile: give one, or set probe.members"),
    (["launches", "--output", "/nonexistent/file"], "--output: /nonexistent is not a directory"),
])  # fmt: skip
def test_a_command_that_lacks_something_says_what(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No members anywhere; a directory that only the service has: named by the flag that helps."""
    (tmp_path / "empty.toml").touch()
    assert cli.main([*words, "--config.file", str(tmp_path / "empty.toml")]) == 2
    assert message in capsys.readouterr().err


def test_bad_usage_of_explain_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """As of any other command, although its parser is its own."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["explain"])
    assert ended.value.code == 64
    said = "dshealthd explain: the following arguments are required: LOG"
    assert capsys.readouterr().err == f"{said}\nSee `dshealthd explain --help`.\n"


@pytest.mark.parametrize(("words", "message"), [
    (["stauts"], "dshealthd: argument COMMAND: invalid choice: 'stauts'"),
    (
        ["run", "--web.listen-adress", ":1"],
        "dshealthd run: unknown arguments: --web.listen-adress :1",
    ),
    (["status", "--members", "--jsn=2"], "dshealthd status: unknown arguments: --jsn=2"),
    (["run", "--web"], "dshealthd run: unknown arguments: --web"),
    (["run", "x"], "dshealthd run: unknown arguments: x"),
    (["probe", "--kind", "pairs"], "dshealthd probe: argument --kind: invalid choice: 'pairs'"),
])  # fmt: skip
def test_unknown_words_are_errors_of_their_command(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown flag, command or choice is named, with the command's status for bad usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == (3 if words[0] == "status" else 2)
    assert capsys.readouterr().err.startswith(message)


def test_a_reader_that_has_seen_enough() -> None:
    """`dshealthd status | head -1` ends without a traceback; so does each command."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "dshealthd", "check-config"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("soft", "hard", "raised"), [
    (1024, resource.RLIM_INFINITY, [16_384]),
    (1024, 1 << 20, [16_384]),
    (1024, 4096, [4096]),
    (16_384, 1 << 20, []),
    (65_536, 1 << 20, []),
])  # fmt: skip
def test_the_agents_limit_on_open_files(
    soft: int, hard: int, raised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised as far as it may be, and no further than some children can bear."""
    found: list[int] = []
    kernel = SimpleNamespace(
        RLIM_INFINITY=resource.RLIM_INFINITY,
        RLIMIT_NOFILE=resource.RLIMIT_NOFILE,
        getrlimit=lambda _which: (soft, hard),
        setrlimit=lambda _which, limits: found.append(limits[0]),
    )
    monkeypatch.setattr(commands, "resource", kernel)
    commands._raise_file_limit()
    assert found == raised


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["check-config", "metrics"])
def test_output_that_cannot_be_written(command: str, unbuffered: str, tmp_path: Path) -> None:
    """A full disk is told in a line, with an exit status that is no verdict: 1 would be a warning
    of `status`. Longer output than a buffer fails earlier.
    """
    words = [sys.executable, "-m", "dshealthd", command, "--path.state", str(tmp_path)]
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 74
    assert done.stderr == "dshealthd: standard output: No space left on device\n"


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_output_is_utf_8(command: str) -> None:
    """In a locale of another encoding too, such as Latin-1, which lacks what runbooks have."""
    words = [sys.executable, "-m", "dshealthd", command, "--runbook", "batch-arithmetic"]
    locale = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(words, capture_output=True, timeout=60, check=False, env=locale)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "micro batch \xd7 accumulation" in done.stdout.decode()


def test_another_failure_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not of the output is a defect."""

    def fails(_words: list[str]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commands, "main", fails)
    with pytest.raises(OSError, match="No space left"):
        cli.main(["status"])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed: str, tmp_path: Path) -> None:
    """The verdict counts; what another file would get in place of the stream goes nowhere."""
    file = tmp_path / "c.toml"
    file.write_text("", encoding="utf-8")
    line = f"exec {sys.executable} -m dshealthd check-config --config.file {file} {closed}"
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (" >&-" not in f" {closed}")
    assert subprocess.run(["sh", "-c", f"{line} --nosuch"], timeout=60, check=False).returncode == 2


@pytest.mark.parametrize("words", [["test-alert", "--alertmanager"], ["status"]])
def test_interrupted_command(words: list[str]) -> None:
    """It ends by the signal, so that a loop around it ends too, and without a traceback."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dshealthd.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        started = [sys.executable, "-c", code, *words]
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        with subprocess.Popen([*started, address], stderr=subprocess.PIPE, text=True) as command:
            connection, _ = server.accept()
            with connection:
                command.send_signal(signal.SIGINT)
                _, error = command.communicate(timeout=60)
    assert (command.returncode, error) == (-signal.SIGINT, "")


@pytest.mark.parametrize("flag", ["test-alert --wait", "doctor --host-timeout"])
@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1", "soon", ""])
def test_waits_are_times(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong one is named, and no node is called unreachable for it."""
    command, option = flag.split()
    with pytest.raises(SystemExit) as ended:
        cli.main([command, f"{option}={value}"])
    assert ended.value.code == {"test-alert": 2, "doctor": 3}[command]
    assert f'argument {option}: "{value}" is not a ' in capsys.readouterr().err


@pytest.mark.parametrize(("text", "found"), [("30", 30), ("0.5", 0.5), ("30s", 30), ("2m", 120)])
def test_waits(text: str, found: float) -> None:
    """In seconds, or with a unit as durations have everywhere."""
    assert seconds(text) == found


@pytest.mark.parametrize("words", [
    ["probe", "--size", "0"], ["probe", "--repetitions", "0"], ["probe", "--kind", "pair"],
    ["history", "--since", "1x"],
])  # fmt: skip
def test_bad_argument_is_not_the_files(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that is right is not blamed."""
    file = tmp_path / "c.toml"
    file.touch()
    assert cli.main([*words, "--config.file", str(file)]) == (3 if words[0] == "history" else 2)
    assert capsys.readouterr().err.startswith(f"command line: {words[1]}: ")


def test_another_pipe_that_breaks_surfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody still reads the output, it is a defect."""

    def fails(_words: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(commands, "main", fails)
    with pytest.raises(BrokenPipeError):
        cli.main(["status"])


@pytest.mark.parametrize(
    ("command", "code"), [("status", 3), ("jobs", 3), ("check-config", 2), ("metrics", 2)]
)
def test_bad_usage_is_no_verdict(command: str, code: int, tmp_path: Path) -> None:
    """A mistake in flags or configuration is not 2, critical, of a command whose status is a
    verdict; its help says so.
    """
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--nosuch"])
    assert ended.value.code == code
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[wbe]\n", encoding="ascii")
    assert cli.main([command, "--config.file", str(wrong)]) == code
    (described,) = (found for found in commands.COMMANDS if found.name == command)
    if code == 3:
        assert "bad usage" in (described.function.__doc__ or "")


@pytest.mark.parametrize(("flags", "table"), [
    (["--web.config.file", "/w.yml"], {"web": {"config_file": "/w.yml"}}),
    (["--web.config-file", "/w.yml"], {"web": {"config_file": "/w.yml"}}),
    (["--web.hostnames", "a.example, b"], {"web": {"hostnames": ["a.example", "b"]}}),
    (["--slurm.budget-ratio", "0.1"], {"slurm": {"budget_ratio": 0.1}}),
    (["--slurm.bad-checks", "3"], {"slurm": {"bad_checks": 3}}),
    (["--evidence.enabled", "false"], {"evidence": {"enabled": False}}),
    (["--evidence.max-bytes", "2GiB"], {"evidence": {"max_bytes": "2GiB"}}),
])  # fmt: skip
def test_flags_have_the_type_of_their_option(
    flags: list[str], table: dict[str, dict[str, object]]
) -> None:
    """Each type of option can be given as a flag, and what comes of it is accepted."""
    found = tables_of_flags(commands.parser().parse_args(["run", *flags]))
    assert found == table
    config.load(None, found)


@pytest.mark.parametrize(("default", "text"), [
    *((nothing, "none") for nothing in (None, "", ())),
    (False, "false"),
    (0, "0"),
    (("a", "b"), "a,b"),
    (Duration(90), "90s"),
])  # fmt: skip
def test_defaults_are_as_a_user_types_them(default: object, text: str) -> None:
    """In the help of a flag."""
    assert default_text(default) == text


def test_check_config_warns_of_what_is_missing(tmp_path: Path) -> None:
    """Files that are named and not there, a deadline beyond its interval, and an alert to drain for
    that this release does not have are warnings.
    """
    file = tmp_path / "c.toml"
    file.write_text(
        "[probe]\npython = '/nowhere/python'\n[probe.members]\nhostfile = '/nowhere/hosts'\n"
        "[probe.peer]\nlisten_address = '127.0.0.1:1'\nkey_file = '/nowhere/key'\n"
        "[collectors.pcie]\ninterval = '1s'\n"
        "[slurm]\ndrain_for = ['DshealthdGpuLost', 'DshealthdNvmlHung']\n",
        encoding="utf-8",
    )
    done = dshealthd("check-config", "--config.file", str(file))
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"{file}: warning: probe.python: /nowhere/python: No such file or directory",
        f"{file}: warning: probe.members.hostfile: /nowhere/hosts: No such file or directory",
        f"{file}: warning: probe.peer.key_file: /nowhere/key: No such file or directory",
        (
            f"{file}: warning: collectors.pcie.deadline: 10s is longer than the interval, 1s: "
            "one hung source delays the next samples"
        ),
        (
            f"{file}: warning: slurm.drain_for: no finding is called DshealthdNvmlHung, so no node "
            "is drained for it"
        ),
    ]


@pytest.mark.parametrize(("document", "found"), [
    ({"doctor": {"skip": ["clock", "batch-sizes", "path /ckpt"]}}, []),
    ({"doctor": {"skip": ["gpuz"]}},
     ["doctor.skip: `dshealthd doctor` fails: gpuz: no such check; did you mean gpus?"]),
    ({"doctor": {"accept": ["clok until 2030-01-01: known"]}},
     ["doctor.accept: `dshealthd doctor` fails: clok: no such check; did you mean clock?"]),
    ({"probe": {"members": {"nodes": ["n1", "n2"]}}}, []),
    ({"probe": {"members": {"nodes": ["n1", "n 2", "n1"]}}}, [
        'probe.members.nodes: entry 2, "n 2", is not a valid node name',
        'probe.members.nodes: entry 3, "n1", is a duplicate',
    ]),
])  # fmt: skip
def test_names_that_mean_nothing_are_warned_of(
    document: dict[str, dict[str, Any]], found: list[str]
) -> None:
    """Where nothing else tells before the doctor fails or the probes stay off."""
    loaded = config.from_document(document, errors := Errors())
    assert errors == []
    assert [*warnings.of(loaded)] == found


@pytest.mark.parametrize("executable", [False, True])
def test_an_interpreter_that_cannot_be_run_is_warned_of(
    tmp_path: Path, *, executable: bool
) -> None:
    """The probes' workers would not start."""
    python = tmp_path / "python"
    python.touch(0o755 if executable else 0o644)
    loaded = config.load(None, {"probe": {"python": str(python)}})
    expected = [] if executable else [f"probe.python: {python} is not executable"]
    assert [*warnings.of(loaded)] == expected
