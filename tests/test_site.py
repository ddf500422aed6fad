"""The built documentation needs no other host: every page is opened in a browser without a network.

Needs the extra ``docs``, Playwright and chromium; ``make test-slow`` installs the extra.
"""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[1]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Loads(HTMLParser):
    """The addresses that a page loads when it is opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.classes.update((values.get("class") or "").split())
        if tag != "a":
            self.found += [values[name] or "" for name in ("src", "href") if name in values]


def test_every_page_is_built_and_names_no_other_host(site: Path) -> None:
    pages = {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")}
    sources = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    names = re.findall(r"^::: \S*?(\w+)$", (ROOT / "docs/reference/python.md").read_text(), re.M)
    assert len(set(names)) == len(names) > 30
    of_names = {f"reference/python/{name}" for name in names}
    assert pages == {str(path.with_suffix("")) for path in sources} | of_names | {"404"}
    for path in site.rglob("*.html"):
        page = Loads(path.read_text())
        assert [address for address in page.found if address.startswith(("http", "//"))] == []
        # The theme loads mermaid from another host as soon as a page has a diagram of it.
        assert "mermaid" not in page.classes


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
def test_no_page_loads_anything_from_another_host(site: Path, address: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    elsewhere: list[str] = []
    with playwright.sync_playwright() as started:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page()
        page.on("request", lambda request: elsewhere.append(request.url))
        for path in sorted(site.rglob("*.html")):
            page.goto(f"{address}/{path.relative_to(site)}", wait_until="networkidle")
        browser.close()
    assert elsewhere
    assert {url for url in elsewhere if not url.startswith((address, "data:", "blob:"))} == set()
