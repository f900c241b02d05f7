"""Checkpoints as the installed DeepSpeed saves them, then damaged as disks and jobs damage them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.processes import free_port
from dshealthd.doctor.job.context import JobContext
from tests.doctor.job.asking import CRITICAL, OK, asked, outcomes, results, texts

pytestmark = pytest.mark.timeout(600)
TAG = "global_step1"
PROGRAM = Path(__file__).with_name("save_checkpoints.py")
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of the ZeRO stages, saved by two ranks, and a universal one."""
    pytest.importorskip("deepspeed")
    directory = tmp_path_factory.mktemp("checkpoints")
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(directory), str(free_port())],
        capture_output=True,
        timeout=500,
        check=False,
        env={**os.environ, **quiet},
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return directory


@pytest.fixture
def stage(saved: Path, tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that gives a copy of the checkpoint of a stage."""

    def copy(number: int) -> Path:
        return Path(shutil.copytree(saved / f"stage{number}", tmp_path / f"stage{number}"))

    return copy


def job(
    directory: Path, *more: str, stage: int | None = None, universal: bool = False
) -> JobContext:
    """Return a job that will load a checkpoint, with a configuration of this stage."""
    if stage is not None:
        config = directory.parent / "ds_config.json"
        load = '"checkpoint": {"load_universal": true}, ' if universal else ""
        config.write_text(
            f'{{{load}"train_batch_size": 2, "zero_optimization": {{"stage": {stage}}}}}'
        )
        more = (*more, "--deepspeed-config", str(config))
    return asked("--checkpoint", str(directory), "--ranks", "2", *more)


@pytest.mark.parametrize(("number", "configured"), [(0, 0), (1, 1), (1, 2), (3, 3)])
def test_complete(stage: Callable[[int], Path], number: int, configured: int) -> None:
    """What DeepSpeed has saved is complete and fits the same job; 1 and 2 are interchangeable."""
    assert outcomes("checkpoint", job(stage(number), stage=configured)) == [OK]


def test_universal(stage: Callable[[int], Path]) -> None:
    """A converted checkpoint loads with any number of ranks, if the configuration says so."""
    directory = stage(1)
    arguments = ("--tag", f"{TAG}_universal")
    for tag in ((), arguments):  # which `latest_universal` names as well
        assert outcomes("checkpoint", job(directory, *tag, stage=3, universal=True)) == [OK]
    (result,) = results("checkpoint", job(directory, *arguments, stage=3))
    assert result.outcome is CRITICAL
    assert "is a universal checkpoint, but the configuration has checkpoint.load_universal off" in (
        result.text
    )
    (directory / "latest_universal").write_text(TAG)
    (result,) = results("checkpoint", job(directory, stage=1, universal=True))
    assert result.outcome is CRITICAL
    assert "is not a universal checkpoint" in result.text
    assert "ds_to_universal" in result.remedy


def _delete(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / TAG / name).unlink()


def _cut(directory: Path) -> None:
    file = directory / TAG / OPTIMIZER
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(directory: Path) -> None:
    for file in (directory / TAG).iterdir():
        file.unlink()


FAULTS: dict[str, tuple[int, Callable[[Path], object], str]] = {
    "tag": (
        1,
        lambda directory: (directory / "latest").write_text("global_step9"),
        "global_step9, named in `latest`, does not exist; available tags: global_step1",
    ),
    "climbing tag": (
        1,
        lambda directory: (directory / "latest").write_text("../../etc"),
        "is not a valid checkpoint name",
    ),
    "first optimizer": (
        1,
        _delete("zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        "1 of 2 optim_states files are missing: data-parallel ranks 0",
    ),
    "last optimizer": (  # leaves a whole checkpoint of fewer ranks: not the job's
        1,
        _delete(OPTIMIZER),
        "was saved by 1 data-parallel rank, but the job has 2 (--ranks)",
    ),
    "parameters": (
        3,
        _delete("zero_pp_rank_1_mp_rank_00_model_states.pt"),
        "the parameters of 1 rank but the optimizer states of 2",
    ),
    "model": (1, _delete("mp_rank_00_model_states.pt"), "has no model"),
    "empty": (
        1,
        lambda directory: (directory / TAG / OPTIMIZER).write_bytes(b""),
        f"{OPTIMIZER} is empty",
    ),
    "cut off": (1, _cut, f"{OPTIMIZER} is truncated"),
    "folder": (1, _empty, "has no files"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged(stage: Callable[[int], Path], fault: str) -> None:
    """Each damage is found by name, and nothing of the files is unpickled."""
    number, damage, words = FAULTS[fault]
    directory = stage(number)
    damage(directory)
    found = results("checkpoint", job(directory, stage=number))
    assert {result.outcome for result in found} == {CRITICAL}, texts(found)
    assert words in texts(found)
    assert str(directory) in texts(found)


@pytest.mark.parametrize(("saved_with", "configured"), [(1, 3), (3, 2), (3, 0)])
def test_stages(stage: Callable[[int], Path], saved_with: int, configured: int) -> None:
    """ZeRO 3 and the others do not load each other's."""
    found = results("checkpoint", job(stage(saved_with), stage=configured))
    assert f"the configuration has stage {configured}" in texts(found)
    assert {result.outcome for result in found} == {CRITICAL}


def test_remedy_of_latest(stage: Callable[[int], Path]) -> None:
    """Pasting the remedy of a missing `latest` makes the checkpoint one that loads."""
    directory = stage(1)
    (directory / "latest").unlink()
    (result,) = results("checkpoint", job(directory, stage=1))
    assert result.outcome is CRITICAL
    assert f"{directory} has no file `latest`" in result.text
    subprocess.run(result.remedy, shell=True, check=True)
    assert outcomes("checkpoint", job(directory, stage=1)) == [OK]


def test_pickles_are_not_run(tmp_path: Path) -> None:
    """A checkpoint with code in it is looked at by name and form alone."""
    import pickle

    proof = tmp_path / "proof"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {proof}",)

    folder = tmp_path / "c" / TAG
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(TAG)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (folder / name).write_bytes(pickle.dumps(Evil()))
    assert outcomes("checkpoint", asked("--checkpoint", str(folder.parent), "--ranks", "1")) == [OK]
    assert not proof.exists()


def test_names_of_links(tmp_path: Path) -> None:
    """FIFOs, sockets and links to devices in a checkpoint are not opened."""
    folder = tmp_path / "c" / TAG
    folder.mkdir(parents=True)
    (folder.parent / "latest").symlink_to("/dev/zero")
    found = results("checkpoint", asked("--checkpoint", str(folder.parent)))
    assert [result.outcome for result in found] == [CRITICAL]
    assert "is not a regular file" in texts(found)
    (folder.parent / "latest").unlink()
    (folder.parent / "latest").write_text(TAG)
    os.mkfifo(folder / "mp_rank_00_model_states.pt")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").symlink_to("/dev/zero")
    found = results("checkpoint", asked("--checkpoint", str(folder.parent)))
    assert "has no files" in texts(found)


def test_so_many_names_are_shown(tmp_path: Path) -> None:
    """The last four tags, and eight files or ranks of each kind, with the number of others."""
    for number in range(5):
        (tmp_path / f"global_step{number}").mkdir()
    (tmp_path / "latest").write_text("none")
    said = texts(results("checkpoint", asked("--checkpoint", str(tmp_path))))
    assert said.endswith(f"tags: {', '.join(f'global_step{number}' for number in range(1, 5))}")
    for number in (8, 9):
        folder = tmp_path / "global_step4"
        (tmp_path / "latest").write_text(folder.name)
        for rank in range(number):
            (folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt").touch()
        (folder / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt").write_bytes(b"x")
        said = texts(results("checkpoint", asked("--checkpoint", str(tmp_path))))
        assert said.count("states.pt is empty") == 8
        assert ("more file" in said) == (number == 9)
        assert ("data-parallel ranks 0, 1, 2, 3, 4, 5, 6, 7, ..." in said) == (number == 9)
        (folder / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt").unlink()


def test_no_directory(tmp_path: Path) -> None:
    """A path that is not there is critical; one that is no directory as well."""
    (result,) = results("checkpoint", asked("--checkpoint", str(tmp_path / "none")))
    assert result.outcome is CRITICAL
    assert str(tmp_path / "none") in result.text
    file = tmp_path / "file"
    file.touch()
    (result,) = results("checkpoint", asked("--checkpoint", str(file)))
    assert result.outcome is CRITICAL
