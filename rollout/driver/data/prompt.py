"""Prompts, and the interface of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Protocol

from pydantic import Field

from rollout.core.arguments import TokenIds, options


@options
class Prompt:
    """One prompt.

    Attributes:
        ids: token ids, at least one.
        metadata: for the reward, by name; each sample has a copy.

    Raises:
        ConfigError: these are no token ids, or there is none.
    """

    ids: Annotated[TokenIds, Field(min_length=1)]
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """A source of prompts; ``rollout.driver.data.prompt_data`` has some."""

    def take(self) -> Prompt | None:
        """The next prompt; None at the end."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
