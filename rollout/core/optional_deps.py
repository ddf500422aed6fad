"""Imports of libraries that belong to an extra of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        raise ConfigError(f"{reason}; pip install 'ray-rollout[{extra}]'") from None
