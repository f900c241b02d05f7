"""What holds for all of the agent's source, read as text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dshealthd

SOURCE = Path(dshealthd.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
COMMANDS = ("doctor/", "explain/", "free_port_command.py", "slurm/", "status/")
"""What never runs in the agent: a thread or a child there ends with its command."""
BROAD = {
    "core/result.py": "a defect in one collector must not end the agent",
    "training/heartbeat.py": "no defect of ours may end a training",
    "doctor/processes.py": "whatever fails in a check becomes its reason, in a process of its own",
    "doctor/job_sources/inspect_deepspeed.py": "DeepSpeed raises what it likes, and runs apart",
}
"""The only modules that catch every exception and go on."""
FINAL = {"evidence/step.py": "a forked child: nothing may return into the parent's code"}
"""Modules that catch even BaseException and do not raise it again."""
THREADS = {"Thread", "ThreadPoolExecutor", "to_thread", "run_in_executor"}
"""Ways to start a thread."""
THREADS_ELSEWHERE = {
    "nvrx/server.py": "gRPC's own, in a process of its own",
    "probe/workers/worker.py": "a process of the training environment",
}
CHILDREN = {"Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "execv"}
"""Ways to start another program."""
CHILDREN_ELSEWHERE = {
    "core/state_file.py": "with an empty environment, from a thread",
    "evidence/stacks.py": "py-spy, from the collecting process",
    "probe/workers/launch.py": "a process of its own, which becomes the interpreter it has checked",
    "probe/workers/worker.py": "a process of the training environment",
}


def parsed(file: Path) -> ast.AST:
    """Return a module as a tree."""
    return ast.parse(file.read_text(encoding="utf-8"))


def caught(tree: ast.AST) -> set[str]:
    """Return the broad exceptions that a module catches without raising them again at the end."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            text = "BaseException" if node.type is None else ast.unparse(node.type)
            found |= {"Exception", "BaseException"} & set(text.strip("()").split(", "))
    return found


def test_broad_handlers_are_few() -> None:
    """Every exception is caught in few places, each for one reason; elsewhere it has a name."""
    found = {str(file.relative_to(SOURCE)): caught(parsed(file)) for file in FILES}
    assert {name for name, kinds in found.items() if kinds} == {*BROAD, *FINAL}
    assert all(found[name] == {"Exception"} for name in BROAD)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("except Exception: pass", {"Exception"}),
        ("except (ValueError, Exception): pass", {"Exception"}),
        ("except: pass", {"BaseException"}),
        ("except BaseException: raise", set()),
        ("except OSError: pass", set()),
    ],
)
def test_a_broad_handler_would_be_seen(text: str, kinds: set[str]) -> None:
    """The check sees each way to write one."""
    assert caught(ast.parse(f"try:\n  x\n{text}")) == kinds


def names(tree: ast.AST) -> set[str]:
    """Return the names that a module uses, of attributes too."""
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def users(wanted: set[str]) -> set[str]:
    """Return the modules of the agent that use one of the names."""
    found = {str(file.relative_to(SOURCE)) for file in FILES if names(parsed(file)) & wanted}
    return {module for module in found if not module.startswith(COMMANDS)}


def test_threads_of_the_agent_start_in_one_module() -> None:
    """Nothing waits in threads of the loop's own executor, which would keep the agent from ending."""
    assert users(THREADS) == {"core/background.py", *THREADS_ELSEWHERE}


def test_children_of_the_agent_start_in_one_module() -> None:
    """What systemd gives to the agent alone does not reach a child: one place scrubs it."""
    assert users(CHILDREN) == {"core/child.py", *CHILDREN_ELSEWHERE}


def test_an_agent_without_probes_does_without_them() -> None:
    """To load a configuration, and to import the agent, takes the options of the probes alone; and
    the agent imports neither NVML nor torch.
    """
    code = (
        "import sys\nimport dshealthd.config, dshealthd.agent\n"
        "print(*(name for name in sys.modules if name.startswith(('dshealthd.probe', 'dshealthd.nvml.s',"
        " 'pynvml', 'torch'))))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(loaded) == {
        "dshealthd.probe",
        "dshealthd.probes",
        "dshealthd.probe.members",
        "dshealthd.probe.members.hostlist",
        "dshealthd.probe.options",
    }
