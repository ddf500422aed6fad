"""The list of the public names: what users may import.

    python -m tools.public_names    # writes docs/reference/public_names.txt

Always true: it is that of each public module's ``__all__``; nothing is imported, so the list is the
same in every environment.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/reference/public_names.txt"
MODULES = (
    "rollout",
    "rollout.adapters.trl",
    "rollout.config",
    "rollout.driver",
    "rollout.driver.rewards",
    "rollout.testing",
)
_HEAD = """\
# What users may import: all else may change without notice.
# Written by `python -m tools.public_names`.
"""


def public_names() -> dict[str, frozenset[str]]:
    """Public module -> its names."""
    return {module: frozenset(_names_of(module)) for module in MODULES}


def listing() -> str:
    """The text of the file."""
    names = public_names().items()
    lines = sorted(f"{module}.{name}" for module, found in names for name in found)
    return _HEAD + "\n".join(lines) + "\n"


def _names_of(module: str) -> Iterator[str]:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                yield from ast.literal_eval(value)


if __name__ == "__main__":
    FILE.write_text(listing())
