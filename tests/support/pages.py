"""Code of the documentation's pages."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str, language: str = "python") -> str:
    """The first block of this language in a page."""
    found = re.search(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert found is not None, f"{page} has no block of {language}"
    return found[1]


def run_code(page: str, language: str = "python", **names: Any) -> dict[str, Any]:
    """The names that the block makes."""
    made = {"__name__": Path(page).stem, **names}
    exec(compile(code_of(page, language), page, "exec"), made)
    return made
