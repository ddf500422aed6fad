"""Prompts, and the interface of their sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Protocol

from pydantic import Field

from rollout.core.arguments import TokenIds, options, wrong

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@options
class Prompt:
    """One prompt.

    Attributes:
        ids: token ids, at least one.
        metadata: for the reward, by name; each sample has a copy.

    Raises:
        TypeError, ValueError: these are no token ids, or there is none.
    """

    ids: Annotated[TokenIds, Field(min_length=1)]
    metadata: dict[str, Any] = field(default_factory=dict)


class PromptSource(Protocol):
    """A source of prompts; ``rollout.driver.data.prompt_data`` has some.

    For a driver with a journal it has a ``name``, too: a text that is the same in each launch.
    """

    def take(self) -> Prompt | None:
        """The next prompt, or None at the end."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Its place, as values of JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there.

        Args:
            state: what ``state_dict`` returned.
        """
        ...


def checked_name(name: Any) -> str:
    """The name of a data set, which a folder of a driver's journal gets.

    Raises:
        ValueError: no folder can have it.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong("name", name, "1 to 100 letters, digits or ._-, with no dot in front")
    return name
