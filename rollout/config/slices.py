"""What every slice of the configuration is made of."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Seconds = Annotated[float, Field(gt=0)]


class Slice(BaseModel):
    """One part's settings: frozen, with no key that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what is bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
