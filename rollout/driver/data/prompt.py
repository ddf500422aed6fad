"""Prompts, and the interface of their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.core.arguments import check_ids, check_kind
from rollout.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: token ids, at least one.
        metadata: for the reward, by name; each sample has a copy.
    """

    ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


def check_prompt(name: str, prompt: Any) -> None:
    """Check what a user gave as a prompt.

    Raises:
        ConfigError: it is no ``Prompt`` with token ids.
    """
    check_kind(name, prompt, Prompt, "a Prompt(ids)")
    check_ids(f"{name}.ids", prompt.ids)
    if not prompt.ids:
        raise ConfigError(f"{name} has no tokens", setting=name)
    check_kind(f"{name}.metadata", prompt.metadata, dict, "a dict")


class PromptSource(Protocol):
    """A source of prompts; ``rollout.driver.data.prompt_data`` has some."""

    def take(self) -> Prompt | None:
        """The next prompt; None at the end."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
