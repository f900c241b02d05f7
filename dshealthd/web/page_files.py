"""The files of the page, and the headers they are served with."""

from __future__ import annotations

import os

from dshealthd.core.host import read_bytes

PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "deny",
}
PAGE = os.path.join(os.path.dirname(__file__), "page")
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
ASSETS = "/page/"
PAGES = {"page.html": "/", "fleet.html": "/fleet"}
"""Files of the page that are served at paths of their own."""


def page_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page with their content types, by path."""
    files = {}
    for name in os.listdir(PAGE):
        kind = CONTENT_TYPES.get(os.path.splitext(name)[1])
        if kind is not None:
            files[PAGES.get(name, ASSETS + name)] = (read_bytes(os.path.join(PAGE, name)), kind)
    return files
