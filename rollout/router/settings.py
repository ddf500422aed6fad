"""What the router needs to be told.  ``RouterConfig`` of ``rollout.config`` is one of these."""

from __future__ import annotations

from typing import Protocol


class RouterSettings(Protocol):
    """Read-only, so that any frozen class with these fields will do."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def max_held_requests(self) -> int: ...
    @property
    def hold_timeout_s(self) -> float: ...
    @property
    def connect_timeout_s(self) -> float: ...
    @property
    def max_connections(self) -> int: ...
