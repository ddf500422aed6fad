"""Checks of sampling parameters: each error names the parameter, its value and what fits.

Always true of parameters that pass: SGLang takes them, unless it has to know the model to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from engines.protocol import SamplingParams
from engines.protocol.sampling_params import GRAMMARS
from rollout.core.arguments import Count, Positive, Share, TokenIds, Whole, options, wrong

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


@options
class _Checked(SamplingParams):
    """The bounds of the parameters that have some."""

    max_new_tokens: Count = 128
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = -1
    min_new_tokens: Count = 0
    stop: Texts = ()
    stop_token_ids: TokenIds = ()
    n: Positive = 1
    sampling_seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    min_p: Share = 0.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    regex: Text | None = None
    json_schema: Text | None = None
    ebnf: Text | None = None
    structural_tag: Text | None = None
    stop_regex: Texts = ()
    logit_bias: Mapping[Count, float] | None = None

    def __post_init__(self) -> None:
        if self.top_k == 0:
            raise wrong("top_k", self.top_k, "-1 for all, or at least 1")
        if self.min_new_tokens > self.max_new_tokens:
            most = f"at most max_new_tokens, which is {self.max_new_tokens}"
            raise wrong("min_new_tokens", self.min_new_tokens, most)
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            value = getattr(self, names[1])
            raise wrong(names[1], value, f"None, because {names[0]} is given")


def check_sampling(sampling: Any, *, least_tokens: int = 1) -> None:
    """Check every parameter.

    Args:
        least_tokens: of ``max_new_tokens``.

    Raises:
        ConfigError: one is wrong.
    """
    if not isinstance(sampling, SamplingParams):
        raise wrong("sampling", sampling, "SamplingParams")
    _Checked(**{name: getattr(sampling, name) for name in SamplingParams.__slots__})
    if sampling.max_new_tokens < least_tokens:
        raise wrong("max_new_tokens", sampling.max_new_tokens, f"at least {least_tokens}")
