"""The package as a training environment gets it.

Alone, for old interpreters too, and started by a variable.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dshealthd
import dshealthd.training
from tests.training import foreign
from tests.training.agents_end import LINGER, AgentsEnd

PACKAGE = Path(dshealthd.training.__file__).parent
PROJECT = PACKAGE.parents[1] / "deploy" / "training"
OLDEST = (3, 9)
SCRIPT = f"""
import sys
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.grad = torch.ones(1)
    optimizer.step()
print(__name__, sys.argv[1:], "dshealthd.training" in sys.modules){LINGER}"""


@pytest.mark.parametrize("file", sorted(PACKAGE.glob("*.py")), ids=lambda file: file.name)
def test_stands_alone(file: Path) -> None:
    """Each module is Python 3.9, and imports only the standard library and its own package."""
    tree = ast.parse(file.read_text(), feature_version=OLDEST)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module or "")
    own = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
    assert all(name.startswith("dshealthd.training") for name in own), own


def test_version() -> None:
    """The distribution for trainings has the version of dshealthd."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["version"] == dshealthd.__version__


def test_readme() -> None:
    """The calls that the documentation shows are those of the trainings that the tests run."""
    (block,) = re.findall(
        r"```python\n(from dshealthd\.training .*?)```",
        (PACKAGE.parents[1] / "docs/jobs.md").read_text(),
        re.DOTALL,
    )
    scripts = "".join(
        (Path(__file__).parent / f"script_{name}.py").read_text() for name in ("ddp", "deepspeed")
    )
    calls = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert len(list(filter(None, calls))) == 3
    assert all(call in scripts for call in calls)


INTERPRETERS = [*(f"python3.{minor}" for minor in range(OLDEST[1], 15)), "python3.14t"]
"""Those that trainings have; the last is the one without a global lock."""


@pytest.mark.parametrize("name", [sys.executable, *INTERPRETERS], ids=os.path.basename)
def test_runs_without_the_agent_installed(name: str, agents_end: AgentsEnd, tmp_path: Path) -> None:
    """A copy of the package alone sends heartbeats under every interpreter here, without torch."""
    interpreter = shutil.which(name)
    # A name may be that of a wrapper without the interpreter.
    if interpreter is None or subprocess.run([interpreter, "-c", ""], check=False).returncode:
        pytest.skip(f"{name} is not installed")
    site = tmp_path / "site" / "dshealthd" / "training"
    shutil.copytree(PACKAGE, site, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "from dshealthd.training.heartbeat import Heartbeat; h = Heartbeat(step=4); "
        "h.loss(1.0); h.step(); print(h.closed)"
    )
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": os.defpath}
    command = [interpreter, "-W", "error", "-c", code + LINGER]
    (ended,) = agents_end.watch(command, environment, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")
    message = agents_end.message()
    assert (message.step, message.loss_finite) == (5, True)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch and the distribution, installed as users do."""
    if (torch := foreign.torch()) is None:
        pytest.skip("torch is not installed")
    directory = tmp_path_factory.mktemp("environment")
    made = ["-w", str(directory), str(PROJECT)]
    wheel = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *wheel, *made], check=True, timeout=100)
    python = foreign.environment(directory / "venv", torch)
    install = f"-m pip --python {python} install -q --no-deps --no-index".split()
    subprocess.run(
        [sys.executable, *install, *map(str, directory.glob("*.whl"))], check=True, timeout=100
    )
    (directory / "script.py").write_text(SCRIPT)
    return python


def run(python: Path, agents_end: AgentsEnd, *arguments: str, heartbeat: str | None = None) -> str:
    """Run a program in the environment and return what it prints."""
    variables = {"PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    if heartbeat is not None:
        variables["DSHEALTHD_HEARTBEAT"] = heartbeat
    folder = python.parents[2]
    command = [str(python), "-W", "ignore", *arguments]
    (ended,) = agents_end.watch(command, variables, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("heartbeat", ["0", "", None])
def test_nothing_happens_unasked(
    environment: Path, agents_end: AgentsEnd, heartbeat: str | None
) -> None:
    """Being installed changes nothing: without the variable not even a module is imported."""
    code = "import sys; print(any(name.startswith('dshealthd') for name in sys.modules))"
    assert run(environment, agents_end, "-c", code, heartbeat=heartbeat) == "False\n"


def test_variable_alone(environment: Path, agents_end: AgentsEnd) -> None:
    """With the variable set, a script that knows nothing of it reports its steps."""
    printed = run(environment, agents_end, "script.py", "--lr", "1", heartbeat="1")
    assert printed == "__main__ ['--lr', '1'] True\n"
    assert agents_end.message().step == 3


@pytest.mark.parametrize("how", [["module.py"], ["-m", "module"]])
def test_started_by_the_package(environment: Path, agents_end: AgentsEnd, how: list[str]) -> None:
    """`python -m dshealthd.training` runs a script or a module as Python would, and waits for its
    import of torch.
    """
    module = environment.parents[2] / "module.py"
    module.write_text("import sys; print(__name__, sys.argv[1:], type(sys.meta_path[0]).__name__)")
    printed = run(environment, agents_end, "-m", "dshealthd.training", *how, "x")
    assert printed == "__main__ ['x'] OptimizerImportHook\n"


def test_switch_beats_the_script(environment: Path, agents_end: AgentsEnd) -> None:
    """`DSHEALTHD_HEARTBEAT=0` turns off what the script attaches."""
    code = "from dshealthd.training.heartbeat import Heartbeat; Heartbeat().step()" + LINGER
    run(environment, agents_end, "-c", code, heartbeat="0")
    assert agents_end.messages() == []
