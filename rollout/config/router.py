"""The router."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollout.config.slices import Seconds, Slice


class RouterConfig(Slice):
    """The one door to a server's engines."""

    host: str = "127.0.0.1"
    """Address it binds; loopback unless told, since anyone who reaches it can generate."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port it binds; 0 takes a free one, which ``status`` shows."""
    max_held_requests: Annotated[int, Field(ge=0)] = 4096
    """Requests parked while the engines are offloaded; one more gets a 503."""
    hold_timeout_s: Seconds = 600.0
    """How long a request may stay parked before it gets a 503."""
    connect_timeout_s: Seconds = 5.0
    """Until a connection to an engine must stand; past it, another engine is tried."""
    control_timeout_s: Seconds = 15.0
    """How late the router itself may be with its answer to the server it belongs to."""
    max_connections: Annotated[int, Field(ge=1)] = 16384
    """Connections to engines at the same time; each needs a file descriptor."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    """The longest request body it takes; a longer one gets a 413."""
    request_timeout_s: Seconds = 7200.0
    """From a request's head to its last byte, waiting included; past it, 504 or a cut reply."""
    policy: Literal["least_in_flight", "power_of_two", "round_robin", "session", "prefix"] = (
        "least_in_flight"
    )
    """How an engine is chosen; ``session`` goes by ``X-Session-ID`` or ``session_id``, ``prefix``
    by the beginning of the prompt, both within bounds of load."""
    session_ttl_s: Seconds = 3600.0
    """A session (its engine, its recorded turns) unheard of for so long is forgotten."""
    max_sessions: Annotated[int, Field(ge=1)] = 100_000
    """Sessions remembered; beyond it the oldest is forgotten, and recording another is refused."""
    token_failover: Literal["off", "asked", "on"] = "asked"
    """Whether a request goes on elsewhere, token by token, when its engine dies: never, when its
    header ``X-Token-Failover: on`` asks for it, or always."""
    failover_interval: Annotated[int, Field(ge=1)] = 32
    """Tokens between two looks at a request that can fail over; what came since is recomputed.
    More for a long one that is not streamed: none is looked at more than 64 times."""
    max_failovers: Annotated[int, Field(ge=1)] = 8
    """How many engines one request may lose before it fails."""
    client_key: str = Field(default="", repr=False)
    """Bearer key that clients must show; left out: none needed."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for ``/engines``, ``/metrics``, ``/sessions``, aborts; left out: the client's."""
    max_recorded_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Recorded turns of all sessions together; past it, recording another turn is refused."""
