"""Reading and checking ``sampling_params``.  Names, defaults and units are SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    StrictInt,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from engines.embedded.core.errors import Invalid

# SGLang parameters that this engine does not support, with the value that has no effect.
_NOT_SUPPORTED: dict[str, Any] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
    "custom_params": None,
    "spaces_between_special_tokens": True,
}


def _as_strings(value: Any) -> Any:
    """One string is a list of one; an empty one stops nothing."""
    values = [value] if isinstance(value, str) else value
    return tuple(text for text in values if text != "") if isinstance(values, list) else values


@dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False),
)
class Params:
    """How one completion is drawn; every value is in its legal range."""

    max_new_tokens: NonNegativeInt = 128
    temperature: Annotated[float, Field(ge=0.0, le=1e6)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Literal[-1] | PositiveInt = -1
    min_new_tokens: NonNegativeInt = 0
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_strings)] = ()
    stop_token_ids: Annotated[frozenset[StrictInt], Field(strict=False)] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: PositiveInt = 1
    sampling_seed: NonNegativeInt | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def is_truncated(self) -> bool:
        """Whether top-k or top-p cuts the distribution."""
        return self.top_k > 0 or self.top_p < 1.0


_DEFAULT = Params()


def parse(raw: Any) -> Params:
    """Check a JSON object of sampling parameters; ``Invalid`` names what is wrong with it."""
    if not raw:
        return _DEFAULT
    if not isinstance(raw, Mapping):
        raise Invalid(f"sampling_params must be an object, not {raw!r:.80}")
    given = {name: value for name, value in raw.items() if value is not None}
    given.pop("stream_interval", None)  # a hint: streams here send every step
    for name in [name for name in given if name in _NOT_SUPPORTED]:
        if given.pop(name) != _NOT_SUPPORTED[name]:
            raise Invalid(f"sampling_params: {name} is not supported by the embedded engine")
    try:
        params = Params(**given)
    except ValidationError as error:
        wrong = error.errors()
        name = str(wrong[0]["loc"][0])
        why = " or ".join(mistake["msg"] for mistake in wrong if mistake["loc"][0] == name)
        raise Invalid(f"sampling_params: {name}: {why}, not {given[name]!r:.80}") from None
    if params.min_new_tokens > params.max_new_tokens:
        raise Invalid(
            f"sampling_params: min_new_tokens {params.min_new_tokens} is more than "
            f"max_new_tokens {params.max_new_tokens}"
        )
    return params
