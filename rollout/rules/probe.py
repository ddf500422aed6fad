"""The probe: what the log-probs of a fixed prompt show of an engine's weights and of its caches.

The *log-prob check* runs where fingerprints cannot be compared.  Always true: an engine passes it
only if all its log-probs are finite and close to

- those of the trainer's own model, where they are given,
- those that the same engine reported for the same weights before, where there are any,
- otherwise those of an engine whose weights are verified in another way,
- otherwise those of most engines.  Without a majority no engine passes.

Tolerance: the same weights give different numbers on other kernels, in other batches and on other
numbers of ranks: a few hundredths of a nat in bfloat16, and more for very unlikely tokens.  Lost or
mixed-up weights are off by whole nats for nearly all tokens.  So the average may differ by
``tolerance``, and a single token by ten times that.  One training step changes less than this: the
check detects corrupt weights, and the weight version distinguishes one step from the next.

The *sentinel* asks whether an engine answers from what older weights computed.  After each push the
prompt is sent twice: by its name, through the caches, and by a name that no cache has.  Both are
computed alike, so equal weights give equal log-probs.  Always true: an engine passes it only if

- no token of the first answer comes from a cache: its prefixes are named by weight version,
- the log-probs of both answers are equal,
- they differ from those before the push, if most of the tensors that compute every token did.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice

from engines.protocol import WeightsReport

Prompt = tuple[int, ...]
Logprobs = tuple[tuple[float, ...], ...]
NUM_CACHED, NUM_ASKED = 256, 32
"""Tokens whose KV may come from a cache, a whole page of any engine; tokens after them."""
NUM_SHORT = 2 * NUM_ASKED
"""Tokens of a prompt of which nothing can come from a cache."""
# SGLang refuses a prompt that leaves fewer than 7 tokens of the longest sequence.
_ROOM = 8
_OF_ONE_TOKEN = 10.0
_EXACT = 1e-3
# With fewer values, new weights may give none that differs.
_FEWEST_VALUES = 16
_COMPUTES_EVERY_TOKEN = re.compile(r"(^|\.)layers\.\d+\.(?!.*\.experts\.).*weight$")


# -- the prompt ---------------------------------------------------------------------------------


def prompt_for(
    vocabulary_size: int, max_tokens: int, given: Sequence[Sequence[int]] = ()
) -> Prompt:
    """The prompt of the probe for a model, always the same, or empty if it cannot have one.

    Tokens are drawn from the middle half of the vocabulary, because special tokens (end of text,
    image placeholders) are at one of its ends.

    Args:
        max_tokens: the longest sequence of the model; 0 if it is not known.
        given: prompts that the user chose; their tokens are repeated.
    """
    num_tokens = NUM_CACHED + NUM_ASKED
    if not (max_tokens or given):
        num_tokens = NUM_SHORT
    elif max_tokens:
        num_tokens = max(0, min(num_tokens, max_tokens - _ROOM))
    if given:
        return tuple(islice(cycle(chain.from_iterable(given)), num_tokens))
    if vocabulary_size < 4:
        return ()
    draw = random.Random("probe")
    first, last = vocabulary_size // 4, 3 * vocabulary_size // 4
    return tuple(draw.randrange(first, last) for _ in range(num_tokens))


def first_asked(prompt: Prompt) -> int:
    """The token after which log-probs are taken: those before it can come from a cache; 0 if the
    prompt is too short for that."""
    return len(prompt) - NUM_ASKED if len(prompt) > NUM_SHORT else 0


# -- the log-prob check -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CanaryLogprobs:
    """What one engine reported of all prompts, for one adapter.

    Attributes:
        made_of: identifies the weights that were used; equal for equal weights.
        logprobs: of each prompt's tokens after the one at ``start``, prompt by prompt, in nats.
    """

    made_of: str
    logprobs: Logprobs
    start: int = 0

    def tokens_of(self, index: int, start: int) -> tuple[float, ...]:
        """The log-probs of one prompt's tokens after the one at ``start``, or empty without
        them."""
        return self.logprobs[index][start - self.start :] if start >= self.start else ()


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
    return wrong | _unlike_others(passed, tolerance)


def _own_mismatch(engine: EngineLogprobs, tolerance: float) -> str:
    """Why one engine fails, without a look at the others."""
    if mismatch := _first_non_number(engine.now):
        return mismatch
    if mismatch := _logprob_difference(engine.now, engine.of_trainer(), tolerance):
        return f"{mismatch} by the trainer's own model"
    if mismatch := _logprob_difference(engine.now, engine.of_same_weights(), tolerance):
        return f"{mismatch} when the weights were the same"
    return ""


def _first_non_number(now: Mapping[str, CanaryLogprobs]) -> str:
    """Which log-probability is not finite, or empty if all are finite."""
    for adapter, canary in now.items():
        for index, values in enumerate(canary.logprobs):
            for position, value in enumerate(values, start=canary.start + 1):
                if not math.isfinite(value):
                    token = _token_name(adapter, index, position)
                    return f"{token} has log-probability {value}, which is not a finite number"
    return ""


def _logprob_difference(
    now: Mapping[str, CanaryLogprobs], other: Mapping[str, CanaryLogprobs], tolerance: float
) -> str:
    """How two differ by more than the tolerance, or empty if they do not.

    Returns:
        The beginning of a sentence; the caller adds whose the other one is.
    """
    for adapter, canary in now.items():
        if adapter not in other:
            continue
        pairs = [
            (abs(mine - theirs), index, position, mine, theirs)
            for index, values in enumerate(canary.logprobs[: len(other[adapter].logprobs)])
            for position, (mine, theirs) in enumerate(
                zip(values, other[adapter].tokens_of(index, canary.start), strict=False),
                start=canary.start + 1,
            )
        ]
        if not pairs and any(canary.logprobs):
            return f"{_token_name(adapter, 0, canary.start + 1)} has no log-probability"
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


def _unlike_others(engines: Mapping[str, EngineLogprobs], tolerance: float) -> dict[str, str]:
    """Engine id -> why it is unlike the references, or else unlike most engines."""

    def difference(name: str, other: str) -> str:
        return _logprob_difference(engines[name].now, engines[other].now, tolerance)

    references = [name for name, engine in engines.items() if engine.is_reference()]
    end = ", whose weights are verified"
    if engines and not references:
        unlike = {name: [other for other in engines if difference(name, other)] for name in engines}
        best = min(unlike, key=lambda name: len(unlike[name]))
        num_alike = len(engines) - len(unlike[best])
        if 2 * num_alike <= len(engines):
            return {
                name: f"{difference(name, others[0])} on engine {others[0]}, and there is no "
                "majority"
                for name, others in unlike.items()
            }
        references, end = [best], f" and {num_alike - 1} more"
    wrong = {}
    for name in [name for name in engines if name not in references]:
        differences = [difference(name, reference) for reference in references]
        if all(differences):
            wrong[name] = f"{differences[0]} on engine {references[0]}{end}"
    return wrong


# -- the sentinel -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of an engine.

    Attributes:
        logprobs: natural-log probabilities of the last tokens of the prompt, or of the next ones.
        num_cached: tokens of the prompt that came from a cache.
        of_prompt: those of the last tokens of the prompt, or empty if they were not requested.
        why: the engine's message, as of why there are none, or empty if there is none.
    """

    logprobs: tuple[float, ...]
    num_cached: int = 0
    of_prompt: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine answered with one set of weights.

    Attributes:
        through: through the caches, with an image if the model sees one.
        fresh: to the same prompt, past the caches.
        text: past the caches, without an image.
        made_of: identifies the weights; equal for equal weights.
        process: of one process of the engine: a store may have what an earlier one computed.
        report: fingerprints of the weights, or None where the engine has none.
    """

    through: Answer
    fresh: Answer
    text: Answer
    made_of: str
    process: str = ""
    report: WeightsReport | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the engine computes the same prompt twice alike."""
        return not _gap(self.through, self.fresh)

    @property
    def prompt(self) -> str:
        """What went through the caches: ``text`` or ``image``."""
        return "text" if self.fresh is self.text else "image"

    def without_numbers(self) -> str:
        """Which prompt has log-probs past the caches that are not finite, or empty if none has."""
        past = {"text": self.text, self.prompt: self.fresh}
        broken = (n for n, answer in past.items() if not all(map(math.isfinite, answer.logprobs)))
        return next(broken, "")


