"""What a stream is connected to: where prompts come from, the engines, who watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.driver.completing import Completer
from rollout.driver.door import Door
from rollout.driver.limiter import Limiter
from rollout.driver.prompts import Prompt


class PromptSource(Protocol):
    """Where prompts come from; ``rollout.driver.sources`` has some."""

    def take(self) -> Prompt | None:
        """The next prompt; None when there is none left."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is, for a bar."""

    num_ready: int
    num_wanted: int
    num_open: int
    num_rejected: int


@dataclass(slots=True)
class Engines:
    """What all streams of a driver share.

    Attributes:
        weight_version: the policy's newest, as far as it is known.
    """

    door: Door
    limiter: Limiter
    completer: Completer
    weight_version: int | None = None
