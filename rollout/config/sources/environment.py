"""The variables of this library: ``ROLLOUT_LOG_LEVEL``, ``ROLLOUT_LOG_DIR``.

Always true: in a user's process only the loggers ``rollout`` and ``engines`` change; a handler is
added in processes of this library alone, and only where the level is set.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from rollout.core.errors import ConfigError

LOG_LEVEL, LOG_DIR = "ROLLOUT_LOG_LEVEL", "ROLLOUT_LOG_DIR"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LOGGERS = ("rollout", "engines")


def default_log_dir() -> str:
    """The folder of runs if ``log_dir`` is not set."""
    return os.environ.get(LOG_DIR) or "runs"


def set_log_level() -> bool:
    """Give the library's loggers the level of the environment; whether it has one.

    Raises:
        ConfigError: it is no level.
    """
    level = os.environ.get(LOG_LEVEL, "")
    if level and level.upper() not in _LEVELS:
        raise ConfigError(
            f"{LOG_LEVEL} = {level!r}: must be one of {', '.join(_LEVELS).lower()}",
            setting=LOG_LEVEL,
            value=level,
        )
    for name in _LOGGERS if level else ():
        logging.getLogger(name).setLevel(level.upper())
    return bool(level)


def log_to_stderr() -> None:
    """In a process of this library: its loggers write to stderr, if their level is set.

    Raises:
        ConfigError: the level is none.
    """
    if set_log_level():
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def options_of_actors(*, exports_spans: bool = False) -> dict[str, Any]:
    """Ray's options with which an actor on any node gets the level of this process, and with
    ``exports_spans`` its ``OTEL_*`` variables.

    Ray's dashboard shows these options, so keys stay out: an actor has the headers of its node.
    """
    variables = {
        name: text
        for name, text in os.environ.items()
        if (name == LOG_LEVEL and text)
        or (exports_spans and name.startswith("OTEL_") and not name.endswith("_HEADERS"))
    }
    return {"runtime_env": {"env_vars": variables}} if variables else {}
