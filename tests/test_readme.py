"""README and docs: every command, configuration and link in them is one that works."""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import yaml

from dshealthd.cli import main as cli
from dshealthd.cli.commands import COMMANDS, parser
from dshealthd.config import config
from dshealthd.core.options import Errors
from dshealthd.symptoms import all_symptoms
from generate import reference
from tests import tested_with, yaml_files
from tests.symptoms.promtool import promtool

ROOT = Path(__file__).parents[1]
GENERATED = {"metrics.md", "runbooks.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "bench/README.md",
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED),
    *sorted((ROOT / "deploy").glob("**/README.md")),
    *sorted((ROOT / "docs/runbooks").glob("*.md")),
]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
METRIC = re.compile(r"\bdshealthd_[a-z][a-z0-9_]+")
SUFFIXES = ("_bucket", "_sum", "_count")
OTHERS = {"dshealthd_training", "dshealthd_config", "dshealthd_site"}
"""A distribution and other names that are no metrics."""
FILES = {"conf", "key", "md", "yml"}
"""What follows a section's name where it is a file's."""
FOREIGN = {"docs/userguide/source/env.rst", "tests/attribution/unit/fr_traces"}
"""Paths in the repositories of NCCL and of NVRx."""


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages."""
    return [
        body for language, body in BLOCK.findall(path.read_text("utf-8")) if language in languages
    ]


def commands(path: Path) -> list[list[str]]:
    """Return what a page has people type: in blocks for the shell, and inline."""
    text = path.read_text("utf-8")
    typed = [
        line.strip().removeprefix("$ ")
        for body in blocks(path, "sh", "console", "bash")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    typed += re.findall(r"`((?:dshealthd|make|\./dev) [^`]+)`", BLOCK.sub("", text))
    found = []
    for line in typed:
        for part in re.split(r"\s*(?:&&|\|\||[|;])\s*", line.partition(" #")[0]):
            try:
                words = shlex.split(part)
            except ValueError:  # a quote that ends in another part
                continue
            words = [word for word in words if not re.fullmatch(r"sudo|time|[A-Z_]+=\S*", word)]
            if words and words[0] in {"dshealthd", "make", "./dev"}:
                found.append(words)
    return found


TYPED = [(path.relative_to(ROOT), words) for path in PAGES for words in commands(path)]
TARGETS = re.search(r"^TARGETS = (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_there_is_something_to_check() -> None:
    """The pages have commands, links, configurations and metrics, so that none passes unseen."""
    assert len(TYPED) > 60
    assert sum(len(blocks(path, "toml")) for path in PAGES) > 2


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """A command exists, with its flags and choices; placeholders stand for values."""
    checks: dict[str, Callable[[list[str]], bool]] = {
        "make": made,
        "./dev": chore,
        "dshealthd": lambda words: accepted(words, capsys),
    }
    wrong = [(page, words) for page, words in TYPED if not checks[words[0]](words[1:])]
    assert wrong == []


def made(words: list[str]) -> bool:
    """Tell whether the Makefile has these targets."""
    assert TARGETS is not None
    return {word for word in words if "=" not in word} <= set(TARGETS[1].split())


def chore(words: list[str]) -> bool:
    """Tell whether ./dev has this chore."""
    pattern = rf"^{re.escape(words[0])}\)$"
    return re.search(pattern, (ROOT / "dev").read_text("utf-8"), re.MULTILINE) is not None


@functools.cache
def own_flags(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the flags of a command that has a parser of its own."""
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def accepted(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Tell whether `dshealthd` takes these words, or says that a placeholder is no value."""
    words = [re.sub(r"[\[\]…]|\.\.\.", "", word) for word in words]
    words = [word for word in words if word not in {"", "OPTION", "FLAGS"}]
    if words in (["COMMAND", "--help"], ["--help"], ["--version"]):
        return True
    if words[0] not in {command.name for command in COMMANDS}:
        words = words[: words.index("--")] if "--" in words else words  # another program's follow
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        return flags <= own_flags(words[0], capsys)
    if not refused(words):
        return True
    said = capsys.readouterr().err
    return bool(re.search(r"the following arguments are required|unknown value [A-Z]", said))


def refused(words: list[str]) -> bool:
    """Tell whether the parser ends for this command line."""
    try:
        parser().parse_args(words)
    except SystemExit as ended:
        return ended.code != 0
    return False


def test_diagrams_are_up_to_date() -> None:
    """The diagrams are what their script draws."""
    script = ROOT / "docs/pictures/diagrams.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False)
    assert done.returncode == 0, "run ./dev generate"


def test_reference_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics, options, runbooks and the doctor's checks are documented as they are."""
    assert reference.main(["--check", str(ROOT / "docs")]) == 0, capsys.readouterr().err


def nowhere(path: Path) -> Iterator[str]:
    """Yield the links of a page to files or headings that this repository does not have."""
    for target in LINK.findall(BLOCK.sub("", path.read_text("utf-8"))):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists():
            yield target
        elif anchor and place.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", place.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            if anchor not in slugs:
                yield target


def unknown_metrics(path: Path) -> Iterator[str]:
    """Yield the metrics that a page names and the agent does not export."""
    if "ansible" in path.parts:  # whose variables look like metrics
        return
    known = reference.all_metrics().keys()
    for name in METRIC.findall(path.read_text("utf-8")):
        if name.endswith("_") or name in OTHERS:  # of a pattern such as dshealthd_gpu_*
            continue
        base = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        if not {name, base} & known:
            yield name


def unknown_alerts(path: Path) -> set[str]:
    """Return the alerts that a page names and the rules do not have."""
    known = {entry.name for symptom in all_symptoms().values() for entry in symptom.entries}
    known.add("DshealthdUnfit")  # a policy of NVSentinel's
    return set(re.findall(r"\bDshealthd[A-Z]\w+", path.read_text("utf-8"))) - known


@functools.cache
def options() -> set[str]:
    """Return the sections and options that the configuration has."""
    known = set()
    for line in (ROOT / "docs/dshealthd.toml").read_text("utf-8").splitlines():
        if head := re.fullmatch(r"\[([\w.]+)\]", line):
            section = head[1]
            known.add(section)
        elif option := re.match(r"#?(\w+) =", line):
            known.add(f"{section}.{option[1]}")
    return known


def unknown_options(path: Path) -> Iterator[str]:
    """Yield the options that a page names with their section and the configuration lacks."""
    tops = {name.partition(".")[0] for name in options()}
    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)[` =]", path.read_text("utf-8")):
        top, _, last = name.partition(".")
        if top in tops and last not in FILES and name not in options():
            yield name


def missing_files(path: Path) -> Iterator[str]:
    """Yield the files of this repository that a page names, and the modules that it runs, which
    there are not.
    """
    text = path.read_text("utf-8")
    folders = "bench|deploy|docs|dshealthd|generate|grafana|systemd|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)[`: ]", text):
        if not ((ROOT / name).exists() or name in FOREIGN or "SLUG" in name):
            yield name
    for name in re.findall(rf"python3? -m ((?:{folders})[\w.]*)", text):
        place = ROOT / name.replace(".", "/")
        if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists()):
            yield name


