"""Prompts, and the interface of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its token ids, and metadata for the reward."""

    ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """A source of prompts; ``rollout.driver.data.prompt_data`` has some."""

    def take(self) -> Prompt | None:
        """The next prompt; None at the end."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
