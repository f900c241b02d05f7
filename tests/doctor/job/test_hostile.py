"""Input that means harm, or is broken: refused with its reason, in bounded time and memory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dshealthd.doctor.job.checks import CHECKS, applicable
from dshealthd.doctor.job.sources import fields, launcher_command, manifest, slurm_script
from dshealthd.doctor.job.sources.inspection import Inspection
from dshealthd.doctor.job.sources.source import Source, read_all
from dshealthd.findings.finding import State
from tests.doctor.job.asking import CRITICAL, UNKNOWN, asked, outcomes, results, texts

SOON = 30.0
"""Seconds; a bound for a loaded machine. What is tested takes less than one."""


def write_huge(file: Path) -> None:
    """Write 100 MB of JSON."""
    with file.open("wb") as out:
        out.write(b'{"a": "')
        for _ in range(100):
            out.write(b"x" * 1_000_000)
        out.write(b'"}')


DEEP = "is not JSON (maximum recursion depth"
IRREGULAR = "is not a regular file"
HOSTILE: dict[str, tuple[Callable[[Path], object] | str | bytes, str]] = {
    "deep objects": ('{"a":' * 10_000 + "1" + "}" * 10_000, DEEP),
    "deep lists": ("[" * 10_000 + "]" * 10_000, DEEP),
    "deep without an end": ('{"a":' * 10_000, DEEP),
    "NaN": ('{"gradient_clipping": NaN}', "NaN is no number in JSON"),
    "infinite": ('{"gradient_clipping": -Infinity}', "-Infinity is no number in JSON"),
    "duplicate": ('{"bf16": {"a": true}, "bf16": {"a": false}}', "has key 'bf16' twice"),
    "duplicate inside": ('{"bf16": {"a": true, "a": false}}', "has key 'a' twice"),
    "Latin-1": ('{\n"a": "ä"}'.encode("latin-1"), ":2: byte 0xe4 is not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
    "list": ("[1]", "must begin with {"),
    "long number": ('{"a": %s}' % ("1" * 5000), "is not JSON"),
    "cut off": ('{"a": 1,', "is not JSON (line 1 column 9"),
    "escapes": ('{"\\u001b[2Ja": 1, "\\u001b[2Ja": 2}', "twice"),
    "none": (lambda _: None, ": No such file"),
    "directory": (lambda file: file.mkdir(), IRREGULAR),
    "FIFO": (os.mkfifo, IRREGULAR),
    "endless device": (lambda file: file.symlink_to("/dev/zero"), IRREGULAR),
    "process": (lambda file: file.symlink_to("/proc/self/environ"), IRREGULAR),
}
"""The content of a configuration, or how to make it, and words of the result."""
UNDECIDED = (
    *("NaN", "infinite", "long number", "cut off"),
    *("deep objects", "deep lists", "deep without an end"),
)
"""What only DeepSpeed could read."""


@pytest.mark.parametrize("case", HOSTILE)
def test_configuration(tmp_path: Path, case: str) -> None:
    """A configuration that is no configuration costs little, and its reason names the file."""
    content, words = HOSTILE[case]
    file = tmp_path / "ds_config.json"
    if callable(content):
        content(file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    start = time.monotonic()
    job = asked("--deepspeed-config", str(file))
    found = results("config-file", job)
    assert time.monotonic() - start < SOON
    assert words in texts(found)
    assert str(file) in texts(found)
    assert {result.outcome for result in found} == {UNKNOWN if case in UNDECIDED else CRITICAL}
    if job.document is None:
        for check in applicable(job):  # none of the others takes it for well
            if check.name.startswith(("config", "batch")):
                assert State.OK not in {result.outcome for result in check.run(job)}, check.name


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("job.json", "{}", 1 << 18),
        ("job.sh", "#!/bin/sh\ntorchrun x.py", 1 << 18),
        ("job.yaml", "spec: {containers: [{name: a}]}", 1 << 18),
        ("hosts", "a slots=8", 1 << 20),
    ],
)
def test_file_of_the_largest_size(tmp_path: Path, name: str, text: str, limit: int) -> None:
    """A file of any kind is read up to a size, however little of it is no blank."""
    file = tmp_path / name
    for size, is_read in ((limit, True), (limit + 1, False)):
        file.write_text(text.ljust(size))
        job = asked(*["--hostfile"] * (name == "hosts"), str(file))
        sources = (job.config, job.script, job.manifest, job.hostfile)
        (source,) = (one for one in sources if one)
        assert (source.value is not None) == is_read
        assert is_read or f"larger than {limit >> 10} KiB" in source.problem


def test_document_of_the_largest_size() -> None:
    """What a text of YAML repeats counts each time; each level is a call."""
    units = [fields.quantity(f"2{unit}") for unit in ("", "m", "k", "M", "Ki", "Ei", "ki")]
    assert units == [2, 0.002, 2000, 2e6, 2048, 2 << 60, None]
    pod = {"containers": [{"name": "a"}]}
    assert len(manifest.from_json({"documents": [pod] * 65}).pods) == 64
    for more, says in ((0, contextlib.nullcontext()), (1, pytest.raises(ValueError, match="deep"))):
        levels: object = 1
        for _ in range(64 + more):
            levels = [levels]
        texts = ["x" * ((1 << 19) - 2), "x" * ((1 << 19) - 1 + more)]
        for document in (levels, texts):
            with says:
                assert fields.plain(document) == document


def test_memory(tmp_path: Path) -> None:
    """100 MB of configuration cost no more than the bound says, in any process."""
    file = tmp_path / "ds_config.json"
    write_huge(file)
    # Not ru_maxrss of itself: exec hands it on from the process that was forked, this one.
    program = (
        "import resource, re; from tests.doctor.job.asking import asked;"
        f" asked('--deepspeed-config', {str(file)!r});"
        " print(*re.findall(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read()),"
        " resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=250
    )
    own, childrens = map(int, done.stdout.split())
    assert max(own, childrens) < 90 << 10


def test_hung_path(tmp_path: Path) -> None:
    """A source that hangs is killed at its deadline; the others are read, and it is named."""
    good = tmp_path / "good"
    good.write_text("{}")
    start = time.monotonic()
    found = read_all(
        {
            "dead": functools.partial(time.sleep, 600),
            "good": functools.partial(good.read_text, encoding="utf-8"),
        },
        5.0,
    )
    assert time.monotonic() - start < SOON
    assert found["good"] == Source("good", "{}", "")
    assert found["dead"].problem.startswith("no answer within 5 s")
    assert (found["dead"].hung, found["good"].hung) == (True, False)


def test_hung_source_is_unknown() -> None:
    """What hung is unknown by its name, never ok and never absent."""
    names = {
        "config": "/nfs/ds_config.json",
        "hostfile": "/nfs/hostfile",
        "checkpoint": "/nfs/checkpoint",
    }
    found = read_all(dict.fromkeys(names, functools.partial(time.sleep, 600)), 0.5)
    hung = {one: replace(found[one], name=name) for one, name in names.items()}
    job = replace(
        asked(), config=hung["config"], hostfile=hung["hostfile"], checkpoint=hung["checkpoint"]
    )
    for check, name in (
        ("config-file", names["config"]),
        ("hostfile", names["hostfile"]),
        ("checkpoint", names["checkpoint"]),
    ):
        (result,) = results(check, job)
        assert result.outcome is State.UNKNOWN
        assert name in result.text
        assert "no answer within 0.5 s" in result.text


def test_nothing_named() -> None:
    """Without anything named no check claims to have found all well."""
    job = type(asked())()
    assert applicable(job) == ()
    for check in CHECKS:
        outcomes = {result.outcome for result in check.run(job)}
        assert outcomes == {State.UNKNOWN}, check.name


OPTIONS_AS_NAMES = (
    "-oProxyCommand=touch${IFS}%s slots=8",
    "--version slots=8",
    "-F/tmp/evil slots=8",
    "a;touch${IFS}%s slots=8",
    "$(touch${IFS}%s) slots=8",
    "`touch${IFS}%s` slots=8",
    "a|b slots=8",
    "a'b slots=8",
    "../../x slots=8",
    "user@host slots=8",
    "\x1b[2Jhost slots=8",
    "ho\x00st slots=8",
)


@pytest.mark.parametrize("line", OPTIONS_AS_NAMES)
def test_options_of_ssh_in_names(tmp_path: Path, line: str) -> None:
    """A name that is an option of ssh, or a command, is refused; ssh is not started with it."""
    proof = tmp_path / "proof"
    hostfile = tmp_path / "hostfile"
    hostfile.write_text((line % proof if "%s" in line else line) + "\n")
    job = asked("--hostfile", str(hostfile))
    (result,) = results("hostfile", job)
    assert result.outcome is State.CRITICAL
    assert "is not a valid node name" in result.text
    for check in ("hostfile-names", "ssh"):
        assert outcomes(check, job) == [State.UNKNOWN]
    assert not proof.exists()


SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
export A=$(touch {proof})
export B=`touch {proof}`
touch {proof}
eval "touch {proof}"
srun bash -c "touch {proof}; torchrun --nnodes=$(touch {proof}; echo 2) train.py"
"""


