"""A site's switch: trainings that know nothing of it are followed, all other programs unchanged."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.processes import free_port
from deploy.training import directory
from dshealthd.collectors import nccl_inspector
from dshealthd.jobs import environment
from dshealthd.training import report
from tests.command_line import shell_script
from tests.training import foreign
from tests.training.agents_end import LINGER, AgentsEnd
from tests.training.foreign import Switch

found = foreign.torch()
if found is None:
    pytest.skip("takes torch", allow_module_level=True)
TORCH = found
GATE = directory.HERE / "site/dshealthd_site.py"
SCRIPT = Path(__file__).with_name("script_site.py")
STEPS = 3
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
DIGEST = "4669488263a52b1f35ec0b2b14fcfafcbab8bc6353f428116b9d2cb7a983bd87"
"""Of the archive; see `directory.ARCHIVE` before changing it."""


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Switch:
    """An environment with torch and without dshealthd, beside the directory of a package."""
    return foreign.switch(tmp_path_factory.mktemp("site"), TORCH)


def variables(home: Path, switch: Switch | None = None, **more: str) -> dict[str, str]:
    """Return the environment of a program, with the switch or without it."""
    found = {
        "PATH": os.defpath,
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
        **more,
    }
    return found if switch is None else {**found, "PYTHONPATH": switch.archive}


def run(
    command: list[str], environ: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    options: dict[str, Any] = {"env": environ, "cwd": folder, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_training_is_followed(
    switch: Switch, agents_end: AgentsEnd, tmp_path: Path, how: str
) -> None:
    """Each rank reports from its first step on, whether torchrun starts it or another, and leaves
    no file. Not where a release's FSDP 2 fails here without us, for want of a CUDA driver, which it
    takes even on a mesh of CPUs.
    """
    before = sorted(switch.directory.rglob("*"))
    environ, port = variables(tmp_path, switch), str(free_port())
    if how == "ddp":
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
        command += [f"--master-port={port}", str(SCRIPT), how, str(STEPS)]
        environs = [environ]
    else:
        command = [str(SCRIPT), how, str(STEPS)]
        environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environs = [{**environ, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ended = agents_end.watch([str(switch.python), *command], *environs, cwd=tmp_path)
    if how == "fsdp2" and any(one.returncode for one in ended):
        port = str(free_port())
        alone = [{**each, "PYTHONPATH": "", "MASTER_PORT": port} for each in environs]
        ended_alone = agents_end.watch([str(switch.python), *command], *alone, cwd=tmp_path)
        if all(one.returncode and "CUDA" in one.stderr for one in ended_alone):
            pytest.skip(f"FSDP 2 of torch {TORCH.version} takes a CUDA driver, without us too")
    said = "".join(one.stderr for one in ended)
    assert {one.returncode for one in ended} == {0}, said
    assert not re.search("dshealthd|Traceback", said)
    printed = re.findall(r"rank \d loss \d+\.\d{6}", "".join(one.stdout for one in ended))
    assert len(printed) == 2 * STEPS
    followed = [STEPS] * 2 if TORCH.loads_backends else []
    assert [message.step for message in agents_end.messages()] == followed
    assert sorted(switch.directory.rglob("*")) == before


TRAINS = """
import torch
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
"""
STATE = """
import os, sys, threading
ours = {"dshealthd_site"}
archive = os.environ.get("PYTHONPATH", "-")
def state():
    modules = sorted(set(sys.modules) - ours)
    environ = sorted(item for item in os.environ.items() if item[0] != "PYTHONPATH")
    paths = [path for path in sys.path if path != archive]
    return modules, threading.active_count(), environ, paths, len(sys.meta_path)
print(*state(), sep=chr(10))
"""
SPAWNED = """
import multiprocessing, os
def work(number):
    return number, sorted(os.environ.get(name, "") for name in ("RANK", "HOME"))
if __name__ == "__main__":
    with multiprocessing.get_context("{how}").Pool(2) as pool:
        print(pool.map(work, range(4)))
