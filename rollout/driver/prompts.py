"""What a rollout begins with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its token ids, and whatever the reward needs to judge the completion."""

    ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
