"""Code of the documentation's pages."""

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


def code_of(page: str, language: str = "python", number: int = 0) -> str:
    """A block of this language in a page: the first, or that with this number from 0."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(found) > number, f"{page} has {len(found)} blocks of {language}"
    return str(found[number])


def run_code(page: str, language: str = "python", number: int = 0, **names: Any) -> dict[str, Any]:
    """The names that the block makes."""
    made = {"__name__": Path(page).stem, **names}
    exec(compile(code_of(page, language, number), page, "exec"), made)
    return made
