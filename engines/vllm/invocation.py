"""How a vLLM server is started on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from engines.protocol import Endpoint
from engines.protocol.spec import SEMAPHORES, EngineSpec, Invocation
from engines.vllm.command import DEFAULTS, build_command
from engines.vllm.environment import build_environment

# What one leaves that was killed.
CLEANUP = ("/dev/shm/psm_*", *SEMAPHORES, "/dev/shm/*-cpushm_*")
# The folder of the sockets between its processes; each has a UUID for its name.
SOCKETS = "VLLM_RPC_BASE_PATH"


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """Command and environment of this engine.

    Raises:
        ValueError: as ``build_command`` and ``build_environment`` do.
    """
    return Invocation(
        build_command(spec, endpoint),
        build_environment(spec, inherited),
        defaults=DEFAULTS,
        cleanup=CLEANUP,
        folder_variable=SOCKETS,
    )
