"""What happens to each parameter of a request at a seam, where another engine goes on (pure).

Always true: a request goes on only if all kinds of engines that serve carry each of its parameters,
so that its reply is the one of a single engine; a parameter of a sampling object that is not in the
table is not carried.

The next engine gets the tokens so far as its prompt.  What counts or constrains the output alone
begins again there: penalties, grammars, expressions.  A frequency penalty could be carried as a
logit bias; presence and SGLang's repetition penalty could not, vLLM caps a bias at 100, and what
SGLang has counted depends on when a request joined its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class AtSeam(StrEnum):
    """What happens to a request with a parameter.

    ``carried``: it goes on, and its reply is that of one engine.  ``other draws``: it goes on, with
    other random numbers than one engine would have.  ``starts over``: while its client has nothing
    of it; after that it ends.  ``forwarded``: no reply is read, and the engine's end is its end.
    ``refused``: with 400, by the router or the engine.  ``none``: there is no such parameter.
    """

    CARRIED = "carried"
    OTHER_DRAWS = "other draws"
    STARTS_OVER = "starts over"
    FORWARDED = "forwarded"
    REFUSED = "refused"
    NONE = "none"


_C, _F, _R, _S = AtSeam.CARRIED, AtSeam.FORWARDED, AtSeam.REFUSED, AtSeam.STARTS_OVER
_NO = AtSeam.NONE
_NEUTRAL: tuple[Any, ...] = ("", [], {}, 0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: parameters that fare alike.

    Attributes:
        names: on all routes; those of one parameter are the same thing in several forms.
        embedded, sglang, vllm: on ``/generate``, by kind of engine.
        others: on the other routes, if that is not what the engines there say.
        why: the reason in one word, where it starts over.
        neutral: values without an effect, beside null and false.
    """

    names: tuple[str, ...]
    embedded: AtSeam = _C
    sglang: AtSeam = _C
    vllm: AtSeam = _C
    others: AtSeam | None = None
    why: str = ""
    neutral: tuple[Any, ...] = _NEUTRAL

    def has_effect(self, value: Any) -> bool:
        return value is not None and value is not False and value not in self.neutral

    def at(self, dialect: str) -> AtSeam:
        """What happens at engines of this dialect; the embedded engine has SGLang's."""
        found: AtSeam = getattr(self, dialect)
        return found


