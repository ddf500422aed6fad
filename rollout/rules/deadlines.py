"""How long an engine may take to start, to leave and to end, and a command to wait for another.

Always true: a deadline bounds only what hangs.  A start fails at once when the process of the
engine ends, and a kill is done as soon as the processes have ended and their memory is free.
"""

from __future__ import annotations

from rollout.config import EngineConfig, LifecycleConfig

_START_ON_CPU_S = 300.0
# Imports, CUDA and NCCL take up to 2 minutes; kernels that are compiled and CUDA graphs that are
# captured at the first start take up to 10 more.
_START_ON_GPUS_S = 900.0
# Of a network disk from which several engines load at the same time.
_LOAD_BYTES_PER_S = 200e6
_KILL_ON_CPU_S = 25.0
# The kernel unpins a host copy of the weights and tears down CUDA before a process has ended: a
# copy of 140 GB takes tens of seconds.
_KILL_ON_GPUS_S = 150.0
_MARGIN_S = 10.0
STOP_TIMEOUT_S = 15.0
"""How long engines and router may take to exit before they are killed."""


def start_timeout_s(engine: EngineConfig, checkpoint_bytes: int) -> float:
    """Seconds until an engine must report ready.

    Args:
        checkpoint_bytes: bytes of the weights on disk; 0 if unknown.
    """
    if engine.start_timeout_s is not None:
        return engine.start_timeout_s
    least_s = _START_ON_GPUS_S if engine.gpus else _START_ON_CPU_S
    return round(least_s + checkpoint_bytes / _LOAD_BYTES_PER_S)


def kill_timeout_s(engine: EngineConfig) -> float:
    """Seconds until a killed engine has ended and its memory is free."""
    if engine.kill_timeout_s is not None:
        return engine.kill_timeout_s
    return _KILL_ON_GPUS_S if engine.gpus else _KILL_ON_CPU_S


def group_margin_s(engine: EngineConfig) -> float:
    """Seconds that a group may take after the deadline of a command: it ends late engines."""
    return _MARGIN_S + kill_timeout_s(engine)


def leave_timeout_s(lifecycle: LifecycleConfig) -> float:
    """Seconds until an engine is paused and flushed, and has released its memory."""
    return 2 * lifecycle.command_timeout_s + lifecycle.memory_timeout_s


def lock_timeout_s(lifecycle: LifecycleConfig) -> float:
    """Seconds that a command waits for the one before it: as long as a push, with all phases."""
    of_memory_s = 2 * lifecycle.memory_timeout_s
    return of_memory_s + lifecycle.update_timeout_s + 2 * lifecycle.command_timeout_s
