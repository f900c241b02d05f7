"""The documentation as a site: built from the lock file alone, every link leads somewhere, and no
page takes anything from the network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from generate import alert_rules
from tests import yaml_files
from tests.deploy.machine import LONGEST

ROOT = Path(__file__).parents[2]
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src")}
"""What a browser loads with a page; `link` but for the ones that only name a place."""

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(LONGEST)]


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and dict(attrs).get("rel") not in {"canonical", "prev"}:
                self.loads.append(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site as `make docs` does, without a proxy to anywhere while it is built."""
    subprocess.run([ROOT / "dev", "docs"], cwd=ROOT, check=True, timeout=1800)
    return ROOT / "build/site/html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Return all pages but the one that a server shows for what does not exist."""
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def broken(pages: dict[Path, Page]) -> Iterator[str]:
    """Yield each link within the site that leads nowhere."""
    for file, page in pages.items():
        for link in page.links + page.loads:
            if link.startswith(("https:", "http:", "mailto:", "data:")):
                continue
            path, anchor = urldefrag(unquote(link))
            target = (file.parent / path).resolve() if path else file
            if not target.is_file() or (target in pages and anchor not in pages[target].anchors):
                yield f"{file.name}: {link}"


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    """All of them, and those of the alerts: to the heading of the very alert."""
    assert len(pages) > 70
    assert list(broken(pages)) == []


def test_alerts_link_to_their_heading(site: Path, pages: dict[Path, Page], tmp_path: Path) -> None:
    """`runbook_url`, made for this site, is a page and a heading of it, for every alert."""
    shutil.copy(ROOT / "deploy/prometheus/thresholds.yml", tmp_path)
    where = f"file://{site}/docs/runbooks/SLUG.html"
    assert alert_rules.main([str(tmp_path), "--runbooks", where]) == 0
    groups = yaml_files.load(tmp_path / "alerts.yml")["groups"]
    urls = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]]
    assert len(urls) > 100
    for url in urls:
        path, anchor = urldefrag(url.removeprefix("file://"))
        assert anchor in pages[Path(path)].anchors


def test_nothing_comes_from_elsewhere(pages: dict[Path, Page]) -> None:
    """No script, style, font or picture is taken from another place."""
    loads = {load for page in pages.values() for load in page.loads}
    assert loads
    assert [load for load in loads if load.startswith(("http:", "https:", "//"))] == []


def test_it_builds_without_a_network(site: Path) -> None:
    """In a network namespace of its own, with no interface up, it builds as well."""
    assert site.is_dir()
    if os.geteuid() != 0:
        pytest.skip("a network namespace takes root")
    command = ["unshare", "--net", ROOT / "build/docs/bin/python", ROOT / "deploy/site/build.py"]
    ended = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