@pytest.mark.parametrize(
    "wrong", [nowhere, unknown_metrics, unknown_alerts, unknown_options, missing_files]
)
def test_names(wrong: Callable[[Path], Iterable[str]]) -> None:
    """What a page names, there is."""
    found = {str(path.relative_to(ROOT)): [*wrong(path)] for path in PAGES}
    assert {page: names for page, names in found.items() if names} == {}


def test_configurations() -> None:
    """Each piece of TOML is a configuration that the agent takes; each of Python compiles."""
    for path in PAGES:
        for body in blocks(path, "toml"):
            errors = Errors()
            config.from_document(tomllib.loads(body), errors)
            assert errors == [], path
        for body in blocks(path, "python"):
            ast.parse(body, str(path))


def test_other_scrapers(tmp_path: Path) -> None:
    """Scrape configurations for others are Prometheus' own, and set the labels that the rules
    need.
    """
    receiver, federation = map(yaml.safe_load, blocks(ROOT / "docs/other-scrapers.md", "yaml"))
    collector = receiver["receivers"]["prometheus"]["config"]
    shipped = yaml.safe_load((ROOT / "deploy/prometheus/dshealthd.yml").read_text(encoding="utf-8"))
    (job,) = collector["scrape_configs"]
    assert job["relabel_configs"] == shipped["scrape_configs"][-1]["relabel_configs"]
    assert "$" not in yaml.safe_dump(job)  # where it had to be written twice
    for number, document in enumerate((collector, federation)):
        path = tmp_path / f"{number}.yml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        promtool("check", "config", path)


