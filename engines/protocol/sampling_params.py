"""How tokens are drawn: SGLang's sampling parameters.

Names, defaults and units are those of SGLang 0.5.23 (``sglang/srt/sampling/sampling_params.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Nothing is checked here; ``rollout.SamplingParams`` has the bounds and describes each.
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

        A grammar would begin again at the cut, an expression would not see the text before it, and
        penalties would not count its tokens.
        """
        return not (
            any(getattr(self, name) for name in (*GRAMMARS, "stop_regex", "custom_params"))
            or any(getattr(self, name) != getattr(DEFAULT_SAMPLING, name) for name in PENALTIES)
        )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of ``sampling_params``; what is at its default is left out."""
        default = DEFAULT_SAMPLING
        wire: dict[str, Any] = {}
        for name in SamplingParams.__slots__:
            value = getattr(self, name)
            if value != getattr(default, name):
                wire[name] = list(value) if isinstance(value, tuple) else value
        if self.logit_bias:
            wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        wire["max_new_tokens"] = self.max_new_tokens
        return wire


DEFAULT_SAMPLING = SamplingParams()
