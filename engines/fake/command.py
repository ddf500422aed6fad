"""The command line of a fake engine in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from engines.fake.engine.fake_caches import CACHES
from engines.protocol import Endpoint, WorkerType
from engines.protocol.spec import (
    AT_LAUNCH,
    EngineSpec,
    Invocation,
    as_flags,
    inherited_environment,
    normalized,
    refuse,
)

_OWNERS = {
    **AT_LAUNCH,
    "no_memory_saver": "the group's needs_offload",
    "weights_cpu_backup": "engine.weights_cpu_backup",
}
_OPTIONS = frozenset({"drain_s", "fault", "reports_manifest", "token_s", *CACHES.values()})


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine, or this node of it, at this endpoint.

    Raises:
        ValueError: an option that the spec's own fields set, one that it does not have, or
            something only SGLang can be.
    """
    options = normalized(spec.options)
    refuse(options, _OWNERS)
    if unknown := sorted(options.keys() - _OPTIONS):
        has = ", ".join(sorted(_OPTIONS))
        raise ValueError(f"the fake engine has no options {', '.join(unknown)}; it has {has}")
    if spec.worker_type is not WorkerType.REGULAR:
        raise ValueError(f"the fake engine cannot be a {spec.worker_type} worker; SGLang can")
    options |= {
        **spec.launch_options(endpoint),
        "no_memory_saver": not spec.memory_saver,
        "weights_cpu_backup": spec.weights_cpu_backup,
    }
    return [spec.python or sys.executable, "-m", "engines.fake", *as_flags(options)]


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """How this engine is started."""
    env = {**inherited_environment(inherited), **spec.visible_gpus, **spec.env}
    return Invocation(build_command(spec, endpoint), env)
