"""What a cut, a penalty or a bias leaves in gaps whose kind of log-probs is not known.

A cut scales up all that it keeps, so no token is less probable to the engine than to the trainer.
A penalty makes tokens of the output less probable and all others more.  A bias moves each token to
one side, wherever it stands.  Of other weights and temperatures, tokens are on both sides anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_LEAST = 32
"""Tokens that are off, without which no shape is seen; a quarter of them for each of two sides."""
_SHARE = 0.9
"""Share of the tokens that have to be on a side: a small penalty may be less than what others
gain."""
_LEAST_KEPT = 0.02
"""Least share of the distribution that a cut leaves.  Damaged weights go far below it."""

CUT = (
    "The engine finds no token less probable than the trainer does, as behind top-p, top-k, min-p "
    "or where tokens are forbidden"
)
PENALTY = (
    "The engine finds tokens less probable where they came before, and others more, as with a "
    "presence, frequency or repetition penalty"
)
BIAS = "Each token is on one side wherever it stands, as with a logit bias"


@dataclass(frozen=True, slots=True)
class TokenGap:
    """How far one token is off.

    Attributes:
        gap: the trainer's log-prob less the engine's.
        was_seen: whether it is in what a penalty may count: the output before it; that without its
            newest token, as SGLang counts; prompt and output, as vLLM counts repetitions.
    """

    token_id: int
    gap: float
    was_seen: tuple[bool, bool, bool]


def token_gaps(
    prompt_ids: Sequence[int], output_ids: Sequence[int], start: int, gaps: Sequence[float]
) -> list[TokenGap]:
    """The gaps of the tokens from ``start`` on."""
    of_prompt, found = set(prompt_ids), list[TokenGap]()
    newest = output_ids[start - 1] if start else None
    earlier = set(output_ids[: max(0, start - 1)])
    for token, gap in zip(output_ids[start:], gaps, strict=False):
        was_earlier = token in earlier
        was_in_output = was_earlier or token == newest
        seen = (was_in_output, was_earlier, was_in_output or token in of_prompt)
        found.append(TokenGap(token, gap, seen))
        if newest is not None:
            earlier.add(newest)
        newest = token
    return found


def shape_of(gaps: Iterable[TokenGap], limit: float) -> str:
    """What made these gaps, in words, or empty if they have no shape that is known.

    Args:
        limit: what rounding may cost.
    """
    off = [token for token in gaps if abs(token.gap) > limit]
    if len(off) < _LEAST:
        return ""
    if all(math.log(_LEAST_KEPT) < token.gap < 0 for token in off):
        return CUT
    if any(_are_apart(off, [token.was_seen[way] for token in off]) for way in range(3)):
        return PENALTY
    by_token: dict[int, int] = {}
    for token in off:
        by_token[token.token_id] = by_token.get(token.token_id, 0) + (1 if token.gap > 0 else -1)
    # A token that stands there once is on one side anyway.
    several = [
        token for token in off if abs(by_token[token.token_id]) > 1 or by_token[token.token_id] == 0
    ]
    return BIAS if _are_apart(several, [by_token[token.token_id] > 0 for token in several]) else ""


def _are_apart(gaps: Sequence[TokenGap], are_less: Sequence[bool]) -> bool:
    """Whether these tokens, and no others, are less probable to the engine."""
    nums = (sum(are_less), len(are_less) - sum(are_less))
    right = [0, 0]
    for token, is_less in zip(gaps, are_less, strict=True):
        right[not is_less] += (token.gap > 0) is is_less
    return min(nums) >= _LEAST // 4 and all(
        num_right >= _SHARE * num for num_right, num in zip(right, nums, strict=True)
    )
