"""Several turns as one sample: what the policy draws, and what an environment says in between.

Always true: ids of earlier turns are sent as they were drawn, never tokenised anew; tokens of the
environment have mask 0 and log-prob 0.0; all asks of a session want the same engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from engines.protocol import SamplingParams
from rollout.driver.completing import Completer, Scope
from rollout.errors import GenerationAborted, RolloutError
from rollout.samples import Sample, SampleStatus


class Session:
    """What a custom generate function gets: a client bound to one sample.

    Attributes:
        sample: prompt and all turns so far.
        sampling: of the rollout; ``max_new_tokens`` bounds all turns together.
    """

    def __init__(
        self,
        sample: Sample,
        sampling: SamplingParams,
        completer: Completer,
        scope: Scope,
        is_stale: Callable[[Sample], bool],
    ) -> None:
        self.sample = sample
        self.sampling = sampling
        self.session_id = os.urandom(8).hex()
        self._completer = completer
        self._scope = scope
        self._is_stale = is_stale

    @property
    def num_left(self) -> int:
        """Tokens that may still be drawn, in this turn and later ones."""
        return max(0, self.sampling.max_new_tokens - sum(self.sample.mask))

    async def generate(self, sampling: SamplingParams | None = None) -> list[int]:
        """One turn of the policy; its token ids.  Its end is in ``sample.finish_reason``.

        Args:
            sampling: of this turn; what is left of the whole bounds it.

        Raises:
            GenerationAborted: the rollout ends now; it is no fault, let it rise.
            RolloutError: the turn failed.
        """
        base = len(self.sample.output_ids)
        asked = sampling or self.sampling
        turn = replace(asked, max_new_tokens=min(asked.max_new_tokens, self.num_left))
        await self._completer.complete(
            self.sample,
            turn,
            self._scope,
            base=base,
            session_id=self.session_id,
            is_stale=self._is_stale,
        )
        if self.sample.is_unfinished:
            raise GenerationAborted("the rollout ends before this turn did", sample=self.sample)
        if self.sample.status is SampleStatus.FAILED:
            raise RolloutError(f"turn failed: {self.sample.error}")
        return self.sample.output_ids[base:]

    def observe(self, ids: Sequence[int], text: str = "") -> None:
        """Append what the environment says."""
        self.sample.output_ids.extend(ids)
        self.sample.output_logprobs.extend([0.0] * len(ids))
        self.sample.mask.extend([0] * len(ids))
        self.sample.text += text
