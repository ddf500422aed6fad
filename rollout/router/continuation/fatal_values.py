"""Values of requests that end an engine, and with it every request of its batch (pure).

vLLM 0.32 outlives them.  SGLang 0.5.23 takes them, and its scheduler ends when it computes with
them (``tests/end_to_end/real/test_fatal_values.py``), so the request would be sent to the next.

Numbers of few members are looked at in each body that has one.  The ids of a prompt are looked at
when the request has lost an engine that sent no token of it: to read all would cost every request a
tenth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rollout.router.continuation.forms import read_object

MOST_COMPLETIONS = 1 << 14
"""The limit of vLLM (``VLLM_MAX_N_SEQUENCES``).  SGLang makes a copy of the request for each."""
_MOST_TOP_K = (1 << 31) - 1
_MOST_DIGITS = 20
_ANY = 10**_MOST_DIGITS
_PROMPTS = ("input_ids", "token_ids", "prompt", "text")


class Bound(NamedTuple):
    """The least and the highest value; None: any."""

    least: int | None
    highest: int | None


_BOUNDS: Mapping[bytes, Callable[[int], Bound]] = {
    # Places in a tensor (``penaltylib/min_new_tokens.py``), also of others of the batch.
    b"stop_token_ids": lambda vocabulary: Bound(0, vocabulary - 1),
    # Becomes an int32 (``sampling_batch_info.py``).
    b"top_k": lambda vocabulary: Bound(None, _MOST_TOP_K),
    # How many of all tokens (``logprob_processor.py``).
    b"top_logprobs_num": lambda vocabulary: Bound(None, vocabulary),
    b"top_logprobs": lambda vocabulary: Bound(None, vocabulary),
    b"logprobs": lambda vocabulary: Bound(None, vocabulary),
    # A place in the prompt; -1 is its end.
    b"logprob_start_len": lambda vocabulary: Bound(-1, None),
    b"n": lambda vocabulary: Bound(None, MOST_COMPLETIONS),
}
BOUNDED = frozenset(_BOUNDS)
"""Names of members with such values."""

_NUMBERS = re.compile(rb'"(%s)"\s*:\s*(-?\d+|\[[-\d,\s]*\])' % b"|".join(sorted(BOUNDED)))
_NUMBER = re.compile(rb"-?\d+")


def why_fatal(body: bytes, vocabulary: int) -> str:
    """Why no engine may get a body that has one of ``BOUNDED``.

    Args:
        vocabulary: tokens of the engines' model; 0 if they are not known.
    """
    for name, value in _NUMBERS.findall(body):
        bound = _BOUNDS[name](vocabulary or _ANY)
        for number in _NUMBER.findall(value):
            if why := _why_outside(name.decode(), number.decode(), bound):
                return why
    return ""


def _why_outside(name: str, text: str, bound: Bound) -> str:
    value = int(text[:_MOST_DIGITS])  # of more digits it is outside anyhow
    least, highest = bound
    is_inside = (least is None or value >= least) and (highest is None or value <= highest)
    if is_inside:
        return ""
    limits = (
        *(() if least is None else (f"at least {least}",)),
        *(() if highest is None else (f"at most {highest}",)),
    )
    return f"{name} has {text[:_MOST_DIGITS]}; send {' and '.join(limits)}"


def why_fatal_prompt(body: bytes, vocabulary: int) -> str:
    """Why a body's prompt may have ended its engine."""
    raw = read_object(body) or {}
    for name in _PROMPTS:
        if why := _why_fatal_ids(raw.get(name), vocabulary or _ANY):
            return f"{name} has {why}"
    return ""


def _why_fatal_ids(prompt: Any, vocabulary: int, *, is_one: bool = False) -> str:
    """The same of a text, ids, or a list of either, unless it ``is_one``."""
    if prompt in ("", []):
        return "an empty prompt; send at least one token"
    for each in prompt if isinstance(prompt, list) else ():
        if isinstance(each, int):
            if not 0 <= each < vocabulary:
                tokens = f"the model has {vocabulary} tokens; send ids from 0 to {vocabulary - 1}"
                return f"the id {each!r:.{_MOST_DIGITS}}, and {tokens}"
        elif not is_one and (why := _why_fatal_ids(each, vocabulary, is_one=True)):
            return why
    return ""
