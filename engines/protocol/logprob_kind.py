"""The distribution that the log-probs of a reply belong to: plain decisions.

A trainer computes log-softmax of logits / temperature.  An engine takes its log-probs at some step
of sampling: before or after it divides by the temperature, changes logits by penalties, and cuts
by top-k, top-p and min-p.  What it takes depends on the engine, its mode and the request.

Grammars and ``min_new_tokens`` forbid tokens; they are not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

CUTS = ("top_p", "top_k", "min_p")
CHANGES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "custom_logit_processor",
)
NAMES = ("temperature", *CUTS, *CHANGES)
"""Sampling parameters on which a kind depends; all kinds of engines have these names for them."""
_NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
_GREEDY_BELOW = 1e-5


class LogprobKind(StrEnum):
    """The distribution that log-probs belong to.

    ``full``: log-softmax of logits / temperature, which a trainer computes; greedy counts as
    temperature 1.  ``cut``: scaled to what top-k, top-p or min-p kept, or changed by penalties or
    a logit bias.  ``raw``: log-softmax of the logits, where the temperature is not 1.
    """

    FULL = "full"
    CUT = "cut"
    RAW = "raw"


@dataclass(frozen=True, slots=True)
class LogprobRule:
    """At which step of sampling an engine takes its log-probs.

    Attributes:
        has_temperature: after the division by the temperature.
        has_penalties: after penalties and logit biases.
        has_cuts: after top-k, top-p and min-p.
        defaults: sampling of requests on OpenAI's routes, where these do not set it.
    """

    has_temperature: bool = True
    has_penalties: bool = True
    has_cuts: bool = False
    defaults: tuple[tuple[str, float], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The sampling parameters on which kinds depend; without any of them, all are neutral."""
        needs_temperature = not self.has_temperature or (self.has_cuts and self.defaults)
        return (
            *(("temperature",) if needs_temperature else ()),
            *(CUTS if self.has_cuts else ()),
            *(CHANGES if self.has_penalties else ()),
        )

    def kind_of(self, sampling: Mapping[str, Any], *, has_defaults: bool = False) -> LogprobKind:
        """The kind of the log-probs of a request.

        Args:
            sampling: its parameters.
            has_defaults: it is on one of OpenAI's routes.
        """
        if has_defaults:
            given = {name: value for name, value in sampling.items() if value is not None}
            sampling = {**dict(self.defaults), **given}
        temperature = _number(sampling, "temperature")
        is_greedy = temperature < _GREEDY_BELOW
        if self.has_penalties and any(_changes(sampling, name) for name in CHANGES):
            return LogprobKind.CUT
        if self.has_cuts and not is_greedy and any(_cuts(sampling, name) for name in CUTS):
            return LogprobKind.CUT
        if self.has_temperature or is_greedy or temperature == 1.0:
            return LogprobKind.FULL
        return LogprobKind.RAW


BEFORE_CUTS = LogprobRule()
"""The rule of SGLang, and of the embedded engine."""


def read_kind(text: Any) -> LogprobKind | None:
    """The kind of this name; None if there is none."""
    return next((kind for kind in LogprobKind if kind == text), None)


def sampling_defaults(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """What a ``generation_config.json`` sets of a rule's ``defaults``."""
    return tuple(
        (name, config[name]) for name in NAMES if isinstance(config.get(name), int | float)
    )


def joined(first: LogprobKind | None, second: LogprobKind | None) -> LogprobKind | None:
    """The kind of a sample whose parts have these: the one that is further from ``full``."""
    known = [kind for kind in (first, second) if kind is not None]
    return max(known, key=_FROM_FULL.index, default=None)


_FROM_FULL = (LogprobKind.FULL, LogprobKind.RAW, LogprobKind.CUT)


def _changes(sampling: Mapping[str, Any], name: str) -> bool:
    if name.endswith("_penalty"):
        return _number(sampling, name) != _NEUTRAL.get(name, 0.0)
    return bool(sampling.get(name))


def _cuts(sampling: Mapping[str, Any], name: str) -> bool:
    value = _number(sampling, name)
    return value < 1.0 if name == "top_p" else value > 0.0


def _number(sampling: Mapping[str, Any], name: str) -> float:
    """The value; the neutral one where it is not set, or no number, which the engine refuses."""
    value = sampling.get(name)
    return value if isinstance(value, int | float) else _NEUTRAL.get(name, 0.0)
