"""How long a call to an engine may take, by class of call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a call may take, by class of call.

    Attributes:
        control_s: continue, abort, versions, and all questions about the engine.
        pause_s: pause; in mode ``abort`` it returns when every request has left.
        flush_margin_s: flush, on top of the time it may wait inside the engine.
        memory_s: release and resume.
        update_s: weight and LoRA updates; not paused, they wait for all requests in flight.
        group_s: making and leaving a weight update group; making one waits for its peers.
        check_s: ``weights_checker``, which reads all weights.
        generate_s: one generation from first byte sent to last byte received.
        ready_s: ``is_ready``, a flag in the engine's front end.
        health_s: ``is_healthy``, which may send a real request.
    """

    control_s: float = 30.0
    pause_s: float = 120.0
    flush_margin_s: float = 15.0
    memory_s: float = 120.0
    update_s: float = 600.0
    group_s: float = 120.0
    check_s: float = 300.0
    generate_s: float = 3600.0
    ready_s: float = 5.0
    health_s: float = 25.0
