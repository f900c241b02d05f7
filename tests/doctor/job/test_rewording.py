"""A mistake in other words is the same mistake, and what is healthy stays so.

Each rewording keeps what a file means. An ordinary run draws some files for each of them, with a
second rewording on top; `./dev fuzz` draws a thousand.
"""

from __future__ import annotations

import copy
import json
import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dshealthd.doctor.job.context import JobContext
from dshealthd.doctor.job.sources import manifest
from dshealthd.doctor.job.sources.launcher_command import SHORT, VALUED
from dshealthd.doctor.job.sources.source import Source
from tests.doctor.job import test_launcher, test_manifest, test_reach, test_rules
from tests.doctor.job.asking import faults, job_of_script

Files = dict[str, str]
"""The text of a script, as `job`, and of files beside it."""
Documents = list[Any]
Draw = random.Random
_LAUNCH = re.compile(
    r"^(?P<command>(?:srun|torchrun|deepspeed|accelerate|docker|apptainer|mpirun|python)\b"
    r"(?:[^\n\\'\"&|;<>()]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\")*?)"
    r"(?P<tail>[ \t]*(?:(?:(?<=[ \t])\d(?=[<>]))?[&|;><](?:[^\n\\]|\\.)*)?)$",
    re.MULTILINE | re.DOTALL,
)
_EXPORT = re.compile(r"^export (?P<name>\w+)=(?P<value>[^\s$`;'\"]+)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<=[\s=])\d+(?=\s|$)")
_SHORT = {name: letter for letter, name in SHORT["srun"].items()}
_VALUED = frozenset().union(*(VALUED[one] for one in ("torchrun", "deepspeed", "accelerate")))
PLAIN, CLOSED, ANY = r"['\"$\\]", r"['$\\]", r"(?!)"
"""What may not be in a command: anything for a shell, what another shell would lose, nothing."""
WAITED = r"^python|--block|\$h\b"
"""The same for the background and loops: a Python there may be one of several, as steps may."""
LOOPED = r"\$h\b"
"""The same for variables: what a loop over hosts assigns is unknown, as it may have no pass."""
LINES: Mapping[str, tuple[str, str]] = {
    "a function": ("run() {\n  COMMANDTAIL\n}\nrun", ANY),
    "a function with its arguments": ('run() { "$@"; }\nrun COMMANDTAIL', ANY),
    "a variable": ('LAUNCH="COMMAND"\n$LAUNCHTAIL', PLAIN),
    "an array": ('LAUNCH=(COMMAND)\n"${LAUNCH[@]}"TAIL', LOOPED),
    "an array that grows": ('LAUNCH=(FIRST)\nLAUNCH+=(REST)\n"${LAUNCH[@]}"TAIL', LOOPED),
    "positional parameters": ('set -- COMMAND\n"$@"TAIL', ANY),
    "eval": ('eval "COMMAND"TAIL', PLAIN),
    "a string for a shell": ("bash -c 'COMMAND'TAIL", CLOSED),
    "a here-document": ("bash <<'EOF'\nCOMMAND\nEOF", CLOSED),
    "a script": ("cat > run.sh <<'EOF'\n#!/bin/bash\nCOMMAND\nEOF\nbash run.shTAIL", CLOSED),
    "case": ("M=a\ncase $M in\n  a)\n    COMMANDTAIL\n    ;;\n  *) exit 1 ;;\nesac", ANY),
    "a test": ('TRAIN=1\nif [ "$TRAIN" = 1 ]; then\n  COMMANDTAIL\nfi', ANY),
    "a test in brackets": ("TRAIN=1\nif [[ $TRAIN == 1 ]]; then\n  COMMANDTAIL\nfi", ANY),
    "a test of a number": ("TRAIN=1\nif (( TRAIN )); then\n  COMMANDTAIL\nfi", ANY),
    "true": ("if true; then\n  COMMANDTAIL\nfi", ANY),
    "a group": ("{\n  COMMANDTAIL\n}", ANY),
    "a subshell": ("(\n  COMMANDTAIL\n)", ANY),
    "time": ("time COMMANDTAIL", ANY),
    "a line that goes on": ("FIRST \\\n  RESTTAIL", ANY),
}  # fmt: skip
"""How the line of a launch is written in another way; and what may not be in its command."""
ALONE: Mapping[str, tuple[str, str]] = {
    "a status that is checked": ("if ! COMMAND; then\n  exit 1\nfi", ANY),
    "a way out": ("COMMAND || exit 1", ANY),
    "a way on": ("COMMAND && echo done", ANY),
    "a log": ("COMMAND > train.log 2>&1", ANY),
    "a log by tee": ("COMMAND 2>&1 | tee train.log", ANY),
    "attempts": ("for attempt in 1 2 3; do\n  COMMAND && break\ndone", WAITED),
    "exec": ("exec COMMAND", ANY),
    "the background": ("COMMAND &\nPID=$!\nwait $PID", WAITED),
    "nohup": ("nohup COMMAND > log 2>&1 &\nwait", WAITED),
}  # fmt: skip
"""The same for a launch that nothing follows in its line."""
PREFIXES = (
    *("timeout 1h", "nice -n 5", "stdbuf -oL", "numactl --interleave=all", "env", "setsid -w"),
    *("env OMP_NUM_THREADS=8", "command", "nsys profile -o report", "ionice -c 2 -n 4"),
    *("uv run", "poetry run", "conda run -n train --no-capture-output", "timeout -k 5 60m"),
)
"""What may run a launch: the program that it starts is the same."""
HEADS = (
    *("ulimit -n 65536", "echo start on $(hostname)", "nvidia-smi", "mkdir -p logs", "umask 022"),
    *("# srun torchrun --nnodes=9 old.py", ": <<'END'\nsrun old.py\nEND", "shopt -s nullglob"),
    *('die() { echo "$*" >&2; exit 1; }', 'log() { echo "[$(date)] $*"; }'),
)
"""Lines that change nothing of a launch."""
NAMES = {
    "torchrun": ("/opt/venv/bin/torchrun", "python -m torch.distributed.run", "$(which torchrun)"),
    "accelerate launch": ("python3 -m accelerate.commands.launch", "accelerate-launch"),
    "deepspeed": ("/usr/bin/deepspeed", "python -m deepspeed.launcher.runner"),
    "python": ("/usr/bin/python3", "python3.11", "${PYTHON:-python}", "python -u"),
}
NUMBERS = (
    *(
        "NUMBER={}\n $NUMBER",
        "NUMBER={}\n ${{NUMBER}}",
        'NUMBER={}\n "$NUMBER"',
        " ${{NUMBER:-{}}}",
    ),
    *(
        "NUMBER=${{NUMBER:-{}}}\n $NUMBER",
        "NUMBER=$(echo {})\n $NUMBER",
        "N={}\nNUMBER=$N\n $NUMBER",
    ),
    *(": ${{NUMBER:={}}}\n $NUMBER", "declare -i NUMBER={}\n $NUMBER", "let NUMBER={}\n $NUMBER"),
    *("NUMBER=$(({}*1))\n $NUMBER", " $(({}+0))", "NUMBERS=(7 {})\n ${{NUMBERS[1]}}"),
)
"""How a number is written in another way: what stands before its line, and in its place."""
EXPORTS = (
    *(r"\g<name>=\g<value>\nexport \g<name>", r"declare -x \g<name>=\g<value>"),
    *(r"\g<name>=\g<value>; export \g<name>", r"export \g<name>\n\g<name>='\g<value>'"),
    *(r"set -a\n\g<name>=\g<value>\nset +a", r"export \\\n  \g<name>=${\g<name>:-\g<value>}"),
)


