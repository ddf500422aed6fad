"""Reading and checking ``sampling_params``.  Names, defaults and units are SGLang's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.embedded.errors import Invalid

# What SGLang also knows and this engine does not do, with the value that asks for nothing.
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


@dataclass(frozen=True, slots=True)
class Params:
    """How one completion is drawn; every value is in its legal range."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def is_truncated(self) -> bool:
        """Whether top-k or top-p cuts the distribution."""
        return self.top_k > 0 or self.top_p < 1.0


_DEFAULT = Params()


def parse(raw: Mapping[str, Any] | None) -> Params:
    """Check a JSON object of sampling parameters; ``Invalid`` names what is wrong with it."""
    if not raw:
        return _DEFAULT
    given = {name: value for name, value in raw.items() if value is not None}
    given.pop("stream_interval", None)  # a hint: streams here tell of every step
    for name in [name for name in given if name in _NOT_SUPPORTED]:
        if given.pop(name) != _NOT_SUPPORTED[name]:
            raise Invalid(f"sampling_params: {name} is not supported by the embedded engine")
    for name, reader in _READERS.items():
        if name in given:
            given[name] = reader(name, given[name])
    if unknown := given.keys() - _READERS.keys():
        raise Invalid(f"sampling_params: unknown {', '.join(sorted(unknown))}")
    params = Params(**given)
    if params.min_new_tokens > params.max_new_tokens:
        raise Invalid(
            f"sampling_params: min_new_tokens {params.min_new_tokens} is more than "
            f"max_new_tokens {params.max_new_tokens}"
        )
    return params


def _whole(least: int) -> Any:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise Invalid(f"sampling_params: {name} must be a whole number >= {least}: {value!r}")
        return value

    return read


def _number(least: float, most: float) -> Any:
    def read(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not least <= value <= most:
            raise Invalid(f"sampling_params: {name} must be in [{least:g}, {most:g}]: {value!r}")
        return float(value)

    return read


def _top_p(name: str, value: Any) -> float:
    read: float = _number(0.0, 1.0)(name, value)
    if read == 0.0:
        raise Invalid("sampling_params: top_p must be above 0")
    return read


def _top_k(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise Invalid(f"sampling_params: top_k must be -1 (all) or at least 1: {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"sampling_params: {name} must be true or false: {value!r}")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise Invalid(f"sampling_params: {name} must be a string or a list of strings")
    return tuple(one for one in values if one)


def _ids(name: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise Invalid(f"sampling_params: {name} must be a list of token ids")
    return frozenset(value)


_READERS: dict[str, Any] = {
    "max_new_tokens": _whole(0),
    "temperature": _number(0.0, 1e6),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_new_tokens": _whole(0),
    "stop": _strings,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "no_stop_trim": _flag,
    "n": _whole(1),
    "sampling_seed": _whole(0),
}
