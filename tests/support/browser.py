"""The page in a headless Chromium, for tests and for the screenshots of the documentation.

Needs Debian's ``chromium`` (or ``CHROMIUM=/path``) and Playwright.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; ended after the block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    browser: Any,
    url: str,
    *,
    width: int = 1400,
    height: int = 1000,
    scheme: str = "light",
    ready: str = "#link.live",
) -> Iterator[Any]:
    """The page at ``url``, once it has what matches ``ready``: it is connected.

    After the block, any error in its console fails, and any request to another host.
    """
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type == "error" else None,
    )
    page.on("request", lambda request: complaints.extend(_elsewhere(request.url)))
    page.goto(url)
    page.wait_for_selector(ready)
    yield page
    page.close()
    assert complaints == []


def _elsewhere(url: str) -> list[str]:
    return [] if url.startswith(("http://127.0.0.1", "file://", "data:")) else [f"loads {url}"]


def shot(page: Any, name: str) -> None:
    """A screenshot of the whole page in the folder ``$SCREENSHOTS``, if that is set."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{folder}/{name}.png", full_page=True)