def test_nothing_runs_what_a_script_says(tmp_path: Path) -> None:
    """Commands, substitutions and eval of a script or a command stay text."""
    proof, script = tmp_path / "proof", tmp_path / "job.sh"
    script.write_text(SCRIPT.format(proof=proof))
    asked(str(script))
    asked(
        launch=f"srun bash -c 'torchrun --nnodes=$(touch {proof}) `touch {proof}`; touch {proof}'"
    )
    assert not proof.exists()


def test_variables_that_grow() -> None:
    """Variables that double each other end at a bound instead of filling memory."""
    lines = ["#!/bin/sh", "A0=xxxxxxxxxxxxxxxx"]
    lines += [f"A{number}=$A{number - 1}$A{number - 1}" for number in range(1, 100)]
    lines += ["B=" + "$A8" * 4000, "torchrun --nnodes=2 $A8 train.py"]
    start = time.monotonic()
    script = slurm_script.parse("\n".join(lines))
    assert time.monotonic() - start < SOON
    assert script.exports["A99"] == "${A99}"
    assert max(map(len, script.exports.values())) < 1 << 13


@pytest.mark.parametrize(
    "text",
    [
        "'" * 100_001,
        "\\" * 100_000,
        "torchrun " + "--nnodes=2 " * 20_000,
        "srun " * 20_000 + "torchrun x.py",
        "srun bash -c '" * 2000,
        "#SBATCH " + "-" * 100_000,
        "((" * 50_000,
        "$(" * 100_000,
        "<<A\n" * 50_000,
        "A=1 " * 50_000,
        '"$(' * 80_000,
        "for((;;" * 10_000,
        "[[ " * 80_000,
        "[[ a\n" * 50_000,
        "${a " * 60_000,
    ],
)
def test_commands_cost_little(text: str) -> None:
    """A command or script without end is parsed or refused in bounded time."""
    start = time.monotonic()
    launcher_command.parse(["bash", "-c", text], {})
    slurm_script.parse(f"#!/bin/sh\n{text}\n")
    assert time.monotonic() - start < SOON


