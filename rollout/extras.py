"""Libraries that come with an extra of this package; where one is missing, the error names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollout.errors import ConfigError


@contextmanager
def extra(name: str, said: str) -> Iterator[None]:
    """Inside, import what ``ray-rollout[name]`` brings.

    Args:
        said: what is missing, and for what.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise ConfigError(f"{said}; pip install 'ray-rollout[{name}]'") from None