"""
LOADERS = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, number):
        import sys
        return number, int(any(name.startswith("dshealthd.") for name in sys.modules))
if __name__ == "__main__":
    for how in ("fork", "spawn"):
        for numbers, ours in torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=1, multiprocessing_context=how
        ):
            print(numbers.tolist(), ours.tolist())
"""
LOADED = "for _ in range(2): print([0, 1, 2, 3], [0] * 4); print([4, 5, 6, 7], [0] * 4)"
SUBPROCESS = f"""
import subprocess, sys
print(subprocess.check_output([sys.executable, "-c", {STATE!r}], text=True))
"""
FORK = """
pid = os.fork()
print(pid and os.waitpid(pid, 0)[1])
"""
TEST = "def test_it():\n    assert True\n"

ATTACHES = """
sys.path.append(os.environ["BESIDE"])
from dshealthd.training import attach
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
attach(optimizer=optimizer, step=40)
for _ in range(3):
    optimizer.step()
"""
CHILDREN = f"""
import os, sys, torch._dynamo  # as the first step does, in each child
for code in (
    "sys.settrace(lambda *_: None)" + {TRAINS!r},
    "os.environ['WORLD_SIZE'] = '2'" + {TRAINS!r},
    {ATTACHES!r} if "BESIDE" in os.environ else "",
):
    if (child := os.fork()) == 0:
        exec(code + {LINGER!r})
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""
"""Trains in children: one under a debugger, one that has not joined its ranks, and, with the
package, one that reports by itself."""
PROGRAMS = {
    "hello": ["-c", "print('hello')"],
    "state": ["-c", STATE],
    "torch": ["-c", f"import torch\n{STATE}{FORK}"],
    "state without site": ["-S", "-c", STATE],
    "isolated": ["-I", "-c", STATE],
    "without environment": ["-E", "-c", STATE],
    "warnings": ["-W", "error", "-c", "import json; print(json.dumps(1))"],
    "verbose exit": ["-c", "import sys; sys.exit('the end')"],
    "exit status": ["-c", "raise SystemExit(7)"],
    "exception": ["-c", "1 / 0"],
    "signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "atexit": ["-c", "import atexit; atexit.register(print, 'ends')"],
    "module": ["-m", "json.tool", "--help"],
    "subprocess": ["-c", SUBPROCESS],
    "shell": ["-c", "import os; print(os.system('echo $RANK; exit 3'))"],
    "fork": ["-c", f"import os{FORK}"],
    "threads": ["-c", "import threading as t; x = t.Thread(target=print); x.start(); x.join()"],
    "asyncio": ["-c", "import asyncio; print(asyncio.run(asyncio.sleep(0, 3)))"],
    "spawned": ["spawned.py"],
    "forked": ["forked.py"],
    "loaders": ["loaders.py"],
    "pytest": ["-m", "pytest", "-qq", "-p", "no:cacheprovider", "test_it.py"],
    "interactive": ["-i", "trains.py"],
}
LIKE = {"loaders": ["-c", LOADED], "interactive": ["-i", "-c", ""]}
"""Programs that print what these print without the switch, and need no torch for it."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_unchanged(
    switch: Switch, agents_end: AgentsEnd, tmp_path: Path, name: str
) -> None:
    """What is no training of a launched rank prints, imports, starts and ends as without the
    switch, in the environment of a rank, and reports nothing.
    """
    texts = {"spawned": SPAWNED.format(how="spawn"), "forked": SPAWNED.format(how="fork")}
    texts |= {"loaders": LOADERS, "test_it": TEST, "trains": TRAINS + LINGER}
    for file, text in texts.items():
        (tmp_path / f"{file}.py").write_text(text)
    ended = [
        agents_end.watch([str(switch.python), *arguments], environ, cwd=tmp_path)[0]
        for arguments, environ in (
            (PROGRAMS[name], variables(tmp_path, switch, **RANK)),
            (LIKE.get(name, PROGRAMS[name]), variables(tmp_path, None, **RANK)),
        )
    ]
    with_switch, without = [
        (end.returncode, re.sub(r"\d+\.\d+s|0x\w+", "", end.stdout), end.stderr) for end in ended
    ]
    assert with_switch == without
    assert agents_end.messages() == []


def test_those_programs_train(switch: Switch, agents_end: AgentsEnd, tmp_path: Path) -> None:
    """A rank of its own that runs the same steps is followed, so the test above can fail, and it
    computes what it computes without the switch; children that are debugged, or have not joined
    the ranks that they are told of, are not followed, and one that attaches by itself has one
    heartbeat, its own. Torch before 2.5 calls nothing.
    """
    code = CHILDREN + TRAINS.replace("net =", "torch.manual_seed(0)\nnet =", 1)
    command = [str(switch.python), "-c", f"{code}print(net.weight.tolist()){LINGER}"]
    beside = {"BESIDE": str(switch.directory)}
    environs = [variables(tmp_path, switch, **RANK, **beside), variables(tmp_path, None, **RANK)]
    ended, without = agents_end.watch(command, *environs, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, without.stdout, "")
    assert [message.step for message in agents_end.messages()] == [43] + [3] * TORCH.loads_backends


