"""A Slurm batch script: its `#SBATCH` lines, the variables it sets, and the launcher it calls.

Nothing is run: `shell` says what a shell would do.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dshealthd.doctor.job.sources import (
    deepspeed_config,
    expansion,
    kept,
    launcher_command,
    programs,
    reach,
    shell,
    shell_faults,
    slurm_faults,
)
from dshealthd.doctor.job.sources.calls import Call, calls
from dshealthd.doctor.job.sources.launcher_command import (
    ONLY_WITH,
    SHORT,
    LauncherCommand,
    long_option,
)
from dshealthd.doctor.job.sources.shell_faults import ScriptFault
from dshealthd.doctor.job.sources.slurm_options import (
    gpus_per_node,
    tasks_per_node,
    together,
    with_nodes,
)
from dshealthd.doctor.job.sources.source import training_variables
from dshealthd.doctor.job.sources.steps import groups
from dshealthd.jobs.environment import natural

ALLOCATION = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_JOB_NODELIST": "nodelist",
}
"""Variables that Slurm sets in the script of a job, by what the job requested."""
_COPIES = frozenset({"cat", "tee"})
"""Programs whose output is their here-document."""
_DEFAULTED = re.compile(r"\$\{(\w+):?-")
_SEPARATOR = re.compile(r"#SBATCH\s+hetjob\b")
"""Stands between the components of a heterogeneous job (slurm.schedmd.com)."""


@dataclass(frozen=True, slots=True)
class SlurmScript:
    """What a batch script requests and starts."""

    directives: Mapping[str, str]
    """Options in its `#SBATCH` lines, by long name."""
    exports: Mapping[str, str]
    """Variables set before the launcher; a `$` stands in what only a shell can compute."""
    command: LauncherCommand | None
    problem: str = ""
    """Why the launcher is not known, if the script could not be parsed or it depends on
    conditions."""
    carried: Mapping[str, bool] = field(default_factory=dict)
    """Variables of training that it sets for other programs, as it does not read them itself, and
    whether it exports them.
    """
    left: Sequence[str] = ()
    """Those of them that the shells of the tasks read."""
    strange: Sequence[str] = ()
    """Options that sbatch does not have."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Variables that it reads and Slurm does not set, with the option that would."""
    faults: Sequence[ScriptFault] = ()
    """What it states in vain."""
    calls: Sequence[Call] = ()
    """Its calls of other programs."""
    program: str = ""
    """The text of the training's program, if that is there."""
    alternatives: Sequence[LauncherCommand] = ()
    """Where conditions decide which launch runs: each of them."""
    others: int = 0
    """Components of a heterogeneous job in which its launch does not run."""
    config: deepspeed_config.Parsed | None = None
    """The configuration of DeepSpeed that it writes itself, if its text is known."""


