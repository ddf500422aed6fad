"""Do engines think alike of a few fixed texts?  Decided from log-probabilities.

Asked where fingerprints cannot be compared.  Always true: an engine is passed only if all it told
are numbers, close to what the trainer's own model told, if that was asked, and to what the engine
told of the same weights before; else to what an engine tells whose weights are proved otherwise;
else to what most engines tell.  Where there is no majority nobody is
passed.

How close: the same weights give other numbers on other kernels, in other batches and over another
number of ranks, a few hundredths of a nat in bfloat16 and more for a token that hardly any model
would say; lost or mixed-up weights are off by whole nats nearly everywhere.  So the average may
differ by ``tolerance`` and a single token by ten times that.  One step of training changes less:
a canary tells garbage from weights, not one version from the next; that is what the number is for.
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
class Canary:
    """What one engine told of all prompts.

    Attributes:
        made_of: the weights it was made with; equal for equal ones.
        logprobs: of each prompt's tokens after the first, prompt by prompt.
    """

    made_of: str
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of one engine.

    Attributes:
        now: what it tells, by adapter; the model's own under the empty name.
        before: what it told when it was last proved.
        is_proved: its weights are proved otherwise.
        expected: what the trainer's model told, by adapter.
    """

    now: Mapping[str, Canary]
    before: Mapping[str, Canary] = field(default_factory=dict)
    is_proved: bool = False
    expected: Mapping[str, Logprobs] = field(default_factory=dict)

    def of_trainer(self) -> dict[str, Canary]:
        """What the trainer's model told."""
        return {adapter: Canary("the trainer's", told) for adapter, told in self.expected.items()}

    def is_vouched_for(self) -> bool:
        """Whether all it tells could be held against something that is its own."""
        return self.is_proved or self.now.keys() <= self.known().keys() | self.expected.keys()

    def known(self) -> dict[str, Canary]:
        """What it told before of weights that are still the same."""
        return {
            adapter: canary
            for adapter, canary in self.before.items()
            if adapter in self.now and self.now[adapter].made_of == canary.made_of
        }


def prompts_for(vocabulary_size: int) -> tuple[Prompt, ...]:
    """Prompts for a model; always the same ones.

    From the middle half of its vocabulary: what has a meaning of its own (ends of texts, places of
    images) stands at one end of it or at the other.
    """
    if vocabulary_size < 4:
        return ()
    draw = random.Random("canary")
    first, last = vocabulary_size // 4, 3 * vocabulary_size // 4
    return tuple(
        tuple(draw.randrange(first, last) for _ in range(_NUM_TOKENS)) for _ in range(_NUM_PROMPTS)
    )


def judge_canaries(heard: Mapping[str, Heard], tolerance: float) -> dict[str, str]:
    """Engine id -> why its weights are not proved; engines that are proved are not in it."""
    wrong = {}
    for engine_id, one in heard.items():
        told = no_number(one.now)
        if not told and (found := difference(one.now, one.of_trainer(), tolerance)):
            told = f"{found} by the trainer's own model"
        if not told and (found := difference(one.now, one.known(), tolerance)):
            told = f"{found} when the weights were the same"
        if told:
            wrong[engine_id] = told
    left = {engine_id: one for engine_id, one in heard.items() if engine_id not in wrong}
    proved = [engine_id for engine_id, one in left.items() if one.is_vouched_for()]
    if proved:
        return wrong | _unlike(proved, left, tolerance)
    return wrong | _outvoted(left, tolerance)


def no_number(now: Mapping[str, Canary]) -> str:
    """Where a log-probability is not a number; empty if all are."""
    for adapter, canary in now.items():
        for index, values in enumerate(canary.logprobs):
            for position, value in enumerate(values, start=1):
                if not math.isfinite(value):
                    where = _place(adapter, index, position)
                    return f"{where} has log-probability {value}, which is no number"
    return ""


def difference(now: Mapping[str, Canary], other: Mapping[str, Canary], tolerance: float) -> str:
    """How two differ that should not, up to the other's name; empty if they are close."""
    for adapter, canary in now.items():
        if adapter not in other:
            continue
        pairs = [
            (abs(mine - theirs), index, position, mine, theirs)
            for index, (own, others) in enumerate(
                zip(canary.logprobs, other[adapter].logprobs, strict=False)
            )
            for position, (mine, theirs) in enumerate(zip(own, others, strict=False), start=1)
        ]
        if not pairs:
            continue
        average = sum(pair[0] for pair in pairs) / len(pairs)
        worst, index, position, mine, theirs = max(pairs)
        if average > tolerance or worst > _OF_ONE_TOKEN * tolerance:
            return (
                f"{_place(adapter, index, position)} has log-probability {mine:.3f}, and "
                f"{theirs:.3f} (all: {average:.3f} apart on average, {tolerance:g} may be)"
            )
    return ""


def _place(adapter: str, index: int, position: int) -> str:
    under = f" under adapter {adapter!r}" if adapter else ""
    return f"canary prompt {index}, token {position}{under}"


def _unlike(proved: Sequence[str], heard: Mapping[str, Heard], tolerance: float) -> dict[str, str]:
    wrong = {}
    for engine_id, one in heard.items():
        if engine_id in proved:
            continue
        found = [difference(one.now, heard[other].now, tolerance) for other in proved]
        if all(found):
            wrong[engine_id] = f"{found[0]} on engine {proved[0]}, whose weights are proved"
    return wrong


def _outvoted(heard: Mapping[str, Heard], tolerance: float) -> dict[str, str]:
    agree = {
        one: [
            other for other in heard if not difference(heard[one].now, heard[other].now, tolerance)
        ]
        for one in heard
    }
    if not agree:
        return {}
    best = max(agree, key=lambda one: len(agree[one]))
    has_majority = len(agree[best]) * 2 > len(heard)
    wrong = {}
    for engine_id, one in heard.items():
        if has_majority and engine_id in agree[best]:
            continue
        other = best
        if not has_majority:
            other = next(name for name in heard if name not in agree[engine_id])
        found = difference(one.now, heard[other].now, tolerance)
        more = len(agree[best]) - 1
        end = f" and {more} more" if has_majority else ", and no majority says who is right"
        wrong[engine_id] = f"{found} on engine {other}{end}"
    return wrong