def test_pip_shows_nothing(switch: Switch, tmp_path: Path) -> None:
    """What pip lists, and a user takes along as requirements, names nothing of the site's."""
    found = [
        run(
            [sys.executable, "-m", "pip", "list", "--disable-pip-version-check"],
            variables(tmp_path, on),
            tmp_path,
        )
        for on in (None, switch)
    ]
    assert found[0].returncode == found[1].returncode == 0
    assert (found[0].stdout, found[0].stderr) == (found[1].stdout, found[1].stderr)


BESIDE = """
import sys
sys.path.append(sys.argv[1])
import dshealthd_site
step = dshealthd_site.FirstStep(None)
for _ in range(2):
    step(None, None, None)
"""
"""What torch does with the hook that the archive gives it."""


def test_defect_of_ours(switch: Switch, tmp_path: Path) -> None:
    """Whatever is wrong beside the archive, or gone, the steps of a training go on."""
    copied = Switch(tmp_path / "training", switch.python)
    directory.make(copied.directory)
    broken = copied.directory / "dshealthd/training/site.py"
    for damage in ("def hook(): 1 / 0", "import nothing", "(", None, "raise RuntimeError"):
        broken.unlink() if damage is None else broken.write_text(damage)
        command = [str(switch.python), "-c", BESIDE, copied.archive]
        ended = run(command, variables(tmp_path, None, **RANK), tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), damage


VARIABLES = {
    "NCCL_INSPECTOR_ENABLE": "1",
    "NCCL_INSPECTOR_PROM_DUMP": "1",
    "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "30000000",
}


class Gate:
    """The switch of a site that has put NCCL's Inspector beside it, in a rank of this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        archive = folder / "site.whl"
        archive.mkdir()
        copied = shutil.copy2(GATE, archive)
        spec = importlib.util.spec_from_file_location("gate", copied)
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.plugin = folder / self.module.PLUGIN
        self.plugin.touch()
        self.dumps = folder / f"dumps-{os.getuid()}"
        self.home = folder
        # It has no torch, so it waits for no step.
        monkeypatch.delitem(sys.modules, "torch.optim.optimizer", raising=False)
        monkeypatch.setattr(self.module, "DIRECTORY", str(folder / "dumps-%d"))
        monkeypatch.setattr(self.module, "CONFIGURATIONS", (f"{folder}/.nccl.conf",))
        environ = {name: value for name, value in os.environ.items() if "NCCL" not in name}
        monkeypatch.setattr(os, "environ", environ | RANK)

    def load(self, **environ: str) -> dict[str, str]:
        """Load it with these variables; return NCCL's."""
        os.environ.update(environ)
        self.module.load()
        return {name: value for name, value in os.environ.items() if "NCCL" in name}


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return the switch of a site that has the plugin."""
    return Gate(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("environ", "waits"),
    [({}, True), ({"DSHEALTHD_HEARTBEAT": "0"}, False), (dict.fromkeys(RANK), False)],
)
def test_whose_first_step_is_waited_for(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str | None], *, waits: bool
) -> None:
    """That of a rank which does not decline."""
    hooks: list[object] = []
    torch = SimpleNamespace(register_optimizer_step_post_hook=hooks.append)
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", torch)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name, value in environ.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    gate.module.load()
    assert len(hooks) == waits


@pytest.mark.parametrize("before", ["", "/mine:", "/mine:/yours:", ":"])
def test_children_of_who_declines(gate: Gate, before: str) -> None:
    """They get the path that they had without the switch: a launcher may pass on this variable
    alone.
    """
    archive = os.path.dirname(str(gate.module.__file__))
    gate.load(DSHEALTHD_HEARTBEAT="0", PYTHONPATH=before + archive)
    assert os.environ.get("PYTHONPATH") == (before.removesuffix(":") or None)


def test_inspector_of_a_site(gate: Gate) -> None:
    """A rank's NCCL loads the plugin and writes its numbers where the agent looks for them, in a
    directory that is the user's alone; the next job uses it again.
    """
    expected = VARIABLES | {
        "NCCL_PROFILER_PLUGIN": str(gate.plugin),
        "NCCL_INSPECTOR_DUMP_DIR": str(gate.dumps),
    }
    for _ in range(2):
        assert gate.load() == expected
        assert stat.S_IMODE(gate.dumps.stat().st_mode) == 0o700
        for name in expected:
            del os.environ[name]
    assert GATE.read_text().count(f'DIRECTORY = "{nccl_inspector.SITE_DIRECTORY}"') == 1
    assert nccl_inspector.SITE_PLUGIN.endswith(f"/{gate.module.PLUGIN}")


@pytest.mark.parametrize(
    "own",
    [
        {"NCCL_PROFILER_PLUGIN": "mine"},
        {"NCCL_INSPECTOR_ENABLE": "0"},
        {"NCCL_INSPECTOR_DUMP_DIR": "/mine"},
    ],
)
def test_inspector_of_the_user(gate: Gate, own: dict[str, str]) -> None:
    """What a job sets is left as it is, and nothing is added."""
    assert gate.load(**own) == own
    assert not gate.dumps.exists()


@pytest.mark.parametrize(
    ("text", "taken"), [("NCCL_PROFILER_PLUGIN=mine\n", False), ("NCCL_DEBUG=WARN\n", True)]
)
def test_configuration_of_the_user(gate: Gate, text: str, *, taken: bool) -> None:
    """So is what NCCL's configuration file says, which variables would hide."""
    (gate.home / ".nccl.conf").write_text(text)
    assert bool(gate.load()) is taken
    for name in [name for name in os.environ if "NCCL" in name]:
        del os.environ[name]
    (gate.home / ".nccl.conf").unlink()
    (gate.home / "mine").write_text(text)
    conf = {"NCCL_CONF_FILE": str(gate.home / "mine")}
    assert (gate.load(**conf) != conf) is taken


