"""README and docs: every command, configuration and link in them is one that works."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from dshealthd.cli import main as cli
from dshealthd.cli.commands import COMMANDS, parser
from dshealthd.config import config
from dshealthd.core.options import Errors
from dshealthd.symptoms import all_symptoms
from generate import reference
from tests import yaml_files

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


TYPED = [
    pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)}")
    for path in PAGES
    for words in commands(path)
]


def test_there_is_something_to_check() -> None:
    """The pages have commands, links, configurations and metrics, so that none passes unseen."""
    assert len(TYPED) > 60
    assert sum(len(blocks(path, "toml")) for path in PAGES) > 2


@pytest.mark.parametrize("words", TYPED)
def test_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command exists, with its flags and choices; placeholders stand for values."""
    program, *rest = words
    if program == "make":
        targets = re.search(
            r"^TARGETS = (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
        )
        assert targets is not None
        assert {word for word in rest if "=" not in word} <= set(targets[1].split())
        return
    if program == "./dev":
        assert re.search(
            rf"^{re.escape(rest[0])}\)$", (ROOT / "dev").read_text("utf-8"), re.MULTILINE
        )
        return
    words = [re.sub(r"[\[\]…]|\.\.\.", "", word) for word in rest]
    words = [word for word in words if word not in {"", "OPTION", "FLAGS"}]
    if words in (["COMMAND", "--help"], ["--help"], ["--version"]):
        return
    if words[0] not in {command.name for command in COMMANDS}:  # it has a parser of its own
        with pytest.raises(SystemExit) as ended:
            cli.main([words[0], "--help"])
        assert ended.value.code == 0
        words = words[: words.index("--")] if "--" in words else words  # another program's follow
        known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known
        return
    if not refused(words):
        return
    said = capsys.readouterr().err
    assert re.search(r"the following arguments are required|unknown value [A-Z]", said), said


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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    """A link to a file or heading of this repository leads somewhere."""
    text = BLOCK.sub("", path.read_text("utf-8"))
    for target in LINK.findall(text):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", place.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_configurations(path: Path) -> None:
    """Each piece of TOML is a configuration that the agent takes; each of Python compiles."""
    for body in blocks(path, "toml"):
        errors = Errors()
        config.from_document(tomllib.loads(body), errors)
        assert errors == []
    for body in blocks(path, "python"):
        ast.parse(body)


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if "ansible" not in path.parts],  # whose variables look like metrics
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_metrics(path: Path) -> None:
    """Each metric that a page names is one that the agent exports."""
    known = reference.all_metrics()
    for name in METRIC.findall(path.read_text("utf-8")):
        if name.endswith("_") or name in OTHERS:  # of a pattern such as dshealthd_gpu_*
            continue
        base = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        assert {name, base} & set(known), name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_alerts(path: Path) -> None:
    """Each alert that a page names is one that the rules have."""
    known = {entry.name for symptom in all_symptoms().values() for entry in symptom.entries}
    known.add("DshealthdUnfit")  # a policy of NVSentinel's
    assert set(re.findall(r"\bDshealthd[A-Z]\w+", path.read_text("utf-8"))) <= known


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_options(path: Path) -> None:
    """Each option that a page names with its section is one that the configuration has."""
    known = set()
    for line in (ROOT / "docs/dshealthd.toml").read_text("utf-8").splitlines():
        if head := re.fullmatch(r"\[([\w.]+)\]", line):
            section = head[1]
            known.add(section)
        elif option := re.match(r"#?(\w+) =", line):
            known.add(f"{section}.{option[1]}")
    tops = {name.partition(".")[0] for name in known}
    for name in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)[` =]", path.read_text("utf-8")):
        top, _, last = name.partition(".")
        if top in tops and last not in FILES:
            assert name in known, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths(path: Path) -> None:
    """Each file of this repository that a page names exists, and each module that it runs."""
    text = path.read_text("utf-8")
    folders = "bench|deploy|docs|dshealthd|generate|grafana|systemd|tests"
    for name in re.findall(rf"`((?:{folders})/[\w./-]+)[`: ]", text):
        assert (ROOT / name).exists() or name in FOREIGN or "SLUG" in name, name
    for name in re.findall(rf"python3? -m ((?:{folders})[\w.]*)", text):
        place = ROOT / name.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), name


def test_scrape_configuration(tmp_path: Path) -> None:
    """README's scrape configuration is one that Prometheus takes, and gives targets their
    labels.
    """
    (body,) = blocks(ROOT / "README.md", "yaml")
    (job,) = yaml.safe_load(body)["scrape_configs"]
    shipped = yaml_files.load(ROOT / "deploy/prometheus/dshealthd.yml")
    exporter, node = job["relabel_configs"]
    assert exporter == shipped["scrape_configs"][-1]["relabel_configs"][0]
    assert node["target_label"] == "node"
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's prometheus; ./dev test installs it"
    (tmp_path / "prometheus.yml").write_text(body, encoding="utf-8")
    done = subprocess.run(
        [promtool, "check", "config", str(tmp_path / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
        done = subprocess.run(
            ["promtool", "check", "config", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def neighbors() -> dict[str, tuple[str, str, str]]:
    """Return the rows of the README's table of neighbors: oldest, newest, by what."""
    text = (
        (ROOT / "README.md").read_text("utf-8").partition("## Tested with")[2].partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: (oldest, newest, by) for name, oldest, newest, by in rows[1:]}


def test_neighbors_are_those_that_are_tested() -> None:
    """Interpreters are those of CI's matrix, Kubernetes' releases those of the test, and each test
    exists.
    """
    table = neighbors()
    jobs = yaml_files.load(ROOT / ".github/workflows/ci.yml")["jobs"]
    agent = jobs["test"]["strategy"]["matrix"]["python"]
    trainings = jobs["heartbeat"]["env"]["PYTHONS"].split()
    kubernetes = (ROOT / "tests/kubernetes/test_manifests.py").read_text("utf-8")
    (versions,) = re.findall(r"^VERSIONS = (\(.*\))$", kubernetes, re.MULTILINE)
    schemas = ast.literal_eval(versions)
    for name, releases in {
        "Python of the agent (the package brings 3.13)": agent,
        "Python of trainings": trainings,
        "Kubernetes, by its schemas": schemas,
    }.items():
        assert table[name][:2] == (releases[0], releases[-1])
    named = [path for _, _, by in table.values() for path in re.findall(r"`(tests/[^`]*)`", by)]
    assert len(named) == len(table) - 1  # and `make test`
    assert all((ROOT / path).exists() for path in named)
    for package in ("prometheus", "prometheus-alertmanager", "victoria-metrics"):
        assert f" {package}" in (ROOT / "dev").read_text("utf-8").partition("\n    newest ")[2]