ERRORS = ("unknown", "value", "removed", "refused")
HOSTILE_NAMES = (
    "ds'; touch {proof}; '.json",
    "$(touch {proof}).json",
    "`touch {proof}`.json",
    "a b; touch {proof}.json",
    "-e touch.json",
    "\x1b[2J.json",
    "line\nbreak.json",
)


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_remedies_run_nothing_that_a_name_or_key_says(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remedy that is pasted runs the command that it shows, whatever files and keys are
    called.
    """
    monkeypatch.chdir(tmp_path)
    file = Path(name.format(proof="proof"))
    evil = "'; touch proof; '"
    document = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 4,
        evil: 1,
        "$(touch proof)": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": evil}},
        "optimizer": {"type": evil, "params": {"max_grad_norm": 1}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
    }
    text = json.dumps(document)
    file.write_text(f"{text[:-1]}, {json.dumps(evil)}: 2}}")
    job = asked("--deepspeed-config", str(file), "--ranks", "8")
    inspected = Inspection(
        version="0",
        errors=tuple({"kind": kind, "path": evil, "text": evil} for kind in ERRORS),
        unread=(evil, "$(touch proof)"),
        settings=None,
        warnings=(f"Config parameter {evil.replace(' ', '')} is deprecated",),
    )
    job = replace(job, inspected=Source("python", inspected))
    remedies = [result.remedy for check in applicable(job) for result in check.run(job)]
    assert len(list(filter(None, remedies))) > 5 or not name.isprintable()
    for remedy in filter(None, remedies):
        assert remedy.isprintable()
        if not remedy.startswith("mkdir"):
            subprocess.run(remedy, shell=True, capture_output=True, check=False, timeout=60)
    assert not Path("proof").exists()
