"""The sentinel: whether an engine answers from what older weights computed.

A fixed prompt, and for a model that sees an image with it, is in every cache of an engine.  After
each push it is sent twice: by its name, through the caches, and by a name that no cache has.
Both requests are computed alike, so equal weights give equal log-probs.  Always true: an engine
passes only if

- no token of the first answer comes from a cache: its prefixes are named by weight version,
- the log-probs of both answers are equal,
- they differ from those before the push, if most of the tensors that compute every token did.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice

from engines.protocol import WeightsReport

NUM_CACHED, NUM_ASKED = 256, 32
"""Tokens whose KV may come from a cache, a whole page of any engine; tokens after them."""
_EXACT = 1e-3
# With fewer values, new weights may give none that differs.
_FEWEST_VALUES = 16
_COMPUTES_EVERY_TOKEN = re.compile(r"(^|\.)layers\.\d+\.(?!.*\.experts\.).*weight$")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an engine.

    Attributes:
        logprobs: natural-log probabilities of the last tokens of the prompt, or of the next ones.
        num_cached: tokens of the prompt that came from a cache.
    """

    logprobs: tuple[float, ...]
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine answered with one set of weights.

    Attributes:
        through: by prompt (``text``, ``image``), through the caches.
        fresh: by prompt, past the caches.
        made_of: identifies the weights; equal for equal weights.
        process: of one process of the engine: a store may have what an earlier one computed.
        report: fingerprints of the weights; None where the engine has none.
    """

    through: Mapping[str, Answer]
    fresh: Mapping[str, Answer]
    made_of: str
    process: str = ""
    report: WeightsReport | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the engine computes the same prompt twice alike."""
        return all(not _gap(self.through[name], self.fresh[name]) for name in self.fresh)


@dataclass(frozen=True, slots=True)
class Stale:
    """Why an engine answers from old state.

    Attributes:
        is_certain: no other request in the same batch can be the reason.
    """

    why: str
    is_certain: bool = True


def prompt_for(
    vocabulary_size: int, max_tokens: int, given: Sequence[Sequence[int]] = ()
) -> tuple[int, ...]:
    """The sentinel's prompt for a model; empty if it cannot have one.

    Tokens are drawn from the middle half of the vocabulary, as those of the log-prob check.

    Args:
        max_tokens: that the model takes; 0 if it is not known.
        given: prompts of the log-prob check that the user chose; they are repeated.
    """
    num_tokens = NUM_CACHED + NUM_ASKED
    num_tokens = min(num_tokens, max_tokens - 1) if max_tokens else num_tokens
    if num_tokens <= 2 * NUM_ASKED:
        return ()
    if given:
        return tuple(islice(cycle(chain.from_iterable(given)), num_tokens))
    if vocabulary_size < 4 or not max_tokens:
        return ()
    draw = random.Random("sentinel")
    first, last = vocabulary_size // 4, 3 * vocabulary_size // 4
    return tuple(draw.randrange(first, last) for _ in range(num_tokens))


def find_stale(now: Answers, before: Answers, tolerance: float, *, is_exact: bool) -> Stale | None:
    """What an engine answered from old state; None if it did not.

    Args:
        before: its answers with the weights before.
        tolerance: largest average difference of log-probs of equal weights, in nats, for an engine
            that does not compute the same prompt twice alike.
        is_exact: it does.
    """
    for name, through in now.through.items():
        if through.num_cached:
            tokens = f"{through.num_cached} tokens of the sentinel's {name} prompt"
            return Stale(f"{tokens} came from a cache of the weights before")
        largest = min(_EXACT, tolerance) if is_exact else tolerance
        gap = _gap(through, now.fresh[name])
        if gap > largest:
            why = (
                f"log-probs of the sentinel's {name} prompt differ by {gap:.3g} nats on average "
                "from those past the caches"
            )
            return Stale(why, is_certain=gap > tolerance)
    values = now.fresh["text"].logprobs
    is_same = len(values) >= _FEWEST_VALUES and values == before.fresh["text"].logprobs
    if is_same and _has_changed(before.report, now.report):
        why = "most weights are new, and each log-prob of the sentinel is as before"
        return Stale(why)
    return None


def without_numbers(answers: Answers) -> str:
    """Which prompt has log-probs past the caches that are not finite; empty if none has."""
    return next(
        (
            name
            for name, answer in answers.fresh.items()
            if not all(map(math.isfinite, answer.logprobs))
        ),
        "",
    )


def _gap(one: Answer, other: Answer) -> float:
    """The average difference; infinite if one of them has no number."""
    pairs = list(zip(one.logprobs, other.logprobs, strict=False))
    if not pairs or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    gap = sum(abs(first - second) for first, second in pairs) / len(pairs)
    return gap if gap == gap else float("inf")


def _has_changed(before: WeightsReport | None, now: WeightsReport | None) -> bool:
    """Whether most of the tensors that compute every token did; a few may round to the same."""
    if before is None or now is None or not before.tensors or not now.tensors:
        return False
    old, new = before.tensors[0], now.tensors[0]
    on_path = [name for name in new if _COMPUTES_EVERY_TOKEN.search(name)]
    changed = [name for name in on_path if old.get(name) != new[name]]
    return 2 * len(changed) > len(on_path) > 0
