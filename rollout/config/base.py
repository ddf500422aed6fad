"""The base class and the field types of every section of the configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Seconds = Annotated[float, Field(gt=0)]
PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]

DOES_NOT_FIT = "does_not_fit"


class ConfigSection(BaseModel):
    """One section of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Settings of this section that do not fit the others: name, and what would fit."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and _is_number(
            cls.model_fields[str(info.field_name)].annotation
        ):
            raise PydanticCustomError("number_type", "Input should be a number, not true or false")
        return value

    @model_validator(mode="after")
    def _settings_fit(self) -> Self:
        if found := list(self.conflicts()):
            text = "; ".join(why for _, why in found)
            raise PydanticCustomError(DOES_NOT_FIT, "{text}", {"text": text, "found": found})
        return self


def _is_number(annotation: Any) -> bool:
    """Whether a setting is a number, or a number or nothing."""
    return annotation in (int, float) or any(map(_is_number, get_args(annotation)))


def host_of(netloc: str) -> str:
    """The host of ``host:port``, as in a ``Host`` header."""
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether an address bound to ``host`` can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
