"""What the engines of a group are started with, as ``rollout plan`` shows it.

Always true: no value of a variable is shown that this library does not set itself, for it may be a
secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from engines.launch import StartSettings, start_settings
from engines.protocol import WorkerType
from engines.protocol.errors import EngineError
from rollout.cli.lib.output import show
from rollout.config import GroupConfig, ServerConfig
from rollout.runtime.preflight import planned_spec

_GPUS = "CUDA_VISIBLE_DEVICES"


def start_values(
    server: ServerConfig, group: GroupConfig, *, has_backup: bool
) -> dict[str, Any] | None:
    """Variables, options and deadlines of an engine, ready for JSON.

    None for engines that are not started here, and for a group that is refused.
    """
    if group.engine.is_attached or group.worker_type is WorkerType.PLACEHOLDER:
        return None
    spec = replace(planned_spec(server, group), weights_cpu_backup=has_backup)
    try:
        found = start_settings(spec, os.environ)
    except (ValueError, EngineError):
        return None
    return {
        **asdict(_without_ids(found)),
        "env_of_config": sorted(group.engine.env.keys() - found.env.keys()),
        "memory_saver": spec.memory_saver,
        "weights_cpu_backup": spec.weights_cpu_backup,
        "start_timeout_s": spec.start_timeout_s,
        "kill_timeout_s": spec.kill_timeout_s,
    }


def _without_ids(settings: StartSettings) -> StartSettings:
    """Which GPUs an engine gets is known when it is placed."""
    env = dict(settings.env)
    if env.get(_GPUS):
        env[_GPUS] = "its GPUs"
    return replace(
        settings,
        env=env,
        overrides=[override for override in settings.overrides if override.name != _GPUS],
    )


def show_start(name: str, start: Mapping[str, Any]) -> None:
    """Print the values of one group."""
    own = [name for name in ("memory_saver", "weights_cpu_backup") if start[name]]
    lines = {
        "options": [*own, *(f"{key}={value}" for key, value in start["options"].items())],
        "sets": [f"{key}={value}" for key, value in start["env"].items()],
        "sets from engine.env": start["env_of_config"],
        "does not inherit": start["dropped"],
        "overridden": [
            "{name}={used} instead of {default} ({by})".format(**override)
            for override in start["overrides"]
        ],
    }
    show(
        f"{name}: an engine has {start['start_timeout_s']:g} s to start and "
        f"{start['kill_timeout_s']:g} s to end"
    )
    for title, values in lines.items():
        if values:
            show(f"  {title}: {', '.join(values)}")