def launch(text: str) -> re.Match[str] | None:
    """Return the last launch of a script; None where it may be part of another text."""
    found = [] if "<<" in text else list(_LAUNCH.finditer(text))
    return found[-1] if found else None


def on_line(template: str, forbidden: str, *, alone: bool) -> Callable[[Files, Draw], None]:
    """Return a rewording of the line of a launch."""

    def changed(files: Files, _draw: Draw) -> None:
        text = files["job"]
        match = launch(text)
        if match is None or re.search(forbidden, match["command"]):
            return
        tail = match["tail"]
        if tail.strip() and (alone or "TAIL" not in template or "&&" in tail):
            return
        if not alone or not re.search(r"\$\?|\btrap\b", text):
            first, _, rest = match["command"].partition(" ")
            parts = {"COMMAND": match["command"], "TAIL": tail, "FIRST": first, "REST": rest}
            new = re.sub("|".join(parts), lambda one: parts[one[0]], template)
            files["job"] = text[: match.start()] + new + text[match.end() :]

    return changed


def on_command(change: Callable[[str, Draw], str]) -> Callable[[Files, Draw], None]:
    """Return a rewording of the command of a launch."""

    def changed(files: Files, draw: Draw) -> None:
        if match := launch(text := files["job"]):
            new = change(match["command"], draw)
            files["job"] = text[: match.start()] + new + text[match.end("command") :]

    return changed


