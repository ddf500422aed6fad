"""What one engine should be, in words that fit every kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import WorkerType


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one engine should be.

    Attributes:
        kind: ``embedded`` or ``sglang``; ``attached`` is one that runs already.
        gpu_ids: physical GPUs it gets on this node; empty runs it on the CPU.
        num_cpus: cores it may use on this node when it runs on the CPU.
        memory_saver: it must be able to give its memory back.
        weights_cpu_backup: it keeps a host copy of its weights while they are released.
        options: more options in the engine's own names, without the leading dashes.
        log_path: its standard output and error.
        worker_type: its part in a server that separates prefill, decode or encoding.
        python: the interpreter to run it in; empty for this one, ``sglang-cpu`` for the one that
            ``rollout sglang-cpu install`` made.
        url: where it listens, for one that is attached.
        num_nodes: nodes it spans; each is launched with a spec of its own.
        node_rank: which of them this is; rank 0 takes the requests.
        dist_init_addr: ``host:port`` where its nodes meet, see ``LocalLauncher.hold_address``.
    """

    engine_id: str
    kind: str
    model_path: str
    log_path: str
    gpu_ids: tuple[int, ...] = ()
    num_cpus: float = 1.0
    memory_saver: bool = True
    weights_cpu_backup: bool = False
    weight_version: int = 0
    start_timeout_s: float = 300.0
    host: str = "127.0.0.1"
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    worker_type: WorkerType = WorkerType.REGULAR
    python: str = ""
    url: str = ""
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
