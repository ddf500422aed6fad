"""Several turns as one sample: tokens of the policy, with tokens of an environment in between.

Always true: ids of earlier turns are sent as they were generated and never tokenised again; tokens
of the environment have mask 0 and log-prob 0.0; all requests of a session prefer one engine.  A
session that was cut off begins again, and its turns are those of before as long as the tokens in
front of them are.  What an engine's context has no room for is not kept.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from engines.protocol import FinishReason, SamplingParams
from rollout.core.arguments import TokenId, checked
from rollout.core.errors import GenerationAborted, RolloutError
from rollout.core.samples import Sample, SampleFailure, SampleStatus
from rollout.driver.client.partial import extend_from, is_begun_by
from rollout.driver.client.sampling_check import check_sampling


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a turn of a sample ended: tokens and characters of output up to there, and why."""

    num_tokens: int
    num_characters: int
    status: str
    finish_reason: FinishReason | None


class Session:
    """A client bound to one sample; the argument of a custom generate function.

    Attributes:
        sample: prompt and all turns so far.
        sampling: the rollout's; ``max_new_tokens`` limits all turns together.
        turns: that have ended.

    Args:
        complete: ``Completer.complete``, bound to the rollout.
        earlier: the sample of the session that was cut off, if it has tokens.
        its_turns: those of it that had ended.
    """

    def __init__(
        self,
        sample: Sample,
        sampling: SamplingParams,
        complete: Callable[..., Awaitable[None]],
        earlier: Sample | None = None,
        its_turns: Sequence[Turn] = (),
    ) -> None:
        self.sample = sample
        self.sampling = sampling
        self.turns: list[Turn] = []
        self._earlier = earlier
        self._its_turns = its_turns
        self._affinity = os.urandom(8).hex()
        self._complete = complete

    @property
    def num_left(self) -> int:
        """Tokens that may still be generated, in this turn and later ones."""
        return max(0, self.sampling.max_new_tokens - sum(self.sample.mask))

    async def generate(self, sampling: SamplingParams | None = None) -> list[int]:
        """Generate one turn and return its token ids.  ``sample.finish_reason`` says how it ended.

        Args:
            sampling: for this turn; ``num_left`` limits its ``max_new_tokens``.

        Raises:
            GenerationAborted: the rollout ends now.  Not a failure: do not catch it.
            TypeError, ValueError: ``sampling`` is wrong.
            RolloutError: the turn failed, and ``sample.failure`` has its kind.  With ``too_long``
                what was observed since the last turn is cut off, and the hook may go on.
        """
        if sampling is not None:
            check_sampling(sampling)
        base = len(self.sample.output_ids)
        chosen = sampling or self.sampling
        turn = replace(chosen, max_new_tokens=min(chosen.max_new_tokens, self.num_left))
        sample = self.sample
        if not self._repeat_turn(base, may_continue=turn.can_continue):
            await self._complete(sample, turn, base=base, affinity=self._affinity)
        if sample.is_unfinished:
            raise GenerationAborted("the rollout ends before this turn did", sample=sample)
        if sample.status is SampleStatus.FAILED:
            if sample.failure is SampleFailure.TOO_LONG:
                self._take_back(base)
            raise RolloutError(f"turn failed: {sample.error}")
        length = len(sample.output_ids)
        self.turns.append(Turn(length, len(sample.text), sample.status, sample.finish_reason))
        return sample.output_ids[base:]

    def _take_back(self, base: int) -> None:
        """Cut off what was observed since the last turn, unless this one has tokens behind it."""
        sample = self.sample
        if len(sample.output_ids) > base:
            return
        last = self.turns[-1] if self.turns else Turn(0, 0, "", None)
        del sample.output_ids[last.num_tokens :]
        del sample.output_logprobs[last.num_tokens :]
        del sample.mask[last.num_tokens :]
        if sample.sampling_mask is not None:
            del sample.sampling_mask[last.num_tokens :]
        sample.text = sample.text[: last.num_characters]

    def _repeat_turn(self, base: int, *, may_continue: bool) -> bool:
        """Take the tokens of this turn that the earlier session had.

        Returns:
            Whether these are all.
        """
        sample, earlier, number = self.sample, self._earlier, len(self.turns)
        if earlier is None or not is_begun_by(earlier, sample):
            self._earlier = None
            return False
        end = Turn(len(earlier.output_ids), len(earlier.text), SampleStatus.ABORTED, None)
        is_whole = number < len(self._its_turns)
        if is_whole:
            end = self._its_turns[number]
        elif not may_continue:
            return False
        if not all(earlier.mask[base : end.num_tokens]):
            self._earlier = None
            return False
        extend_from(sample, earlier, end.num_tokens, end.num_characters)
        sample.status, sample.finish_reason = SampleStatus(end.status), end.finish_reason
        return is_whole

    @checked
    def observe(self, ids: Sequence[TokenId], text: str = "") -> None:
        """Append tokens of the environment.

        Args:
            ids: token ids, shape ``[length]``.
            text: what they say, for the sample's ``text``.

        Raises:
            TypeError, ValueError: these are no token ids, or no text.
        """
        self.sample.output_ids.extend(ids)
        self.sample.output_logprobs.extend([0.0] * len(ids))
        self.sample.mask.extend([0] * len(ids))
        if self.sample.sampling_mask is not None:
            self.sample.sampling_mask.extend([None] * len(ids))
        self.sample.text += text