def spelled(command: str, draw: Draw) -> str:
    """Write options and their values as one word or two, or words in lines of their own."""

    def both(match: re.Match[str]) -> str:
        return (
            "=".join(match.groups())
            if match[1].replace("_", "-") in _VALUED
            else " ".join(match.groups())
        )

    if re.search(PLAIN, command):
        return command
    return draw.choice((
        re.sub(r"(--[\w.-]+)=(\S+)", r"\1 \2", command),
        re.sub(r"(?<=--)([\w-]+) ([^\s-]\S*)", both, command),
        command.replace(" ", " \\\n    "),
    ))  # fmt: skip


def prefixed(command: str, draw: Draw) -> str:
    """Run the launch, or what srun starts, by another program."""
    if re.match(r"\w+ (cd|source)\b", command):
        return command
    prefix, inner = draw.choice(PREFIXES), r"(?<= )(?=(?:torchrun|deepspeed|accelerate|python) )"
    if command.startswith("srun") and "'" not in command and draw.random() < 1 / 2:
        return re.sub(inner, f"{prefix} ", command, count=1)
    return f"{prefix} {command}"


def named(command: str, draw: Draw) -> str:
    """Name the launcher by its path or its module."""
    for name, others in NAMES.items():
        if "-m " not in command and re.search(rf"(?:^|\s){name} ", command):
            return re.sub(rf"(?:^|(?<=\s)){name}(?= )", draw.choice(others), command, count=1)
    return command


def numbered(command: str, draw: Draw) -> str:
    """Take a number of the launch from a variable, or compute it."""
    is_fixed = "'" in command or "NUMBER" in command or re.search(LOOPED, command)
    found = [] if is_fixed else list(_NUMBER.finditer(command))
    if not found:
        return command
    one = draw.choice(found)
    before, _, value = draw.choice(NUMBERS).format(one[0]).rpartition(" ")
    before = before if before.endswith("\n") else ""
    return f"{before}{command[: one.start()]}{value}{command[one.end() :]}"


def headed(command: str, draw: Draw) -> str:
    """Write other commands and comments before the launch."""
    return f"{draw.choice(HEADS)}\n\n{draw.choice(HEADS)}\n{command}"


def head(text: str) -> int:
    """Return where the first command of a script stands."""
    found = re.match(r"(?:#.*\n|\s)*", text)
    return found.end() if found else 0


def exported(files: Files, draw: Draw) -> None:
    """Export variables in another way, in another file, or for one command."""
    text, how = files["job"], draw.choice((*EXPORTS, "file", "env"))
    match, found = launch(text), list(_EXPORT.finditer(text))
    if how not in {"file", "env"}:
        files["job"] = _EXPORT.sub(how, text)
    elif how == "file" and found:
        files["env.sh"] = "\n".join(one[0] for one in found) + "\n"
        how = draw.choice(("source env.sh", ". ./env.sh", "set -a; . ./env.sh; set +a"))
        files["job"] = _EXPORT.sub("", f"{text[: head(text)]}{how}\n{text[head(text) :]}")
    elif found and match and not any(f"${one['name']}" in text for one in found):
        words = " ".join(f"{one['name']}={one['value']}" for one in found)
        at = match.start()
        files["job"] = f"{_EXPORT.sub('', text[:at])}env {words} {text[at:]}"


