"""The command line of an embedded engine.  Imports nothing heavy: launchers use it."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from engines.embedded.config import EngineConfig
from engines.protocol import Endpoint

if TYPE_CHECKING:
    from engines.launch import EngineSpec

_OURS = {
    "model_path",
    "host",
    "port",
    "weight_version",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "device",
    "num_threads",
}


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine at this endpoint.

    Raises:
        ValueError: an option that the spec's own fields set, or one the engine does not have.
    """
    known = {item.name for item in fields(EngineConfig)}
    options = {name.replace("-", "_"): value for name, value in spec.options.items()}
    if taken := sorted(options.keys() & _OURS):
        raise ValueError(f"options {', '.join(taken)} are set by the engine's own settings")
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"the embedded engine has no options {', '.join(unknown)}; "
            f"it has {', '.join(sorted(known - _OURS))}"
        )
    options |= {
        "model_path": spec.model_path,
        "host": endpoint.host,
        "port": endpoint.port,
        "weight_version": spec.weight_version,
        "enable_memory_saver": spec.memory_saver,
        "enable_weights_cpu_backup": spec.weights_cpu_backup,
        "device": "cuda" if spec.gpu_ids else "cpu",
        "num_threads": max(1, math.ceil(spec.num_cpus)),
    }
    command = [sys.executable, "-m", "engines.embedded"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not False and value is not None:
            command += [flag, str(value)]
    return command
