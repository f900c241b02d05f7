"""A real Chromium, and what it does while it shows the page."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium-headless-shell")
"""A tenth of what Chromium itself takes for a page, each of which is a window of it, headless or
not."""
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE, DESK = (390, 844), (1440, 900)
PATIENCE = 60.0
"""Seconds for what the page shows in two, on a machine that does much else."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium without its windows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(ARGUMENTS), timeout=2000 * PATIENCE
        )
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page that is open, with all that it asked for and complained of."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        size: tuple[int, int] = DESK,
        scheme: Literal["light", "dark"] = "light",
        prepare: Callable[[Page], object] = lambda _page: None,
    ) -> None:
        """Open `url`, once the page was prepared, and wait until it shows something."""
        self.url = url
        self.page: Page = browser.new_page(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console",
            lambda message: (
                self.complaints.append(message.text)
                if message.type in {"error", "warning"}
                else None
            ),
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.set_default_timeout(1000 * PATIENCE)
        prepare(self.page)
        self.page.goto(url)
        self.page.wait_for_selector(".verdict")

    def text(self, selector: str = "body") -> str:
        """Return what can be read in a part of the page."""
        return self.page.inner_text(selector)

    def wait(self, selector: str, text: str, seconds: float = PATIENCE) -> None:
        """Wait until a part of the page has a text in it."""
        self.page.wait_for_selector(f"{selector}:has-text('{text}')", timeout=seconds * 1000)

    def panel(self, title: str) -> str:
        """Return the text of a panel."""
        return self.text(f"section[aria-label='{title}']")

    def is_as_wide_as_its_window(self) -> bool:
        """Tell whether nothing sticks out at the side, and no panel hides a part of what it
        holds.
        """
        return bool(
            self.page.evaluate("""() => document.documentElement.scrollWidth <= window.innerWidth
                && [...document.querySelectorAll('.panel, .verdict')]
                    .every((panel) => panel.scrollWidth <= panel.clientWidth)""")
        )
