"""The words of everything that users read: page, help, alerts, runbooks, dashboards, docs.

Each phrase was in the product once, and made a new user stop; the field has a better one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dshealthd.cli import commands
from dshealthd.cli import main as cli

ROOT = Path(__file__).parents[1]
BANNED = {
    r"stand(?:s|ing)? still|stood still": "hung, stalled",
    r"(?:is|are|was|were|be) told": "named, shown, sent",
    r"cannot be told": "is unknown",
    r"(?<!`)\bnobody\b(?![`\"]| on NFS)": "no process, no node, not",
    r"\baccus(?!ers\b)\w+|\baccusers\b(?<!:accusers)": "suspect",
    r"the one before": "the previous one",
    r"again and again": "repeatedly, flapping, crash-looping",
    r"\b(?:be|is) had\b": "available",
    r"\bso many\b(?! that)": "this many",
    r"held (?:down|back)": "throttled",
    r"lack of memory": "out of memory, OOM",
    r"who may enter": "directory permissions control access",
    r"come further": "made progress",
    r"sign of life": "progress, heartbeat",
    r"could not be had": "not collected",
    r"makes? no sense": "invalid",
    r"deserves? a look": "problem",
    r"what holds? it up|hold(?:s|ing)? up": "cause",
    r"no fault seen": "healthy",
    r"not on this machine": "not applicable",
    r"no longer:": "resolved",
    r"fullest process": "process closest to its limit",
    r"at fault": "culprit",
    r"who is behind whom": "lagging ranks",
    r"nothing on this node tells": "no cause found on this node",
    r"hang, class": "cause",
    r"starts again and again": "crash-looping",
    r"ask(?:s)? for something": "need action",
    r"age of what": "last update",
    r"keep(?:s)? quiet": "is silent",
}
BRITISH = re.compile(
    r"\b\w*(?:recogni|initiali|synchroni|utili|normali|summari|organi|tokeni|seriali)s(?:e|ing"
    r"|ation)"
    r"|(?:behavi|neighb|col|fav|hon)our|labelled|\bdefence|\bgrey\b",
    re.IGNORECASE,
)
PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in BANNED), re.IGNORECASE)
DOCUMENTS = sorted(
    path
    for pattern in (
        "README.md",
        "docs/**/*.md",
        "docs/*.toml",
        "deploy/**/README.md",
        "deploy/prometheus/*.yml",
        "deploy/alertmanager/**/*.*",
        "deploy/kubernetes/components/*/rules.yaml",
        "deploy/package/dshealthd.toml",
        "dshealthd/web/page/*",
        "dshealthd/status/*.py",
    )
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path
    for pattern in ("*.md", "dshealthd/**/*.*", "deploy/**/*.py", "grafana/*.py", "systemd/*")
    for path in ROOT.glob(pattern)
    if path.suffix in {".css", ".html", ".js", ".md", ".py", ".service", ".toml"}
    and path.name != "CHANGELOG.md"
)
ALLOWED = ("- receiver: nobody", "- name: nobody")
"""Lines of configuration that name things."""


def phrases(text: str) -> list[str]:
    """Return what a text says that it should say otherwise."""
    kept = "\n".join(line for line in text.splitlines() if line.strip() not in ALLOWED)
    return [match[0] for match in PATTERN.finditer(kept)]


def test_the_list_finds_each_phrase() -> None:
    """Each entry is found where it stands, in any case, and names of metrics are left alone."""
    said = (
        "The job Stands Still, as could not be had was told to nobody: the one before is at fault"
    )
    assert len(phrases(said)) == 6
    assert phrases("dshealthd:suspect:accusers, root is `nobody`, so many that") == []


def test_documents() -> None:
    """Documents, rules, and the page are free of them."""
    assert [
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in DOCUMENTS
        for phrase in phrases(path.read_text(encoding="utf-8"))
    ] == []


def test_american_spelling() -> None:
    """Documents and source are spelled as torch, NCCL and Prometheus spell."""
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in {*DOCUMENTS, *SOURCES}
        for match in BRITISH.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()
    assert BRITISH.findall("Initialised, neighbours, unlabelled; color, otherwise") != []


@pytest.mark.parametrize(
    "command", ["", *(command.name for command in commands.COMMANDS), "explain"]
)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """So is what a command says of itself."""
    with pytest.raises(SystemExit):
        cli.main([*filter(None, [command]), "--help"])
    assert phrases(" ".join(capsys.readouterr().out.split())) == []


def texts(value: object) -> list[str]:
    """Return every title, description and mapped text of a dashboard."""
    found = []
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in {"title", "description", "text", "noValue", "displayName"}:
                found += [inner] if isinstance(inner, str) else texts(inner)
            else:
                found += texts(inner)
    elif isinstance(value, list):
        for inner in value:
            found += texts(inner)
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "grafana/dashboards").glob("*.json")), ids=lambda path: path.name
)
def test_dashboards(path: Path) -> None:
    """So are the dashboards."""
    shown = texts(json.loads(path.read_text(encoding="utf-8")))
    assert len(shown) > 20
    assert [found for text in shown for found in phrases(text)] == []
