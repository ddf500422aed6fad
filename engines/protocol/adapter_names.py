"""Names of LoRA adapters (pure): clients have one for all versions, engines one for each.

Always true: one name of an engine has one content, so a request that was given it has one version
from its first token to its last.
"""

from __future__ import annotations

from collections.abc import Mapping

Names = tuple[str | None, ...]
"""Adapters of a request: one for each prompt, or one for all; None is the base."""
UNNAMED: Names = ("",)
"""The adapters of a request that names no weights."""
_MARK = "@"


def engine_name(adapter: str, version: int) -> str:
    """What engines call one version of an adapter."""
    return f"{adapter}{_MARK}{version}"


def adapter_of(name: str) -> str:
    """The adapter that ``engine_name`` was made of."""
    return name.rpartition(_MARK)[0]


def version_of(name: str | None) -> int:
    """The version in an engine's name; 0 for the base, and for an adapter that was not pushed."""
    number = (name or "").rpartition(_MARK)[2]
    return int(number) if number.isdecimal() and _MARK in (name or "") else 0


def table_of(versions: Mapping[str, int], default: str) -> dict[str, str]:
    """What the router maps names to: those of clients to those of engines.

    Args:
        default: the adapter of requests that name none.
    """
    table = {adapter: engine_name(adapter, version) for adapter, version in versions.items()}
    return table | ({"": table[default]} if default in table else {})


def resolved(names: Names, table: Mapping[str, str]) -> Names:
    """The engines' names; what is in no push stays as it is, and is the base if it is no name."""
    return tuple(None if name is None else table.get(name, name) or None for name in names)


def newest_version(names: Names, base_version: int | None) -> int | None:
    """The newest version of the weights that answer, or None if it is unknown."""
    newest = max(map(version_of, names), default=0)
    return max(newest, base_version or 0) if newest else base_version