def directed(files: Files, draw: Draw) -> None:
    """Write what is asked of Slurm in another way."""
    kind = draw.randrange(4)

    def short(match: re.Match[str]) -> str:
        return f"-{_SHORT[match[1]]} {match[2]}" if match[1] in _SHORT else match[0]

    def changed(match: re.Match[str]) -> str:
        options = match[1]
        return (
            "#SBATCH " + "\n\n# and\n#SBATCH ".join(options.split()),
            f"#SBATCH\t{options}  # as always",
            "#SBATCH " + re.sub(r"(--[\w-]+)=(\S)", r"\1 \2", options),
            "#SBATCH " + re.sub(r"--([\w-]+)=(\S+)", short, options),
        )[kind]

    files["job"] = re.sub(
        r"^#SBATCH ((?:--[\w-]+(?:=\S*)? ?)+)$", changed, files["job"], flags=re.MULTILINE
    )


def in_main(files: Files, _draw: Draw) -> None:
    """Write the commands as a function."""
    text = files["job"]
    if "#SBATCH" not in text[head(text) :] and "\r" not in text:
        files["job"] = f'{text[: head(text)]}main() {{\n{text[head(text) :]}}}\n\nmain "$@"\n'


def in_file(files: Files, draw: Draw) -> None:
    """Write the launch in a file of its own."""
    text = files["job"]
    match = launch(text)
    if match and not match["tail"].strip() and not re.search(CLOSED, match["command"]):
        files["run.sh"] = f"#!/bin/bash\n{match['command']}\n"
        how = draw.choice(("bash run.sh", "./run.sh", "source run.sh", "bash ./run.sh train"))
        files["job"] = text[: match.start()] + how + text[match.end() :]


SHELL: Mapping[str, Callable[[Files, Draw], None]] = {
    **{name: on_line(*one, alone=False) for name, one in LINES.items()},
    **{name: on_line(*one, alone=True) for name, one in ALONE.items()},
    **{one.__name__: on_command(one) for one in (spelled, prefixed, named, numbered, headed)},
    **{one.__name__: one for one in (exported, directed, in_main, in_file)},
}


def judged(files: Files) -> set[str]:
    """Return what is wrong with a script, by component."""
    given = job_of_script(files)
    found = [one for check in ("launcher", "ranks-and-gpus") for one in faults(check, given)]
    return {one.component for one in found}


def scripts() -> Iterator[Files]:
    """Yield scripts of other tests: with one mistake each, and mended."""
    for text in (one for case in test_rules.PROGRAMS for one in case):
        script, _, program = text.partition("\n# ")
        yield {"job": f"#!/bin/bash\n{script}\n", "train.py": program}
    for text in (one for case in test_reach.CASES for one in case[:2]):
        yield {"job": f"#!/bin/bash\n{text}\n"}
    for right, wrong, *_ in (*test_launcher.WRONG, *test_launcher.RIGHT):
        yield {"job": test_launcher.WHOLE.replace(right, wrong)}


SCRIPTS = list(scripts())


