"""How a fake draws: always the most probable token, of logits that are a function of the place.

Always true: a sampling parameter has its effect here, or a request with it is refused; temperature,
top-p, top-k, min-p and seed leave the most probable token what it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engines.protocol import SamplingParams
from engines.protocol.sampling_params import DEFAULT_SAMPLING, GRAMMARS

_HIGHEST = 10.0
"""The logit of the most probable token; each next token id has one that is lower by ``_STEP``."""
_STEP = 0.5
_NOT_SIMULATED = (*GRAMMARS, "stop_regex")
_KNOWN = frozenset(SamplingParams.__slots__) | {"stream_interval"}
_BOUNDS = {
    "temperature": (0.0, math.inf),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (5e-324, 2.0),
    "max_new_tokens": (0, math.inf),
    "min_new_tokens": (0, math.inf),
    "top_k": (-1, math.inf),
    "n": (1, math.inf),
}


def why_unknown(wire: Mapping[str, Any]) -> str:
    """Why a JSON object is none of sampling parameters."""
    unknown = [name for name in wire if name not in _KNOWN]
    if unknown:
        return f"unknown field `{unknown[0]}`, expected one of {', '.join(sorted(_KNOWN))}"
    for name in _BOUNDS.keys() & wire.keys():
        value = wire[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            return f"invalid type: {name} is {value!r:.80}, expected a number"
    return ""


def why_refused(sampling: SamplingParams, vocab_size: int) -> str:
    """Why no request is drawn so, as SGLang judges it."""
    for name in _NOT_SIMULATED:
        if getattr(sampling, name):
            return f"{name} is not simulated by a fake"
    for name, (least, most) in _BOUNDS.items():
        value = getattr(sampling, name)
        if not least <= value <= most or math.isinf(value):
            return f"{name} must be in [{least:g}, {most:g}], got {value}."
    if sampling.min_new_tokens > sampling.max_new_tokens:
        limits = f"[0, max_new_tokens({sampling.max_new_tokens})]"
        return f"min_new_tokens must be in {limits}, got {sampling.min_new_tokens}."
    strange = [token for token in sampling.logit_bias or () if not 0 <= int(token) < vocab_size]
    if strange:
        return f"logit_bias must has keys in [0, {vocab_size - 1}], got {strange[0]}."
    return ""


class Drawing:
    """How the tokens of one request are drawn.

    Args:
        eos: the token that ends an output, or None for a model without one.
        prompt: what a repetition penalty counts besides the output; nothing on SGLang.
        always_stops: the tokens of ``stop_token_ids`` end it under ``ignore_eos`` too; not on
            SGLang.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        eos: int | None = None,
        *,
        prompt: Sequence[int] = (),
        always_stops: bool = False,
    ) -> None:
        self._sampling = sampling
        self._prompt = frozenset(prompt)
        self._always = frozenset(sampling.stop_token_ids if always_stops else ())
        self._bias = {int(token): bias for token, bias in (sampling.logit_bias or {}).items()}
        self._ends = {*sampling.stop_token_ids} | (set() if eos is None else {eos})
        self._has_penalty = any(
            getattr(sampling, name) != getattr(DEFAULT_SAMPLING, name)
            for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
        )

    def token(self, first: int, output: Sequence[int], vocab_size: int) -> int:
        """The next token.

        Args:
            first: the most probable one, before any bias and penalty.
            output: the tokens so far.
        """
        is_too_early = bool(self._ends) and len(output) < self._sampling.min_new_tokens
        if not (self._has_penalty or self._bias or is_too_early):
            return first
        counts = Counter(output) if self._has_penalty else {}
        banned = self._ends if is_too_early else ()
        order = ((first + distance) % vocab_size for distance in range(vocab_size))
        logits = {
            token: self._logit(token, _HIGHEST - _STEP * place, counts)
            for place, token in enumerate(order)
            if token not in banned
        }
        return max(logits, key=logits.__getitem__)

    def _logit(self, token: int, logit: float, counts: Mapping[int, int]) -> float:
        sampling, count = self._sampling, counts.get(token, 0)
        logit += self._bias.get(token, 0.0)
        if count:
            logit -= sampling.frequency_penalty * count + sampling.presence_penalty
        if count or token in self._prompt:
            scale = sampling.repetition_penalty
            logit = logit / scale if logit > 0 else logit * scale
        return logit

    def end_of(self, output: Sequence[int], text: str) -> int | str | None:
        """The token or text that ends the output after its last token, or None if it goes on."""
        ends = self._always if self._sampling.ignore_eos else self._ends
        if output and output[-1] in ends:
            return output[-1]
        return next((stop for stop in self._sampling.stop if stop in text), None)

    def shown(self, text: str, end: int | str | None) -> str:
        """The text of a reply: without what ended it, unless that is to stay."""
        if not isinstance(end, str):
            return text
        place = text.index(end)
        return text[: place + len(end)] if self._sampling.no_stop_trim else text[:place]
