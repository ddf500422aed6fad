"""Reading and checking ``sampling_params``.  Names, defaults and units are SGLang's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
    given.pop("stream_interval", None)  # a hint: streams here send every step
    for name in [name for name in given if name in _NOT_SUPPORTED]:
        if given.pop(name) != _NOT_SUPPORTED[name]:
            raise Invalid(f"sampling_params: {name} is not supported by the embedded engine")
    for name, rule in _RULES.items():
        if name in given:
            if not rule.is_valid(given[name]):
                raise Invalid(f"sampling_params: {name} must be {rule.wanted}: {given[name]!r}")
            given[name] = rule.stored(given[name])
    if unknown := given.keys() - _RULES.keys():
        raise Invalid(f"sampling_params: unknown {', '.join(sorted(unknown))}")
    params = Params(**given)
    if params.min_new_tokens > params.max_new_tokens:
        raise Invalid(
            f"sampling_params: min_new_tokens {params.min_new_tokens} is more than "
            f"max_new_tokens {params.max_new_tokens}"
        )
    return params


class _Rule(NamedTuple):
    """Which values of a parameter are valid, in words, and how a valid one is stored."""

    is_valid: Callable[[Any], bool]
    wanted: str
    stored: Callable[[Any], Any]


def _whole(least: int) -> _Rule:
    return _Rule(
        lambda value: type(value) is int and value >= least, f"a whole number >= {least}", int
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


_FLAG = _Rule(lambda value: isinstance(value, bool), "true or false", bool)

_RULES: dict[str, _Rule] = {
    "max_new_tokens": _whole(0),
    "temperature": _Rule(
        lambda value: _is_number(value) and 0.0 <= value <= 1e6, "in [0, 1e+06]", float
    ),
    "top_p": _Rule(lambda value: _is_number(value) and 0.0 < value <= 1.0, "in (0, 1]", float),
    "top_k": _Rule(
        lambda value: type(value) is int and (value >= 1 or value == -1),
        "-1 (all) or at least 1",
        int,
    ),
    "min_new_tokens": _whole(0),
    "stop": _Rule(
        lambda value: isinstance(value, str) or _is_list_of(str, value),
        "a string or a list of strings",
        lambda value: tuple(filter(None, [value] if isinstance(value, str) else value)),
    ),
    "stop_token_ids": _Rule(partial(_is_list_of, int), "a list of token ids", frozenset),
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "no_stop_trim": _FLAG,
    "n": _whole(1),
    "sampling_seed": _whole(0),
}