TABLE = (
    Parameter(("max_new_tokens", "max_tokens", "max_completion_tokens")),
    Parameter(("min_new_tokens", "min_tokens")),
    Parameter(("stop",)),
    Parameter(("stop_token_ids",)),
    Parameter(("ignore_eos",)),
    Parameter(("temperature", "top_p", "top_k")),
    Parameter(("min_p",), embedded=_R),
    Parameter(("sampling_seed", "seed"), vllm=AtSeam.OTHER_DRAWS),
    Parameter(("presence_penalty", "frequency_penalty"), _R, _S, _S, None, "penalty"),
    Parameter(("repetition_penalty",), _R, _S, _C, None, "penalty", neutral=(1,)),
    Parameter(("logit_bias",), embedded=_R),
    Parameter(("allowed_token_ids",), _NO, _NO, _R, _C),
    Parameter(("bad_words",), _NO, _NO, _R, _S, "bad_words"),
    Parameter(("json_schema", "regex", "ebnf", "structural_tag"), _R, _S, _S, _F, "grammar"),
    Parameter(
        ("structured_outputs", "response_format"),
        *(_NO, _NO, _NO, _F),
        neutral=(*_NEUTRAL, {"type": "text"}),
    ),
    Parameter(("stop_regex",), _R, _S, _R, _F, "stop_regex"),
    Parameter(("custom_params",), _R, _S, _R, _F, "custom_params"),
    Parameter(("watermark",), _R, _S, _R, _F, "watermark"),
    Parameter(("n",), _F, _F, _R, _F, neutral=(1,)),
    Parameter(("best_of",), _NO, _NO, _NO, _F, neutral=(1,)),
    Parameter(("beam_width",), _R, _F, _R, _F, neutral=(1,)),
    Parameter(("return_flat_raw_output_top_logprobs",), _R, _F, _R, _F),
    Parameter(("skip_special_tokens",)),
    Parameter(("spaces_between_special_tokens",), embedded=_R),
    Parameter(("no_stop_trim", "include_stop_str_in_output")),
    Parameter(("detokenize",), _NO, _NO, _NO, _C),
    Parameter(("stream_interval",)),
    Parameter(("return_logprob", "logprobs")),
    Parameter(("top_logprobs_num", "top_logprobs"), embedded=_R, vllm=_R, others=_C),
    Parameter(("token_ids_logprob",), embedded=_R, vllm=_R),
    Parameter(("logprob_start_len",), vllm=_R),
    # On SGLang what was lost decides, which has no experts of its tokens: ``why_refused``.
    Parameter(("return_routed_experts",), _C, _S, _R, _F),
    # vLLM has them if it was started so; else it is refused.
    Parameter(("return_sampling_mask",), others=_F),
    # 0 sets these, too.
    Parameter(
        (
            "prompt_logprobs",
            "prompt_logprob_token_ids",
            "prompt_logprob_start",
            "logprob_token_ids",
            "thinking_token_budget",
        ),
        *(_NO, _NO, _NO, _F),
        neutral=(),
    ),
    Parameter(
        (
            "custom_logit_processor",
            "session_params",
            "routed_experts_start_len",
            "return_indexer_topk",
            "return_hidden_states",
            "return_entropy",
            "return_flat_raw_top_logprobs",
        ),
        *(_R, _S, _R, _F),
        "of_one_engine",
    ),
    Parameter(("max_thinking_tokens", "return_prompt_token_ids"), _NO, _S, _R, _F, "of_one_engine"),
    Parameter(
        (
            "echo",
            "suffix",
            "tools",
            "functions",
            "use_beam_search",
            "repetition_detection",
            "vllm_xargs",
            "extra_args",
            "watermarking",
            "prompt_embeds",
            "flat_logprobs",
            "trace_decode_token_ids",
            "routed_experts_prompt_start",
            "return_cached_tokens_details",
            "return_spec_tokens_details",
            "return_meta_info",
            "return_input_ids_in_sglext",
            "return_output_ids_in_sglext",
            "input_ids",
        ),
        *(_NO, _NO, _NO, _F),
    ),
)
"""All parameters that change tokens or what is reported of them."""
BY_NAME: Mapping[str, Parameter] = {name: row for row in TABLE for name in row.names}
_UNKNOWN = Parameter((), _S, _S, _S, _F, "unknown_parameter", neutral=())


class NotCarried(NamedTuple):
    """Why a request does not go on.

    Attributes:
        why: in one word, or empty if it does.
        because: a clause for its client.
    """

    why: str = ""
    because: str = ""


CARRIED = NotCarried()
_REASONS = {
    "penalty": "counts the tokens of the reply, which another engine gets as its prompt",
    "unknown_parameter": "is not known to the router",
    "of_one_engine": "is of all tokens of the reply, and another engine has a part of them",
}
_BEGINS = "would begin again in the middle of the reply"


def not_carried(
    given: Mapping[str, Any], dialects: Iterable[str], *, is_sampling: bool = False
) -> NotCarried:
    """Why a request does not go on where engines of these dialects serve.

    Args:
        given: fields of its body, or its object of sampling parameters.
        is_sampling: it is the latter, where a name that is not in the table is not carried.
    """
    for name, value in given.items():
        row = BY_NAME.get(name, _UNKNOWN if is_sampling else None)
        if row is None or not row.why or not row.has_effect(value):
            continue
        if any(AtSeam.STARTS_OVER in (row.at(dialect), row.others) for dialect in dialects):
            return NotCarried(row.why, f"{name} {_REASONS.get(row.why)}")
    return CARRIED


def is_forwarded(
    given: Mapping[str, Any], *, on_generate: bool = False, knows_all: bool = False
) -> bool:
    """Whether no reply to a request with these is read.

    Args:
        given: fields of its body, or its object of sampling parameters.
        on_generate: it is on ``/generate``.
        knows_all: a name that is not in the table is forwarded, too.
    """
    for name, value in given.items():
        row = BY_NAME.get(name, _UNKNOWN if knows_all else None)
        if row is None or not row.has_effect(value):
            continue
        if (row.sglang if on_generate else row.others) is AtSeam.FORWARDED:
            return True
    return False
