"""Imports of libraries that belong to an extra of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from rollout.core.errors import ConfigError


@contextmanager
def optional_import(extra: str, reason: str) -> Iterator[None]:
    """A block that imports a library of ``ray-rollout[extra]``.

    Args:
        reason: which library is missing, and which feature needs it.

    Raises:
        ConfigError: the library is not installed; the message has the ``pip`` command.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise ConfigError(f"{reason}; {install_command(extra)}") from None


def install_command(*extras: str) -> str:
    """The command that installs the libraries of these extras, by their own names.

    This package is on no index: its name would be a stranger's there.
    """
    requirements = []
    for line in metadata.requires("ray-rollout") or ():
        name, _, marker = line.partition(";")
        if re.search(rf"extra == .({'|'.join(extras)})\b", marker):
            requirements.append(f"'{name.strip()}'")
    return f"pip install {' '.join(requirements)}"
