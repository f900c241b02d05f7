"""What several of the web tests need."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.web import certificates
from tests.web.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium for all tests of a file: while it runs, no other may run an event loop."""
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with certificates: an authority `ca`, from it `server`, `server2`, `scraper` and
    `address`; from another, `stranger`.
    """
    directory = tmp_path_factory.mktemp("keys")
    certificates.authority(directory, "ca")
    certificates.authority(directory, "other")
    certificates.certificate(directory, "server", "ca", "DNS:localhost,IP:127.0.0.1")
    certificates.certificate(directory, "server2", "ca", "DNS:localhost,IP:127.0.0.1")
    certificates.certificate(
        directory, "scraper", "ca", "DNS:scraper.example,URI:spiffe://example/scraper"
    )
    certificates.certificate(directory, "address", "ca", "IP:192.0.2.7,IP:2001:db8::7")
    certificates.certificate(directory, "stranger", "other", "DNS:scraper.example")
    certificates.encrypted(directory, "server")
    return directory
