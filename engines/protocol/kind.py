"""What this library asks of a kind of engine before one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engines.protocol import Endpoint, Engine
from engines.protocol.spec import EngineSpec, Invocation

Invoke = Callable[[EngineSpec, Endpoint, Mapping[str, str]], Invocation]
"""Command and environment of an engine; the mapping is the environment that it inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of engine: what is true of all its versions.

    What depends on the version and the flags of a running server is in ``features.Features``.

    Attributes:
        name: as ``EngineSpec.kind``.
        client: makes the client of one that runs, from ``endpoint``, ``engine_id``,
            ``weights_cpu_backup`` and, where they are not the default ones, ``deadlines``.
        invocation: how one is started; None where only other programs start it.
        resume_path: of its endpoint that ends a pause.
        is_numbered_at_start: its command line gives it the number of its weight version.
        why_open: why one must not listen at a host; empty if it may.
    """

    name: str
    client: Callable[..., Engine]
    invocation: Invoke | None = None
    resume_path: str = "/continue_generation"
    is_numbered_at_start: bool = True
    why_open: Callable[[str], str] = lambda host: ""
