"""The state of one server at one moment, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.core.types import ServerStatus
from rollout.observability.timeline.span import Excerpt


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """Status, timelines and router of one server.

    Attributes:
        timelines: by source (the server and each group), the part after the requested cursors.
        router: the values of its ``/engines``, or empty if it does not answer.
        troubles: the parts that do not answer, each with the reason.
    """

    status: ServerStatus
    timelines: Mapping[str, Excerpt] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
