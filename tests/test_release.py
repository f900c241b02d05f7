"""What makes a release: the workflows, and what they take from the changelog."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import release
from dshealthd import __version__
from tests.test_readme import chore, made

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = re.compile(
    (
        r"(?:^|\s)(?:/project/)?(deploy/\S+\.(?:py|sh)|\./dev [a-z-]+|(?<! )make [a-z-]+|(?<=sudo "
        r")make [a-z-]+)"
    ),
    re.MULTILINE,
)


def jobs(path: Path) -> dict[str, Any]:
    """Return a workflow's jobs by name."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of all jobs."""
    for job in jobs(path).values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_foreign_code_is_pinned(path: Path) -> None:
    """Each action is one commit, beside the release that it is: a tag can be moved."""
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (.+)", text)
    assert used
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_take_nothing_from_expressions(path: Path) -> None:
    """What a tag or a branch is called reaches a script as a variable, never as its text."""
    for step in steps(path):
        assert "${{" not in step.get("run", ""), step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_given_job_by_job(path: Path) -> None:
    """A workflow reads; a job that writes says so. No checkout leaves its credential behind."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["permissions"] == {"contents": "read"}
    writing = {
        name
        for name, job in document["jobs"].items()
        if "write" in job.get("permissions", {}).values()
    }
    assert writing == ({"image", "publish", "pypi"} if path.stem == "release" else set())
    for step in steps(path):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
    for job in document["jobs"].values():
        assert job["timeout-minutes"] <= 180


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_exist(path: Path) -> None:
    """A workflow calls only commands and scripts of this checkout."""
    called = {name for step in steps(path) for name in SCRIPTS.findall(step.get("run", ""))}
    assert called
    known = {"make": made, "./dev": chore}
    for name in called:
        program, _, word = name.partition(" ")
        assert known[program]([word]) if word else (ROOT / name).is_file(), name


def test_nothing_is_published_that_was_not_tried() -> None:
    """What is published waits for every other job, the smoke tests among them."""
    release_jobs = jobs(ROOT / ".github/workflows/release.yml")
    assert set(release_jobs["publish"]["needs"]) == release_jobs.keys() - {"publish", "pypi"}
    assert "smoke" in release_jobs["image"]["needs"]
    assert release_jobs["pypi"]["needs"] == ["publish"]


def test_assets_are_of_one_build_each(tmp_path: Path) -> None:
    """The wheel for trainings, which three jobs make, is published once; notes are no asset."""
    training = "dshealthd_training-1.0-py3-none-any.whl"
    made = {
        "package-amd64": ["dshealthd_1.0_amd64.deb", training],
        "package-arm64": ["dshealthd_1.0_arm64.deb", training],
        "wheels": ["dshealthd-1.0-py3-none-any.whl", training],
        "notes": ["notes.md"],
    }
    for artifact, names in made.items():
        (tmp_path / "all" / artifact).mkdir(parents=True)
        for name in names:
            (tmp_path / "all" / artifact / name).write_text(artifact, encoding="utf-8")
    release_jobs = jobs(ROOT / ".github/workflows/release.yml")
    (script,) = [
        step["run"]
        for step in release_jobs["publish"]["steps"]
        if "SHA256SUMS" in step.get("run", "")
    ]
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True)
    expected = {name for names in made.values() for name in names} - {"notes.md"} | {"SHA256SUMS"}
    assert {file.name for file in (tmp_path / "assets").iterdir()} == expected
    assert (tmp_path / "assets" / training).read_text(encoding="utf-8") == "wheels"


def test_the_tag_is_the_version_of_the_source() -> None:
    """A tag that says another version than the source is refused, with the file that has it."""
    release.check(f"v{__version__}")
    with pytest.raises(release.ReleaseError, match=r"v9\.9\.9, and dshealthd/__init__\.py has"):
        release.check("v9.9.9")


CHANGELOG = (
    "# Changelog\n\n## Unreleased\n\n- new\n\n## 1.2.0 (2026-12-01)\n\n### A\n\n- "
    "one\n\n## 1.1.0\n\n"
)


def test_notes_are_the_section_of_the_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notes are what the changelog says of that version alone; without it there is no
    release.
    """
    for name in ("dshealthd/__init__.py", "deploy/kubernetes/base/daemonset.yaml"):
        (tmp_path / name).parent.mkdir(parents=True)
        text = (ROOT / name).read_text(encoding="utf-8").replace(__version__, "1.2.0")
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    monkeypatch.setattr(release, "PROJECT", tmp_path)
    assert release.main(["notes", "v1.2.0"]) == 0
    assert capsys.readouterr().out == "### A\n\n- one\n"
    for missing in ("v1.1.0", "v1.2", "v1.2.0-rc1"):
        assert release.main(["notes", missing]) == 1
    with pytest.raises(release.ReleaseError, match=r"no section for 1\.1\.0"):
        release.section("v1.1.0")  # an empty one


FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms(path: Path) -> None:
    """A form has what GitHub requires of it, and asks for output of commands that exist."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["contact_links"]
        return
    assert form.keys() == {"name", "description", "body"}
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    for field in form["body"]:
        assert field["type"] in {"input", "textarea"}
        assert field["attributes"]["label"]
