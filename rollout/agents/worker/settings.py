"""What one worker of the agents' program is started with."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from engines.plain_json import read_json
from rollout.config import AgentsConfig
from rollout.router.http.fast_json import dumps


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one worker; never in a command line.

    Attributes:
        number: of this worker, from 0.
        folder: of its sessions' files.
        client_key, control_key: the router's, or empty for none.
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

    def to_json(self) -> bytes:
        """For ``of_json`` in another process; with the keys."""
        return dumps({**asdict(self), "config": self.config.model_dump(mode="json")})

    @classmethod
    def of_json(cls, data: bytes) -> WorkerSettings:
        """What ``to_json`` has made."""
        values = read_json(data)
        return cls(**{**values, "config": AgentsConfig.model_validate(values["config"])})
