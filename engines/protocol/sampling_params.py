"""How tokens are drawn: SGLang's sampling parameters.

Names, defaults and units are those of SGLang 0.5.23 (``sglang/srt/sampling/sampling_params.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Left out of SGLang's are ``beam_width`` and ``watermark``, whose tokens are not drawn from the
    policy, and ``stream_interval``, which the router sets.

    Attributes:
        max_new_tokens: most output tokens.
        temperature: 0 is greedy.
        top_p, min_p: shares of probability: the most probable tokens that reach ``top_p``
            together, and those with at least ``min_p`` times the highest probability.
        top_k: the number of most probable tokens; -1 for all.
        min_new_tokens: before so many, no token ends the output.
        stop: texts that end the output before them.
        stop_token_ids: tokens that end the output after them.
        stop_regex: regular expressions that end the output.
        ignore_eos: the model's end token does not end the output.
        n: completions of one prompt.
        sampling_seed: makes one request repeatable, where the engine supports it.
        frequency_penalty, presence_penalty: subtracted from the logit of a token of the output:
            for each time that it is there, and once; -2 to 2.
        repetition_penalty: divides the logits of tokens of prompt and output; over 0, up to 2.
        regex, json_schema, ebnf, structural_tag: the form that the output must have, as text; at
            most one of them.
        logit_bias: token id -> what is added to its logit.
        skip_special_tokens, spaces_between_special_tokens: how ``text`` is made of the ids.
        no_stop_trim: ``text`` keeps the stop text that ended it.
        custom_params: JSON for a custom logit processor of the engine.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    sampling_seed: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    stop_regex: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: Mapping[str, Any] | None = None

    @property
    def can_continue(self) -> bool:
        """Whether an output that was cut off can be continued by a request for the rest.

        A grammar would begin again at the cut, and an expression would not see the text before it.
        """
        return not (
            any(getattr(self, name) for name in GRAMMARS) or self.stop_regex or self.custom_params
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of ``sampling_params``; what is at its default is left out."""
        default = DEFAULT_SAMPLING
        wire: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value != getattr(default, name):
                wire[name] = list(value) if isinstance(value, tuple) else value
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        wire["max_new_tokens"] = self.max_new_tokens
        return wire


DEFAULT_SAMPLING = SamplingParams()