@pytest.mark.parametrize("first", SHELL)
@given(st.sampled_from(SCRIPTS), st.sampled_from([*SHELL]), st.randoms(use_true_random=False))
def test_scripts(first: str, files: Files, second: str, draw: Draw) -> None:
    """A script has the same faults in whatever words."""
    new = dict(files)
    SHELL[first](new, draw)
    SHELL[second](new, draw)
    assert new == files or judged(new) == judged(files), new["job"]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings in documents that have containers."""
    if isinstance(value, dict) and isinstance(value.get("containers"), list):
        yield value
    inside = list(value.values()) if isinstance(value, dict) else value
    for one in inside if isinstance(inside, list) else ():
        yield from pods(one)


def on_words(change: Callable[[list[str], Draw], list[str]]) -> Callable[[Documents, Draw], None]:
    """Return a rewording of the words of containers; their first part is `command`."""

    def changed(documents: Documents, draw: Draw) -> None:
        for one in (one for pod in pods(documents) for one in pod["containers"]):
            words = [word for key in ("command", "args") for word in one.get(key, ())]
            is_list = isinstance(one.get("command"), list) and {*map(type, words)} == {str}
            if is_list and len(words[0].split()) == 1:
                words = change(words, draw)
                at = draw.randint(1, len(words))
                one["command"], one["args"] = words[:at], words[at:]

    return changed


def in_shell(words: list[str], draw: Draw) -> list[str]:
    """Have a shell run the program, with other commands before it."""
    before = draw.choice(("exec ", "set -e\nulimit -l unlimited\n", "cd /work && ", "time "))
    is_plain = "$" not in " ".join(words)
    return ["/bin/sh", "-c", before + shlex.join(words)] if is_plain else words


def by_other(words: list[str], draw: Draw) -> list[str]:
    """Run the program by another one."""
    others = ("env A=b", "timeout 1h", "numactl --interleave=all", "/bin/nice -n 5")
    return [*draw.choice(others).split(), *words]


def on_lines(words: list[str], draw: Draw) -> list[str]:
    """Write the text of a shell on several lines."""
    forms = (
        "{}\n",
        "#!/bin/bash\nset -eux\n{}\n",
        'main() {{\n{}\n}}\nmain "$@"',
        "if true; then\n{}\nfi",
    )
    if words[:2] == ["bash", "-c"]:
        text = words[2].replace(" --", " \\\n  --")
        words[2] = draw.choice(forms).format(text)
    return words


def accompanied(documents: Documents, draw: Draw) -> None:
    """Add other containers and objects."""
    for pod in pods(documents):
        other = {
            "name": f"logs-{len(pod['containers'])}",
            "image": "busybox",
            "command": ["sleep", "inf"],
        }
        pod["containers"].insert(draw.choice((0, len(pod["containers"]))), other)
        pod["initContainers"] = [{"name": "wait", "image": "busybox", "command": ["true"]}]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "train"}}
    documents.insert(draw.choice((0, len(documents))), account)


def backwards(value: Any) -> Any:
    """Return a document with the keys of its mappings in the opposite order."""
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [*map(backwards, value)] if isinstance(value, list) else value


def reordered(documents: Documents, _draw: Draw) -> None:
    """Write the keys of each mapping in another order."""
    documents[:] = map(backwards, documents)


def in_list(documents: Documents, _draw: Draw) -> None:
    """Write the objects as one list."""
    if documents[0].get("kind") != "List":
        documents[:] = [{"apiVersion": "v1", "kind": "List", "items": [*documents]}]


PODS: Mapping[str, Callable[[Documents, Draw], None]] = {
    **{one.__name__: on_words(one) for one in (in_shell, by_other, on_lines)},
    **{one.__name__: one for one in (accompanied, reordered, in_list)},
}
FORMS: Mapping[str, Callable[[Documents], str]] = {
    "YAML": lambda documents: yaml.safe_dump_all(documents, sort_keys=False),
    "JSON": lambda documents: "\n---\n".join(json.dumps(one, indent=1) for one in documents),
}


def refused(documents: Documents, form: str) -> set[str]:
    """Return what is wrong with a manifest, by component."""
    found = manifest.from_json(manifest.parse(FORMS[form](documents)))
    said = faults("manifest", JobContext(manifest=Source("job.yaml", found)))
    return {one.component for one in said}


def manifests() -> Iterator[str]:
    """Yield manifests of other tests: with one mistake each, and mended."""
    yield from (test_manifest.jobset(test_manifest.POD), test_manifest.KUBEFLOW)
    yield from (test_manifest.mpijob(ranks) for ranks in (16, 17))
    yield from (test_manifest.TRAIN_JOB.format(processes=processes) for processes in (8, 9))
    for old, new, *_ in test_manifest.FAULTS:
        yield test_manifest.jobset(test_manifest.POD.replace(old, new))
    for text, old, new, _ in test_manifest.PODS:
        yield from (text, text.replace(old, new))


MANIFESTS = [manifest.parse(text)["documents"] for text in manifests()]


@pytest.mark.parametrize("first", PODS)
@given(
    st.sampled_from(MANIFESTS),
    st.sampled_from([*PODS]),
    st.sampled_from([*FORMS]),
    st.randoms(use_true_random=False),
)
def test_manifests(first: str, documents: Documents, second: str, form: str, draw: Draw) -> None:
    """A manifest has the same faults in whatever words."""
    new = copy.deepcopy(documents)
    PODS[first](new, draw)
    PODS[second](new, draw)
    assert refused(new, form) == refused(documents, "YAML"), FORMS[form](new)
