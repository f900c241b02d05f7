"""Builds the documentation as a static site: `python deploy/site/build.py` with mkdocs-material.

The pages are copied in the repository's own layout, so that their links are the ones that also
work on GitHub; a link to anything that is not a page brings that file along. A link that leads
nowhere fails the build. Nothing is fetched.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "build/site/source"
SITE = ROOT / "build/site/html"
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "bench/README.md",
    "deploy/*/README.md",
    "docs/*.md",
    "docs/runbooks/*.md",
)
_LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
_CODE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LIST = re.compile(r"^(?![-*] |\d+\. |\s|$)(.+)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages of the documentation's site."""
    return sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def linked(page: Path) -> set[Path]:
    """Return the files of the repository, other than pages, that a page links to or shows."""
    targets = _LINK.findall(_CODE.sub("", page.read_text("utf-8")))
    files = {(page.parent / target).resolve() for target in targets if ":" not in target}
    return {file for file in files if file.suffix != ".md" and file.is_file()}


def markdown(text: str) -> str:
    """Return a page as Python-Markdown reads it: a list behind a paragraph wants an empty line."""
    parts = re.split(f"({_CODE.pattern})", text, flags=_CODE.flags)
    return "".join(
        part if index % 2 else _LIST.sub(r"\1\n\n", part) for index, part in enumerate(parts)
    )


def stage() -> None:
    """Copy the site's pages and what they link to."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in pages():
        place = SOURCE / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(markdown(page.read_text("utf-8")), encoding="utf-8")
        for file in linked(page):
            place = SOURCE / file.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)


def main() -> int:
    """Build the site; the status is mkdocs'."""
    stage()
    config = Path(__file__).with_name("mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    ended = subprocess.run([*command, "--config-file", config], check=False)  # noqa: S603 - our own
    if not ended.returncode:
        print(f"The documentation: {SITE / 'index.html'}")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
