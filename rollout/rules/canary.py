"""The log-prob check: compares the log-probabilities that engines report of fixed prompts.

It runs where fingerprints cannot be compared.  Always true: an engine passes only if all its
log-probabilities are finite and close to

- those of the trainer's own model, where they are given,
- those that the same engine reported for the same weights before, where there are any,
- otherwise those of an engine whose weights are verified in another way,
- otherwise those of most engines.  Without a majority no engine passes.

Tolerance: the same weights give different numbers on other kernels, in other batches and on other
numbers of ranks: a few hundredths of a nat in bfloat16, and more for very unlikely tokens.  Lost or
mixed-up weights are off by whole nats for nearly all tokens.  So the average may differ by
``tolerance``, and a single token by ten times that.  One training step changes less than this: the
check detects corrupt weights, and the weight version distinguishes one step from the next.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Prompt = tuple[int, ...]
Logprobs = tuple[tuple[float, ...], ...]
_NUM_PROMPTS, _NUM_TOKENS = 2, 32
_OF_ONE_TOKEN = 10.0


@dataclass(frozen=True, slots=True)
class CanaryLogprobs:
    """What one engine reported of all prompts, for one adapter.

    Attributes:
        made_of: identifies the weights that were used; equal for equal weights.
        logprobs: of each prompt's tokens after the first, prompt by prompt, in nats.
    """

    made_of: str
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class EngineLogprobs:
    """The log-probabilities of one engine, and what to compare them with.

    Attributes:
        now: the current ones, by adapter; those without an adapter under the empty name.
        before: the ones of its last successful check.
        is_verified: its weights are verified in another way.
        expected: the ones of the trainer's model, by adapter.
    """

    now: Mapping[str, CanaryLogprobs]
    before: Mapping[str, CanaryLogprobs] = field(default_factory=dict)
    is_verified: bool = False
    expected: Mapping[str, Logprobs] = field(default_factory=dict)

    def of_trainer(self) -> dict[str, CanaryLogprobs]:
        """The log-probabilities of the trainer's model."""
        return {
            adapter: CanaryLogprobs("the trainer's", logprobs)
            for adapter, logprobs in self.expected.items()
        }

    def is_reference(self) -> bool:
        """Whether each of its values has been compared, so other engines can be compared with it.

        The comparisons are those with the trainer and with its earlier check.
        """
        compared = self.of_same_weights().keys() | self.expected.keys()
        return self.is_verified or self.now.keys() <= compared

    def has_passed(self) -> bool:
        """Whether it has passed a check with these weights before."""
        return self.now.keys() <= self.of_same_weights().keys()

    def of_same_weights(self) -> dict[str, CanaryLogprobs]:
        """The ones of its last check, for adapters whose weights have not changed since."""
        return {
            adapter: canary
            for adapter, canary in self.before.items()
            if adapter in self.now and self.now[adapter].made_of == canary.made_of
        }


def prompts_for(vocabulary_size: int) -> tuple[Prompt, ...]:
    """The canary prompts for a model; always the same for one size.

    Tokens are drawn from the middle half of the vocabulary, because special tokens (end of text,
    image placeholders) are at one of its ends.
    """
    if vocabulary_size < 4:
        return ()
    draw = random.Random("canary")
    first, last = vocabulary_size // 4, 3 * vocabulary_size // 4
    return tuple(
        tuple(draw.randrange(first, last) for _ in range(_NUM_TOKENS)) for _ in range(_NUM_PROMPTS)
    )


def find_logprob_mismatches(
    engines: Mapping[str, EngineLogprobs], tolerance: float
) -> dict[str, str]:
    """Engine id -> why it fails the check; engines that pass are left out."""
    wrong = {
        engine_id: mismatch
        for engine_id, engine in engines.items()
        if (mismatch := _own_mismatch(engine, tolerance))
    }
    passed = {engine_id: engine for engine_id, engine in engines.items() if engine_id not in wrong}
    if references := [name for name, engine in passed.items() if engine.is_reference()]:
        return wrong | _unlike_references(references, passed, tolerance)
    return wrong | _unlike_majority(passed, tolerance)


def _own_mismatch(engine: EngineLogprobs, tolerance: float) -> str:
    """Why one engine fails, without a look at the others; empty if it does not."""
    if found := first_non_number(engine.now):
        return found
    if found := logprob_difference(engine.now, engine.of_trainer(), tolerance):
        return f"{found} by the trainer's own model"
    if found := logprob_difference(engine.now, engine.of_same_weights(), tolerance):
        return f"{found} when the weights were the same"
    return ""


def first_non_number(now: Mapping[str, CanaryLogprobs]) -> str:
    """Which log-probability is not finite; empty if all are finite."""
    for adapter, canary in now.items():
        for index, values in enumerate(canary.logprobs):
            for position, value in enumerate(values, start=1):
                if not math.isfinite(value):
                    token = _token_name(adapter, index, position)
                    return f"{token} has log-probability {value}, which is not a finite number"
    return ""


def logprob_difference(
    now: Mapping[str, CanaryLogprobs], other: Mapping[str, CanaryLogprobs], tolerance: float
) -> str:
    """How two differ by more than the tolerance; empty if they do not.

    Returns:
        The beginning of a sentence; the caller adds whose the other one is.
    """
    for adapter, canary in now.items():
        if adapter not in other:
            continue
        prompts = zip(canary.logprobs, other[adapter].logprobs, strict=False)
        pairs = [
            (abs(mine - theirs), index, position, mine, theirs)
            for index, (own, others) in enumerate(prompts)
            for position, (mine, theirs) in enumerate(zip(own, others, strict=False), start=1)
        ]
        if not pairs:
            continue
        average = sum(pair[0] for pair in pairs) / len(pairs)
        worst, index, position, mine, theirs = max(pairs)
        if average > tolerance or worst > _OF_ONE_TOKEN * tolerance:
            return (
                f"{_token_name(adapter, index, position)} has log-probability {mine:.3f}, and "
                f"{theirs:.3f} (average difference {average:.3f}, tolerance {tolerance:g})"
            )
    return ""


def _token_name(adapter: str, index: int, position: int) -> str:
    under = f" under adapter {adapter!r}" if adapter else ""
    return f"canary prompt {index}, token {position}{under}"


def _unlike_references(
    references: Sequence[str], engines: Mapping[str, EngineLogprobs], tolerance: float
) -> dict[str, str]:
    wrong = {}
    for engine_id, engine in engines.items():
        if engine_id in references:
            continue
        found = [
            logprob_difference(engine.now, engines[reference].now, tolerance)
            for reference in references
        ]
        if all(found):
            wrong[engine_id] = f"{found[0]} on engine {references[0]}, whose weights are verified"
    return wrong


def _unlike_majority(engines: Mapping[str, EngineLogprobs], tolerance: float) -> dict[str, str]:
    agree = {
        engine_id: [
            other
            for other in engines
            if not logprob_difference(engine.now, engines[other].now, tolerance)
        ]
        for engine_id, engine in engines.items()
    }
    if not agree:
        return {}
    best = max(agree, key=lambda engine_id: len(agree[engine_id]))
    has_majority = len(agree[best]) * 2 > len(engines)
    wrong = {}
    for engine_id, engine in engines.items():
        if not has_majority:
            other = next(name for name in engines if name not in agree[engine_id])
            end = ", and there is no majority"
        elif engine_id not in agree[best]:
            other, end = best, f" and {len(agree[best]) - 1} more"
        else:
            continue
        found = logprob_difference(engine.now, engines[other].now, tolerance)
        wrong[engine_id] = f"{found} on engine {other}{end}"
    return wrong
