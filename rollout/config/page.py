"""What is recorded and shown."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rollout.config.slices import Slice, is_loopback


class TimelineConfig(Slice):
    """What is recorded of phases, engines and calls, besides the files of the run."""

    otel: bool = False
    """Also send spans through OpenTelemetry, as the ``OTEL_*`` variables of the process say."""


class PageConfig(Slice):
    """The live page of a server: what people and Prometheus look at."""

    enabled: bool = True
    """Whether there is one; without it, ``doctor`` and ``top`` work over Ray only."""
    host: str = "127.0.0.1"
    """Address it binds; another one than loopback needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port it binds; 0 takes a free one, which ``status`` shows."""
    key: str = Field(default="", repr=False)
    """Key for looking, as a bearer token or typed into the page."""
    control_key: str = Field(default="", repr=False)
    """Bearer key for fencing and stopping from the page; left out: it is read-only."""

    @model_validator(mode="after")
    def _others_need_a_key(self) -> PageConfig:
        if self.enabled and not self.key and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is reached from elsewhere: set page.key")
        return self
