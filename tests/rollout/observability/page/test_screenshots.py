"""The screenshots of the documentation are made by a command: ``make screenshots``."""

import struct
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM
from tests.support.page_screenshots import take_screenshots

IMAGES = Path(__file__).parents[4] / "docs/images"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
]


def size_of(png: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG."""
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_command_makes_the_screenshots_that_the_documentation_shows(tmp_path: Path) -> None:
    take_screenshots(tmp_path)
    made = {png.name: size_of(png) for png in tmp_path.iterdir()}
    kept = {name: size_of(IMAGES / name) for name in made}
    # Their heights depend on how many events there were.
    assert {name: width for name, (width, _) in made.items()} == {
        name: width for name, (width, _) in kept.items()
    }
    assert set(made) == {"live_page.png", "compared_runs.png"}
