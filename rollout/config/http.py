"""Settings of what a server offers over HTTP: the router and the live page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollout.config.base import ConfigSection, Seconds, is_loopback


class RouterConfig(ConfigSection):
    """The router: clients send every request for a server's engines to it."""

    host: str = "127.0.0.1"
    """Address to bind. Default: loopback, for any client that reaches the router can generate."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to bind; 0 takes a free port, which ``rollout status`` shows."""
    max_held_requests: Annotated[int, Field(ge=0)] = 4096
    """Requests held while the engines are offloaded; each further request gets a 503."""
    hold_timeout_s: Seconds = 600.0
    """How long a request may be held before it gets a 503."""
    connect_timeout_s: Seconds = 5.0
    """Deadline for connecting to an engine; after it, another engine is tried."""
    max_connections: Annotated[int, Field(ge=1)] = 16384
    """Most open connections to engines; each needs a file descriptor."""
    max_body_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    """Longest request body; a longer one gets a 413."""
    max_read_bytes: Annotated[int, Field(gt=0)] = 8 << 20
    """Longest request body that the router reads: over a million token ids, or some images. One of
    over 1 MiB is read in a process of its own, so other requests do not wait. A longer one is
    forwarded as it is and cannot fail over; vLLM engines, requests that name
    a LoRA adapter or its base refuse it."""
    request_timeout_s: Seconds = 7200.0
    """Deadline from the head of a request to the last byte of its reply, including the time it was
    held; after it, the client gets a 504 or an incomplete reply."""
    policy: Literal["affinity", "least_in_flight", "prefix"] = "affinity"
    """How an engine is chosen for a request. ``affinity``: turns of a session, and requests with
    the same ``X-Affinity`` (else ``X-Session-ID``, else ``X-SMG-Routing-Key``, else ``affinity`` in
    the first or last KiB of the body), stay with the engine that has their prefix while its load is
    not much above the least; all others go to the least loaded. 100 000 are kept, each for an hour
    after its last request. ``least_in_flight`` ignores them; ``prefix`` uses the beginning of the
    prompt."""
    token_failover: Literal["off", "asked", "on"] = "asked"
    """Whether a request continues on another engine, with the tokens so far, when its engine dies:
    never (``off``), if it has the header ``X-Token-Failover: on`` (``asked``), or always. One
    request may lose eight engines, but not two in a row that sent it no token."""
    client_key: str = Field(default="", repr=False)
    """Bearer key that clients must send. Default: none is needed."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for ``/engines``, ``/metrics``, ``/sessions``, aborts. Default: ``client_key``."""
    tokenizer_path: str = ""
    """Folder with the tokenizer, for token failover and sessions. Default: the one that the engines
    name."""

    @field_validator("token_failover", mode="before")
    @classmethod
    def _yaml_reads_off_and_on_as_booleans(cls, value: Any) -> Any:
        return ("on" if value else "off") if isinstance(value, bool) else value


class PageConfig(ConfigSection):
    """The live page of a server, for people and for Prometheus."""

    host: str = "127.0.0.1"
    """Address to bind; any address but loopback needs ``key``."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to bind; 0 takes a free port, which ``rollout status`` shows."""
    key: str = Field(default="", repr=False)
    """Key for viewing, as a bearer token or typed into the page."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for fencing and stopping from the page. Default: the page is read-only."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if not self.key and not is_loopback(self.host):
            yield "host", f"host {self.host} can be reached from other machines: set page.key"
