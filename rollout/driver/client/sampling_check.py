"""Checks of sampling parameters: each error names the parameter, its value and what fits.

Always true of parameters that pass: SGLang takes them, unless it has to know the model to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field

from engines.protocol import sampling_params
from engines.protocol.logprob_kind import CHANGES, CUTS, FORMS, LogprobKind
from engines.protocol.sampling_params import GRAMMARS
from rollout.core.arguments import (
    Count,
    Positive,
    Share,
    TokenIds,
    Whole,
    options,
    wrong,
    wrong_type,
)

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


@options
class SamplingParams(sampling_params.SamplingParams):
    """How tokens are drawn: SGLang's sampling parameters.

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
        ignore_eos: the model's end token does not end the output; on SGLang, neither do those of
            ``stop_token_ids``.
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

    Raises:
        TypeError, ValueError: one is out of its bounds.
        TypeError: there is no such parameter; names of vLLM and OpenAI get SGLang's.
    """

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
        TypeError, ValueError: one is wrong.
    """
    if not isinstance(sampling, sampling_params.SamplingParams):
        raise wrong_type("sampling", sampling, "SamplingParams")
    if not isinstance(sampling, SamplingParams):
        names = sampling_params.SamplingParams.__slots__
        SamplingParams(**{name: getattr(sampling, name) for name in names})
    if sampling.max_new_tokens < least_tokens:
        raise wrong("max_new_tokens", sampling.max_new_tokens, f"at least {least_tokens}")


_ANY_CHANGE = "a penalty, logit_bias, min_new_tokens or a grammar"
_ANY_KIND = "a trainer that computes old log-probs itself takes RolloutOptions(logprob_kind=None)"
_RAW_AT_1 = "vLLM with logprobs-mode: raw_logprobs and temperature=1"


def why_not_trained(
    kind: LogprobKind | None, sampling: sampling_params.SamplingParams | None = None
) -> str:
    """Why log-probs of a kind are not those that a trainer computes, and what would work.

    Args:
        kind: None if it is not known.
        sampling: of the request, if it is known.

    Returns:
        Empty if they are, or may be.
    """
    if kind in (None, LogprobKind.FULL):
        return ""
    what = "log-probs other than a trainer's, which are log-softmax(logits / temperature)"
    if kind is LogprobKind.RAW:
        found = _not_at_defaults(sampling, ("temperature",)) or "another temperature"
        why = f"these are at temperature 1, and the request has {found}"
        ways = "sample at temperature=1, or use engines that report them at the temperature"
    elif kind is LogprobKind.CUT:
        names = _not_at_defaults(sampling, CUTS) or "top_p, top_k or min_p"
        why = f"these are of what {names} made of the distribution"
        ways = f"leave that out, use SGLang or the embedded engine, or use {_RAW_AT_1}"
    else:
        # A form of the output changes what each engine reports.
        of_form, of_others = (_not_at_defaults(sampling, names) for names in (FORMS, CHANGES))
        changes = ", ".join(filter(None, (of_form, of_others)))
        why = f"these are of logits changed by {changes or _ANY_CHANGE}"
        ways = "leave that out" + ("" if of_form else f", or use {_RAW_AT_1}")
    return f"{what}: {why}; {ways}; {_ANY_KIND} (docs/how-to/mismatch.md)"


def _not_at_defaults(sampling: sampling_params.SamplingParams | None, names: Iterable[str]) -> str:
    """The parameters with these names that are not at their defaults."""
    default = sampling_params.DEFAULT_SAMPLING
    values = {name: getattr(sampling, name, None) for name in names}
    found = [
        f"{name}={value}"
        for name, value in values.items()
        if value is not None and value != getattr(default, name)
    ]
    return ", ".join(found)
