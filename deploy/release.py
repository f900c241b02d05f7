"""What a release needs of its tag: `python3 deploy/release.py check|notes TAG`. Standard library
only.

`check` compares the tag with the version in the source, and with the changelog, which must have a
section for it. `notes` prints that section.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


class ReleaseError(Exception):
    """The tag cannot be released."""


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked for; status 1 says why the tag cannot be released."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("action", choices=["check", "notes"])
    parser.add_argument("tag")
    options = parser.parse_args(arguments)
    try:
        check(options.tag)
        notes = section(options.tag)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if options.action == "notes":
        print(notes)
    return 0


def check(tag: str) -> None:
    """Raise ReleaseError unless the source has the tag's version, everywhere it is written."""
    written = {
        "dshealthd/__init__.py": r'^__version__ = "(.+)"$',
        "deploy/kubernetes/base/daemonset.yaml": r"^ +image: .+:(.+)$",
    }
    for file, pattern in written.items():
        text = (PROJECT / file).read_text(encoding="utf-8")
        for version in re.findall(pattern, text, re.MULTILINE):
            if tag != f"v{version}":
                message = f"the tag is {tag}, and {file} has {version}"
                raise ReleaseError(message)


def section(tag: str) -> str:
    """Return what the changelog says about a version; raises ReleaseError where that is nothing."""
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    for part in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title.split()[:1] == [tag.removeprefix("v")] and text.strip():
            return text.strip()
    message = f"CHANGELOG.md has no section for {tag.removeprefix('v')}"
    raise ReleaseError(message)


if __name__ == "__main__":
    sys.exit(main())