@dataclass(frozen=True, slots=True)
class Stale:
    """Why an engine answers from old state.

    Attributes:
        is_certain: no other request in the same batch can be the reason.
    """

    why: str
    is_certain: bool = True


def find_stale(now: Answers, before: Answers, tolerance: float, *, is_exact: bool) -> Stale | None:
    """What an engine answered from old state, or None if it did not.

    Args:
        before: its answers with the weights before.
        tolerance: largest average difference of log-probs of equal weights, in nats, for an engine
            that does not compute the same prompt twice alike.
        is_exact: it does.
    """
    if now.through.num_cached:
        tokens = f"{now.through.num_cached} tokens of the sentinel's {now.prompt} prompt"
        return Stale(f"{tokens} came from a cache of the weights before")
    gap = _gap(now.through, now.fresh)
    if gap > (min(_EXACT, tolerance) if is_exact else tolerance):
        why = (
            f"log-probs of the sentinel's {now.prompt} prompt differ by {gap:.3g} nats on average "
            "from those past the caches"
        )
        return Stale(why, is_certain=gap > tolerance)
    values = now.text.logprobs
    is_same = len(values) >= _FEWEST_VALUES and values == before.text.logprobs
    if is_same and _has_changed(before.report, now.report):
        return Stale("most weights are new, and each log-prob of the sentinel is as before")
    return None


def _gap(mine: Answer, other: Answer) -> float:
    """The average difference; infinite if one of them has no number."""
    if not mine.logprobs or len(mine.logprobs) != len(other.logprobs):
        return math.inf
    pairs = zip(mine.logprobs, other.logprobs, strict=True)
    gap = sum(abs(first - second) for first, second in pairs) / len(mine.logprobs)
    return math.inf if math.isnan(gap) else gap


def _has_changed(before: WeightsReport | None, now: WeightsReport | None) -> bool:
    """Whether most of the tensors that compute every token did; a few may round to the same."""
    if before is None or now is None or not before.tensors or not now.tensors:
        return False
    old, new = before.tensors[0], now.tensors[0]
    on_path = [name for name in new if _COMPUTES_EVERY_TOKEN.search(name)]
    changed = [name for name in on_path if old.get(name) != new[name]]
    return 2 * len(changed) > len(on_path) > 0
