"""How an SGLang server is started on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engines.invocation import Invocation
from engines.protocol import Endpoint
from engines.sglang.command import build_command, parallel_of
from engines.sglang.environment import CLEANUP, build_environment
from engines.sglang_cpu.installation import Installation
from engines.spec import EngineSpec

CACHED = "sglang-cpu"
"""As ``python`` of a spec: the interpreter that ``rollout sglang-cpu install`` made."""


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """Command, environment and leftovers of this engine, or of this node of it.

    Raises:
        ValueError: as ``build_command`` and ``build_environment`` do.
        InstallError: it asks for the cached interpreter, and there is none.
    """
    python = str(Installation().require()) if spec.python == CACHED else spec.python
    command = build_command(spec, endpoint, python)
    env = build_environment(
        spec,
        inherited,
        parallel_of(spec),
        python=python,
        cpu_ids=tuple(sorted(os.sched_getaffinity(0))),
    )
    return Invocation(command, env, CLEANUP)
