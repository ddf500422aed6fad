"""The environment of a vLLM server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from engines.process.allocator import refuse_expandable_segments
from engines.protocol.spec import EngineSpec, inherited_environment

_DEV_MODE, _OWN_KEY = "VLLM_SERVER_DEV_MODE", "VLLM_API_KEY"


def build_environment(spec: EngineSpec, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the engine.

    Args:
        inherited: this process's own.

    Raises:
        ValueError: a variable that would break the release of memory, or hide the control
            endpoints.
    """
    env = inherited_environment(inherited, spec.python)
    env |= spec.visible_gpus | {_DEV_MODE: "1"}
    # vLLM would check it besides ours, and refuse ours.
    env.pop(_OWN_KEY, None)
    if spec.is_on_cpu:
        # More than there are free cores make a forward pass many times slower.
        env["OMP_NUM_THREADS"] = str(max(1, math.ceil(spec.num_cpus)))
    if Path(spec.model_path).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    env.update(spec.env)
    _refuse(spec, env)
    return env


def _refuse(spec: EngineSpec, env: Mapping[str, str]) -> None:
    if spec.memory_saver:
        refuse_expandable_segments(env, "vLLM's sleep mode")
    if _OWN_KEY in env:
        raise ValueError(
            f"{_OWN_KEY}: each launch makes its own keys, which the router has; leave it out, or "
            "set engine.key to false for none"
        )
    if env[_DEV_MODE] != "1":
        raise ValueError(
            f"{_DEV_MODE}={env[_DEV_MODE]}: without it vLLM has no control endpoints; unset it"
        )
