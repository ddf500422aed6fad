"""The distribution that the log-probs of a reply belong to: plain decisions.

A trainer computes log-softmax of logits / temperature.  An engine takes its log-probs at some step
of sampling: before or after it forbids tokens or changes logits by penalties, divides by the
temperature, and cuts by top-k, top-p and min-p.  What it takes depends on the engine, its mode and
the request.

Always true: where several of these hold, the kind is the one that is furthest from ``full``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engines.protocol.sampling_params import GRAMMARS

CUTS = ("top_p", "top_k", "min_p")
CHANGES = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "custom_logit_processor",
    "min_new_tokens",
    "min_tokens",
    "thinking_token_budget",
)
"""Penalties, biases, and what forbids tokens: one of them is enough to change the logits."""
FORMS = (
    *GRAMMARS,
    "structured_outputs",
    "response_format",
    "tool_choice",
    "tools",
)
"""The form of an output, which forbids tokens, too: engines apply it to the logits first of all,
so it changes log-probs in every mode."""
_OF_CHECKPOINTS = ("temperature", *CUTS, "repetition_penalty")
_NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
_GREEDY_BELOW = 1e-5


class LogprobKind(StrEnum):
    """The distribution that log-probs belong to.

    From the one that a trainer computes to the one that is furthest from it:

    ``full``: log-softmax of logits / temperature; greedy counts as temperature 1.
    ``raw``: log-softmax of the logits, where the temperature is not 1.
    ``cut``: scaled to what top-k, top-p or min-p kept.
    ``penalised``: of logits that penalties, biases, a grammar or a least length have changed,
    with or without a temperature and a cut behind that.
    """

    FULL = "full"
    RAW = "raw"
    CUT = "cut"
    PENALISED = "penalised"

    @property
    def code(self) -> int:
        """0 for ``full``, which a trainer computes, and more for what is further from it."""
        return _FROM_FULL.index(self)


@dataclass(frozen=True, slots=True)
class LogprobRule:
    """At which step of sampling an engine takes its log-probs.

    Attributes:
        has_temperature: after the division by the temperature.
        has_penalties: after ``CHANGES``; all are after ``FORMS``.
        has_cuts: after top-k, top-p and min-p.
        defaults: sampling of requests on OpenAI's routes, where these do not set it.
        has_masks: a request can have the ids that were left behind them (``sampling_mask``).
    """

    has_temperature: bool = True
    has_penalties: bool = True
    has_cuts: bool = False
    defaults: tuple[tuple[str, float], ...] = ()
    has_masks: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The fields on which kinds depend; a body without any of them has a neutral kind."""
        needs_temperature = not self.has_temperature or self.defaults
        return (
            *(("temperature",) if needs_temperature else ()),
            *(CUTS if self.has_cuts else ("top_k",)),
            *(CHANGES if self.has_penalties else ()),
            # Many bodies have tools, and few have strict ones.
            *("strict" if name == "tools" else name for name in FORMS),
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
        changes = (*CHANGES, *FORMS) if self.has_penalties else FORMS
        if any(name in sampling and _changes(sampling, name) for name in changes):
            return LogprobKind.PENALISED
        if self.has_cuts and not is_greedy and any(_cuts(sampling, name) for name in CUTS):
            return LogprobKind.CUT
        if is_greedy or temperature == 1.0:
            return LogprobKind.FULL
        # SGLang takes such a request for a greedy one, unless others are in its batch.
        is_top = sampling.get("top_k") == 1
        return LogprobKind.FULL if self.has_temperature and not is_top else LogprobKind.RAW


BEFORE_CUTS = LogprobRule()
"""The rule of SGLang, and of the embedded engine."""


def read_kind(text: Any) -> LogprobKind | None:
    """The kind of this name, or None if there is none."""
    return next((kind for kind in LogprobKind if kind == text), None)


def sampling_defaults(config: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """What a ``generation_config.json`` sets of a rule's ``defaults``."""
    return tuple(
        (name, config[name])
        for name in _OF_CHECKPOINTS
        if isinstance(config.get(name), int | float)
    )


def joined(first: LogprobKind | None, second: LogprobKind | None) -> LogprobKind | None:
    """The kind of a sample whose parts have these: the one that is further from ``full``."""
    known = [kind for kind in (first, second) if kind is not None]
    return max(known, key=_FROM_FULL.index, default=None)


_FROM_FULL = tuple(LogprobKind)


def _changes(sampling: Mapping[str, Any], name: str) -> bool:
    value = sampling[name]
    if name.endswith("_penalty"):
        return _number(sampling, name) != _NEUTRAL.get(name, 0.0)
    if name == "response_format" and isinstance(value, Mapping):
        return value.get("type") != "text"
    if name == "tool_choice":
        return value not in (None, "auto", "none")
    if name == "tools":
        return isinstance(value, list) and any(map(_is_strict, value))
    return bool(value)


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and bool(function.get("strict"))


def _cuts(sampling: Mapping[str, Any], name: str) -> bool:
    value = _number(sampling, name)
    return value < 1.0 if name == "top_p" else value > 0.0


def _number(sampling: Mapping[str, Any], name: str) -> float:
    """The value; the neutral one where it is not set, or no number, which the engine refuses."""
    value = sampling.get(name)
    return value if isinstance(value, int | float) else _NEUTRAL.get(name, 0.0)
