"""Checks of sampling parameters: each error names the parameter, its value and what fits.

Always true of parameters that pass: SGLang takes them, unless it has to know the model to judge.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from engines.protocol import SamplingParams
from engines.protocol.sampling_params import GRAMMARS
from rollout.core.arguments import check_kind, check_number, check_positive, wrong

_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")
_PENALTIES = ("frequency_penalty", "presence_penalty")
_HIGHEST_PENALTY = 2.0
_SEEDS = range(-(1 << 63), 1 << 63)


def check_sampling(sampling: Any, *, least_tokens: int = 1) -> None:
    """Check every parameter.

    Args:
        least_tokens: of ``max_new_tokens``.

    Raises:
        ConfigError: one is wrong.
    """
    check_kind("sampling", sampling, SamplingParams, "SamplingParams")
    _check_numbers(sampling, least_tokens)
    _check_ends(sampling)
    _check_grammar(sampling)
    for name in _FLAGS:
        check_kind(name, getattr(sampling, name), bool, "True or False")
    if sampling.logit_bias is not None:
        _check_bias(sampling.logit_bias)
    if sampling.custom_params is not None:
        check_kind("custom_params", sampling.custom_params, Mapping, "a mapping")


def _check_numbers(sampling: SamplingParams, least_tokens: int) -> None:
    check_number("max_new_tokens", sampling.max_new_tokens, least=least_tokens, whole=True)
    check_number("min_new_tokens", sampling.min_new_tokens, least=0, whole=True)
    check_number("n", sampling.n, least=1, whole=True)
    check_number("temperature", sampling.temperature, least=0)
    check_positive("top_p", sampling.top_p)
    check_number("top_k", sampling.top_k, least=-1, whole=True)
    check_number("min_p", sampling.min_p, least=0)
    for name in ("top_p", "min_p"):
        if getattr(sampling, name) > 1:
            raise wrong(name, getattr(sampling, name), "a share, at most 1")
    if sampling.top_k == 0:
        raise wrong("top_k", sampling.top_k, "-1 for all, or at least 1")
    for name in _PENALTIES:
        check_number(name, getattr(sampling, name), least=-_HIGHEST_PENALTY)
    check_positive("repetition_penalty", sampling.repetition_penalty)
    for name in (*_PENALTIES, "repetition_penalty"):
        if getattr(sampling, name) > _HIGHEST_PENALTY:
            raise wrong(name, getattr(sampling, name), f"at most {_HIGHEST_PENALTY:g}")
    if sampling.min_new_tokens > sampling.max_new_tokens:
        most = f"at most max_new_tokens, which is {sampling.max_new_tokens}"
        raise wrong("min_new_tokens", sampling.min_new_tokens, most)
    seed = sampling.sampling_seed
    if seed is not None and (type(seed) is not int or seed not in _SEEDS):
        raise wrong("sampling_seed", seed, "None, or a whole number of 64 bits")


def _check_ends(sampling: SamplingParams) -> None:
    for name in ("stop", "stop_regex"):
        texts = getattr(sampling, name)
        if not _is_list_of(str, texts) or not all(texts):
            raise wrong(name, texts, 'a tuple of texts, such as ("\\n",), none of them empty')
    if not _is_list_of(int, sampling.stop_token_ids):
        raise wrong("stop_token_ids", sampling.stop_token_ids, "a tuple of token ids, each an int")


def _check_grammar(sampling: SamplingParams) -> None:
    given = {name: getattr(sampling, name) for name in GRAMMARS}
    for name, grammar in given.items():
        if grammar is not None and not (isinstance(grammar, str) and grammar):
            raise wrong(name, grammar, "None, or a text; json.dumps makes one of a schema")
    names = [name for name, grammar in given.items() if grammar is not None]
    if len(names) > 1:
        raise wrong(names[1], given[names[1]], f"None, because {names[0]} is given")


def _check_bias(bias: Any) -> None:
    check_kind("logit_bias", bias, Mapping, "a mapping of token id to number")
    for token, value in bias.items():
        if type(token) is not int or token < 0:
            raise wrong("logit_bias", token, "by token id, an int of at least 0")
        check_number(f"logit_bias[{token}]", value, least=-sys.float_info.max)


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, tuple | list) and all(type(value) is kind for value in values)
