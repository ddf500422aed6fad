"""What one worker of the agents' program is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.config import AgentsConfig


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one worker; pickled, and never in a command line.

    Attributes:
        number: of this worker, from 0.
        folder: of its sessions' files.
        client_key, control_key: the router's; empty for none.
        max_read_bytes: longest body.
        request_timeout_s: longest turn.
    """

    config: AgentsConfig
    number: int
    num_workers: int
    folder: str
    client_key: str = field(default="", repr=False)
    control_key: str = field(default="", repr=False)
    max_read_bytes: int = 8 << 20
    request_timeout_s: float = 7200.0
