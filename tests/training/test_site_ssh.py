"""A site's switch under DeepSpeed's launcher, which starts ranks by pdsh over a real ssh."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import free_port
from tests.command_line import shell_script
from tests.doctor.job.sshd import sshd
from tests.training import foreign
from tests.training.agents_end import AgentsEnd
from tests.training.foreign import Switch
from tests.waiting import until

PDSH = "pdsh"
HOSTS = ("127.0.0.1", "127.0.0.2")
STEPS = 3
SCRIPT = Path(__file__).with_name("script_site.py")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("takes deepspeed", allow_module_level=True)
if shutil.which(PDSH) is None:
    pytest.skip("pdsh is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Switch:
    """An environment with DeepSpeed and without dshealthd, beside the directory of a package."""
    torch = foreign.torch()
    assert torch is not None
    return foreign.switch(tmp_path_factory.mktemp("site"), torch)


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with an `ssh` that reaches the test's own sshd, first in PATH."""
    folder = tmp_path_factory.mktemp("sshd")
    with sshd(folder) as client:
        script = f'PATH={os.environ["PATH"]} exec {client} "$@"'
        yield shell_script(folder / "bin/ssh", script).parent


def launch(
    switch: Switch, ssh: Path, folder: Path, end: AgentsEnd, *words: str, **more: str
) -> str:
    """Run a script on the hosts of a hostfile by DeepSpeed's launcher; return what is printed."""
    # What the tests need beyond the switch; a user's own is read here too.
    (folder / ".deepspeed_env").write_text(
        f"ENDS={folder / 'ends'}\nDS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n"
    )
    (folder / "ends").mkdir()
    environ = {
        "PATH": f"{ssh}:{os.environ['PATH']}",
        "HOME": str(folder),
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": f"/mine:{switch.archive}",
        **more,
    }
    command = [str(switch.python), "-m", "deepspeed.launcher.runner", "--launcher", PDSH]
    command += ["--hostfile", "hostfile", "--no_local_rank", "--force_multi"]
    command += ["--master_addr", HOSTS[0], "--master_port", str(free_port())]
    # A session of its own, and never SIGINT or SIGTERM: at either the launcher runs `pkill -f`.
    with (folder / "said").open("wb") as file:
        launcher = subprocess.Popen(
            [*command, *words],
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ended() -> bool:
        end.release(folder / "ends")
        return launcher.poll() is not None

    try:
        until(ended, (folder / "said").read_text)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(60)
    said = (folder / "said").read_text()
    assert launcher.returncode == 0, said
    return said


def test_ranks_over_ssh(switch: Switch, ssh: Path, agents_end: AgentsEnd, tmp_path: Path) -> None:
    """The launcher passes the switch on, to both hosts."""
    (tmp_path / "hostfile").write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    said = launch(switch, ssh, tmp_path, agents_end, str(SCRIPT), "ddp", str(STEPS))
    assert said.count(" loss ") == len(HOSTS) * STEPS
    assert [message.step for message in agents_end.messages()] == [STEPS] * len(HOSTS)


def test_who_declines(switch: Switch, agents_end: AgentsEnd, tmp_path: Path) -> None:
    """The switch of a user who declines is not passed on: their variable is left behind."""
    (tmp_path / "hostfile").write_text(f"{HOSTS[0]} slots=1\n")
    for program in (PDSH, "ssh"):
        shell_script(tmp_path / program, 'echo "$@"')
    said = launch(switch, tmp_path, tmp_path, agents_end, "rank.py", DSHEALTHD_HEARTBEAT="0")
    *_, paths = re.findall(r"export PYTHONPATH=([^;\s]+);", said)  # of the log, and of pdsh
    assert "/mine" in paths.split(":")
    assert switch.archive not in paths.split(":")