def requested(
    command: LauncherCommand | None, script: SlurmScript | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return what a job requests of Slurm: its directives, overridden by the options of srun.

    Without a script, inside the job, Slurm's variables say what it was given.
    """
    outer = command.find("srun") if command else None
    found = (
        script.directives
        if script
        else {option: variables[name] for name, option in ALLOCATION.items() if name in variables}
    )
    step = outer.options if outer else {}
    whole = {**with_nodes(found), **step}
    nodes, tasks = natural(whole.get("nodes")), natural(step.get("ntasks"))
    if nodes and tasks and tasks < nodes:  # a step has no node without a task (srun(1), --nodes)
        whole["nodes"] = str(tasks)
    return whole


def parse(
    text: str, environment: Mapping[str, str] = {}, read: programs.Read = programs.no_file
) -> SlurmScript:
    """Parse a Slurm script that gets this environment; ValueError if it is not a script.

    `read` returns the text of a file that it runs; empty where there is none.
    """
    refused: list[ScriptFault] = []
    if "\n#SBATCH" in text and "\r\n" in text:
        refused = [
            ScriptFault(" contains lines that end with CR LF: sbatch refuses it", "CR LF", "\r$")
        ]
    elif "\n#SBATCH" in text and not text.startswith("#!"):
        refused = [ScriptFault(" does not begin with #!: sbatch refuses it", "#!", "^#!")]
    text = text.replace("\r\n", "\n")
    if not text.startswith("#!") and not refused:
        raise ValueError("is not a batch script: it does not begin with #!")
    components, ignored = _head(text)
    directives = components[0]  # the shell runs in the first
    problem = ""
    if programs.is_foreign(text):
        program, text = programs.interpreter(text), ""
        problem = f"only #SBATCH lines of a script for {program} are read"
    lines = shell.without_documents(text, of_others=True)
    defaulted = {name for name in _DEFAULTED.findall(text) if name in environment}
    # What is no number may be a secret.
    variables = {
        name: environment[name] if natural(environment[name]) else "$_" for name in defaulted
    }
    variables |= _slurm_variables(directives)
    for number, one in enumerate(components) if components[1:] else ():
        ends = f"_HET_GROUP_{number}"  # slurm.schedmd.com/heterogeneous_jobs.html
        variables |= {f"{name}{ends}": text for name, text in _slurm_variables(one).items()}
    given = frozenset(variables)
    seen: list[shell.ShellCommand] = []
    same = os.path.normpath

    def written(name: str) -> str:
        """Return the text of a file that the script writes itself; empty where it does not."""
        copies = [one for one in seen if os.path.basename(one.words[0]) in _COPIES]
        files = [one for one in copies if one.document and one.target]
        return "".join([one.document for one in files if same(name) == same(one.target)][-1:])

    def found(name: str) -> str:
        """Return the text of a file that the script writes, or that is there."""
        return written(name) or read(name)

    reader = shell.Shell(variables, found)
    launch = launcher_command.find_launch(reader.commands(text), variables, read=found, seen=seen)
    steps = [one for one in seen if one.words[0] == "srun"]
    names = {same(word) for one in steps for word in one.words}
    texts = [one for one in steps if programs.runs_shell(one.words)]
    texts += [
        one
        for one in seen
        if one.target
        and same(one.target) in names
        and not programs.is_foreign(one.document, one.target)
    ]
    read_there = {name for one in texts for name in one.reads}
    used = re.sub(r"(?m)^\s*(?:echo|printf)\s[^>|]*$", "", text)  # but for what only shows it
    carried = {
        name: name in reader.exported
        for name in training_variables(launch.variables)
        if name.isidentifier()
        and name not in given
        and not name.startswith("SLURM_")  # which srun reads itself
        # its own default, NAME=${NAME:-VALUE}, is no use of it
        and not re.search(rf"(?<!{name}=)\$\{{?{name}\b|\bunset\b[^\n]*\b{name}\b", used)
    }
    left = {name: name in reader.exported for name in sorted(read_there & reader.assigned - given)}
    outer = launch.command.find("srun") if launch.command else None
    step = outer.options if outer else {}
    chosen = [components[at] for at in groups(step) if at < len(components)]
    called = list(calls(seen, found))
    config = written(launch.command.config) if launch.command else ""
    assigned = {name: name in reader.exported for name in reader.assigned}
    in_front = (
        [name for one in launch.command.chain() for name in one.variables] if launch.command else ()
    )
    needed = {**carried, **training_variables(dict.fromkeys(in_front, ""))}
    crossing = reach.faults(
        *(seen, called, assigned, needed, launch.variables), is_batch=bool(directives)
    )
    return SlurmScript(
        together(chosen),
        launch.variables,
        launch.command,
        problem or launch.problem,
        carried | left,
        tuple(left),
        launcher_command.strange_options(directives, "srun"),
        {name: one for name, one in unset(directives).items() if re.search(rf"\b{name}\b", lines)},
        [
            *refused,
            *slurm_faults.faults(lines, components, ignored, seen, launch),
            *crossing,
            *kept.faults(seen, launch.variables, directives),
            *shell_faults.faults(lines, seen),
        ],
        called,
        found(_program(launch.command)),
        launch.alternatives,
        len(components) - len(chosen),
        deepspeed_config.parse(config) if config and "$" not in config else None,
    )


def _head(text: str) -> tuple[list[dict[str, str]], list[int]]:
    """Return the options in the `#SBATCH` lines of a script, for each component of a heterogeneous
    job, and the lines too late for them.
    """
    components: list[dict[str, str]] = [{}]
    ignored: list[int] = []
    in_head = True
    for number, line in enumerate(shell.without_documents(text).splitlines(), 1):
        if line.startswith("#SBATCH"):
            if not in_head:
                ignored.append(number)
            elif _SEPARATOR.match(line):
                components.append({})
            else:
                components[-1] |= _directives(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            in_head = False
    return components, ignored


def _program(command: LauncherCommand | None) -> str:
    """Return the program of the training, as far as it is one of Python."""
    words = list(command.chain())[-1].arguments if command else ()
    return next((word for word in words if word.endswith(".py")), "")


def _directives(line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except (ValueError, ArithmeticError):
        return found
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = long_option(name, "srun")
        elif word.startswith("-") and len(word) > 1:
            name, value = SHORT["srun"].get(word[1], word[1]), word[2:]
            equals = value
        else:
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        found[name] = value
    return found


def _slurm_variables(directives: Mapping[str, str]) -> expansion.Variables:
    """Return the variables that Slurm sets for a job with these directives.

    The batch shell runs once, as task 0 of the first node, whose name is not known.
    """
    found: expansion.Variables = {
        name: "0" if name.startswith("SLURM_") else "$_"
        for name in expansion.PER_NODE
        if directives or not name.startswith("SLURM")
    }
    if not directives:
        return found
    directives = with_nodes(directives)
    found |= {
        name: directives[option] for name, option in ALLOCATION.items() if option in directives
    }
    if gpus := gpus_per_node(directives):
        found["SLURM_GPUS_ON_NODE"] = str(gpus)
    nodes, each = natural(directives.get("nodes")), natural(directives.get("ntasks-per-node"))
    if "ntasks" not in directives and nodes and each:
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = str(nodes * each)
    found.pop("SLURM_JOB_NUM_NODES", None)  # Slurm chooses one of a range
    if nodes or not {"nodes", "ntasks"} & directives.keys():
        found["SLURM_JOB_NUM_NODES"] = found["SLURM_NNODES"] = str(nodes or 1)
    if nodes and (tasks := tasks_per_node(directives)):
        found["SLURM_TASKS_PER_NODE"] = f"{tasks}(x{nodes})" if nodes > 1 else str(tasks)
    given = {name: directives.get(option) for name, option in ONLY_WITH.items()}
    found |= {name: value for name, value in given.items() if value is not None}
    return found | dict.fromkeys((*expansion.OF_STEP, *unset(directives)), "")


def unset(directives: Mapping[str, str]) -> dict[str, str]:
    """Return variables that Slurm does not set, because the job asks for such a thing with another
    option, each with the option that would set it.
    """
    asked = {option.partition("-")[0] for option in directives}
    asked |= {"gpus"} if gpus_per_node(directives) else set()
    return {
        name: option
        for name, option in ONLY_WITH.items()
        if option not in directives and option.partition("-")[0] in asked
    }


def from_json(document: dict[str, Any]) -> SlurmScript:
    """Return the Slurm script whose fields a JSON document has."""
    command = launcher_command.from_json(document["command"])
    found = {
        "faults": [ScriptFault(*one) for one in document["faults"]],
        "calls": [Call(*one) for one in document["calls"]],
        "alternatives": [*map(launcher_command.from_json, document["alternatives"])],
    }
    return SlurmScript(**document | {"command": command} | found)
