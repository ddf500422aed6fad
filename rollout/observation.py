"""What can be seen of one server at one moment, in one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.timeline.span import Excerpt
from rollout.types import ServerStatus


@dataclass(frozen=True, slots=True)
class Observation:
    """Status, timelines and router, as one server tells them.

    Attributes:
        timelines: by source (the server, each group), what is new since the cursors asked for.
        router: what its ``/engines`` shows; empty where it cannot be asked.
        troubles: who could not be asked, and why.
    """

    status: ServerStatus
    timelines: Mapping[str, Excerpt] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
