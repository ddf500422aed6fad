"""How an engine process is started: its command, its environment, and what it leaves behind.

Helpers for the modules that turn an ``EngineSpec`` into one.  An option is written in the engine's
own name, with or without leading dashes, with dashes or underscores.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Invocation:
    """One engine process to be.

    Attributes:
        command: program and arguments.
        env: its whole environment.
        cleanup: patterns of files a killed engine leaves, as ``EngineProcess.spawn`` takes them.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    cleanup: Sequence[str] = ()


def normalized(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the one spelling used here: underscores, no leading dashes.

    Raises:
        ValueError: an option is given twice, in two spellings.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = name.lstrip("-").replace("-", "_")
        if key in found:
            raise ValueError(f"option {key} is given twice, in two spellings")
        found[key] = value
    return found


def refuse(options: Collection[str], owners: Mapping[str, str]) -> None:
    """Refuse options that are set elsewhere, written out or cut short.

    Args:
        owners: option -> which setting it follows from.

    Raises:
        ValueError: naming each such option and what to set in its place.
    """
    # Command lines take unique beginnings of a flag for the whole of it.
    taken = [
        f"{name} ({reason})"
        for name in sorted(options)
        for owned, reason in owners.items()
        if name == owned or (owned.startswith(name) and name not in owners)
    ]
    if taken:
        raise ValueError(f"options that cannot be set here: {'; '.join(taken)}")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """A command line: True is a bare flag, False and None are left out, a list is several words.

    A mapping becomes JSON, which is how SGLang takes structured options.
    """
    flags: list[str] = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        flags.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            flags.append(json.dumps(dict(value)))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags += [str(one) for one in value]
        elif value is not True:
            flags.append(str(value))
    return flags