@pytest.mark.parametrize("how", ["link", "open", "file", "conf", "declined", "no rank", "absent"])
def test_no_inspector(gate: Gate, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Nothing is set where another user could plant a link, where the configuration cannot be
    read, where the user declines, in a process that is no rank, and without the plugin.
    """
    environ = {}
    if how == "link":
        (gate.home / "theirs").mkdir()
        gate.dumps.symlink_to(gate.home / "theirs")
    elif how == "open":
        gate.dumps.mkdir()
        gate.dumps.chmod(0o777)
    elif how == "file":
        gate.dumps.touch()
    elif how == "conf":
        (gate.home / ".nccl.conf").mkdir()
    elif how == "declined":
        environ["DSHEALTHD_HEARTBEAT"] = "0"
    elif how == "no rank":
        for name in RANK:
            monkeypatch.delitem(os.environ, name)
    else:
        gate.plugin.unlink()
    assert gate.load(**environ) == {}


def test_inspector_in_a_directory_of_another_user(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that somebody else has made is not used."""
    gate.dumps.mkdir(mode=0o700)
    user = os.getuid()
    monkeypatch.setattr(gate.module, "DIRECTORY", f"{gate.dumps}%.0s")
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert gate.load() == {}


def test_variables_are_those_of_the_agent() -> None:
    """The switch takes for a rank what the agent finds in `/proc`."""
    of_agent = environment._RANKS.values()
    assert {rank: size for rank, _, size in of_agent} == report.RANKS
    names = ast.parse(GATE.read_text()).body
    (ranks,) = [
        node.value
        for node in names
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "RANKS"
    ]
    assert ast.literal_eval(ranks) == tuple(report.RANKS)


def test_archive(switch: Switch) -> None:
    """Other bytes need another name; what is in it is Python 3.9."""
    assert hashlib.sha256(Path(switch.archive).read_bytes()).hexdigest() == DIGEST
    ast.parse(GATE.read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("name", ["environment.sh", "modulefile"])
def test_files_name_the_archive(name: str) -> None:
    """What is installed adds what is installed."""
    text = (directory.HERE / "site" / name).read_text()
    assert set(re.findall(r"/\S+\.whl", text)) == {
        f"/usr/lib/dshealthd/training/{directory.ARCHIVE}"
    }


GPU = {"SLURM_JOB_GPUS": "0,1"}
ARCHIVE = f"/usr/lib/dshealthd/training/{directory.ARCHIVE}"
PATHS = [
    (GPU, None, ARCHIVE),
    ({"CUDA_VISIBLE_DEVICES": "0"}, "/mine:", f"/mine::{ARCHIVE}"),
    (GPU, "/a b:/c", f"/a b:/c:{ARCHIVE}"),
    (GPU, f"{ARCHIVE}:/mine", None),
    (GPU, "/two\n/lines", None),
    (GPU | {"DSHEALTHD_HEARTBEAT": "0"}, "/mine", None),
    ({}, "/mine", None),
]


def installed(switch: Switch, tmp_path: Path, name: str) -> Path:
    """Return a script of the directory that takes that directory for the installed one."""
    for file in (name, "environment.sh"):
        text = (switch.directory / file).read_text()
        changed = re.sub(r"/usr/lib/dshealthd/training(?!/dshealthd_site)", str(tmp_path), text)
        (tmp_path / file).write_text(changed)
        (tmp_path / file).chmod(0o755)
    return tmp_path / name


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("environ", "before", "after"), PATHS)
def test_task_prolog(
    switch: Switch,
    tmp_path: Path,
    shell: str,
    environ: dict[str, str],
    before: str | None,
    after: str | None,
) -> None:
    """Jobs with GPUs get the archive behind what they have, once; other jobs nothing."""
    prolog = installed(switch, tmp_path, "task-prolog")
    path = {} if before is None else {"PYTHONPATH": before}
    ended = run([shell, str(prolog)], {"PATH": os.defpath, **environ, **path}, tmp_path)
    printed = "" if after is None else f"export PYTHONPATH={after}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, printed, "")


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("text", ["exit 3\n", "(\n", "no-command\n", None])
def test_task_prolog_beside_a_broken_package(
    switch: Switch, tmp_path: Path, shell: str, text: str | None
) -> None:
    """A package that is damaged or gone fails no task, and changes nothing."""
    prolog = installed(switch, tmp_path, "task-prolog")
    (tmp_path / "environment.sh").unlink()
    if text is not None:
        (tmp_path / "environment.sh").write_text(text)
    ended = run([shell, str(prolog)], {"PATH": os.defpath, **GPU, "PYTHONPATH": "/mine"}, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "")


PYXIS = GPU | {"PYXIS_VERSION": "0.25.0"}
CONTAINERS = [
    (GPU, "", f"PYTHONPATH={ARCHIVE}\n"),
    (GPU, "PYTHONPATH=/image\n", f"PYTHONPATH=/image:{ARCHIVE}\n"),
    (PYXIS | {"PYTHONPATH": "/job"}, "", f"PYTHONPATH=/job:{ARCHIVE}\n"),
    (PYXIS | {"PYTHONPATH": "/job"}, "PYTHONPATH=/image\n", f"PYTHONPATH=/image:{ARCHIVE}\n"),
    (PYXIS | {"PYTHONPATH": ARCHIVE}, "", ""),
    (GPU | {"PYTHONPATH": "/job"}, "", ""),
    (GPU | {"DSHEALTHD_HEARTBEAT": "0"}, "", ""),
    ({}, "PYTHONPATH=/image\n", ""),
]


@pytest.mark.parametrize(("environ", "before", "added"), CONTAINERS)
def test_enroot_hook(
    switch: Switch, tmp_path: Path, environ: dict[str, str], before: str, added: str
) -> None:
    """A container has the directory, and the archive behind the path that it would have had."""
    hook = installed(switch, tmp_path, "enroot-hook.sh")
    shell_script(tmp_path / "enroot-mount", 'echo "$@" >>"$0.log"\ncat >>"$0.log"')
    file = tmp_path / "environ"
    file.write_text(f"OTHER=1\n{before}")
    paths = {"PATH": f"{tmp_path}:{os.defpath}", "ENROOT_ENVIRON": str(file), "ENROOT_ROOTFS": "/r"}
    ended = run(["bash", str(hook)], {**environ, **paths}, tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert file.read_text() == f"OTHER=1\n{before}{added}"
    flags = "none x-create=dir,bind,ro,nosuid,nodev,nofail,silent"
    assert (tmp_path / "enroot-mount.log").read_text().splitlines() == [
        "--root /r -",
        f"{tmp_path} {tmp_path} {flags}",
    ]