TESTED = """\
## Tested with

| software | oldest | newest | tested by |
|---|---|---|---|
| Slurm | 22.05 | 22.05 | `tests/slurm/` |
| Kubernetes, by its schemas | 1.29 | 1.9 | `tests/nvml/` |

## More
"""


@pytest.mark.parametrize(
    ("outcomes", "found", "row"),
    [
        ({"tests/slurm/test_a.py": {"passed"}}, "slurm-wlm 26.05.5", "22.05 | 26.05"),
        ({"tests/slurm/test_a.py": {"passed"}}, "slurm-wlm 9.11.2", "9.11 | 22.05"),
        ({"tests/slurm/test_a.py": {"passed"}}, "", "22.05 | 22.05"),  # it is not here
        ({"tests/slurm/test_a.py": {"skipped"}}, "slurm-wlm 26.05.5", "22.05 | 22.05"),
        ({"tests/nvml/test_a.py": {"passed"}}, "slurm-wlm 26.05.5", "22.05 | 22.05"),
        (
            {"tests/slurm/test_a.py": {"passed"}, "tests/slurm/test_b.py": {"passed", "failed"}},
            "slurm-wlm 26.05.5",
            "22.05 | 22.05",
        ),
    ],
)
def test_a_row_changes_where_its_tests_passed(
    monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, set[str]], found: str, row: str
) -> None:
    """What did not run, skipped itself or failed says nothing of a release."""
    monkeypatch.setitem(tested_with.MET, "Slurm", lambda: found)
    after = tested_with.extended(TESTED, outcomes)
    assert after == TESTED.replace("22.05 | 22.05", row)


def test_neighbors_are_those_that_are_tested() -> None:
    """Interpreters are those of CI's matrix, Kubernetes' releases those of the test, and each test
    exists.
    """
    table = tested_with.rows((ROOT / "README.md").read_text("utf-8"))
    jobs = yaml_files.load(ROOT / ".github/workflows/ci.yml")["jobs"]
    agent = jobs["test"]["strategy"]["matrix"]["python"]
    trainings = jobs["heartbeat"]["env"]["PYTHONS"].split()
    kubernetes = (ROOT / "tests/kubernetes/test_manifests.py").read_text("utf-8")
    (versions,) = re.findall(r"^VERSIONS = (\(.*\))$", kubernetes, re.MULTILINE)
    declared = {
        "Python of the agent (the package brings 3.13)": agent,
        "Python of trainings": trainings,
        "Kubernetes, by its schemas": ast.literal_eval(versions),
    }
    assert table.keys() == {*declared, *tested_with.MET}
    for name, releases in declared.items():
        assert table[name][:2] == (releases[0], releases[-1])
    named = {name: tested_with.paths(by) for name, (_, _, by) in table.items()}
    assert [name for name, paths in named.items() if not paths] == [next(iter(table))]  # make test
    assert all((ROOT / path).exists() for paths in named.values() for path in paths)
    for package in ("prometheus", "prometheus-alertmanager", "victoria-metrics"):
        assert f" {package}" in (ROOT / "dev").read_text("utf-8").partition("\n    newest ")[2]
