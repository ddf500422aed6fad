"""Several turns as one sample: tokens of the policy, with tokens of an environment in between.

Always true: ids of earlier turns are sent as they were generated and never tokenised again; tokens
of the environment have mask 0 and log-prob 0.0; all requests of a session prefer one engine.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from engines.protocol import SamplingParams
from rollout.core.arguments import TokenId, checked
from rollout.core.errors import GenerationAborted, RolloutError
from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.sampling_check import check_sampling


class Session:
    """A client bound to one sample; the argument of a custom generate function.

    Attributes:
        sample: prompt and all turns so far.
        sampling: the rollout's; ``max_new_tokens`` limits all turns together.

    Args:
        complete: ``Completer.complete``, bound to the rollout.
    """

    def __init__(
        self, sample: Sample, sampling: SamplingParams, complete: Callable[..., Awaitable[None]]
    ) -> None:
        self.sample = sample
        self.sampling = sampling
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
            ConfigError: ``sampling`` is wrong.
            RolloutError: the turn failed.
        """
        if sampling is not None:
            check_sampling(sampling)
        base = len(self.sample.output_ids)
        chosen = sampling or self.sampling
        turn = replace(chosen, max_new_tokens=min(chosen.max_new_tokens, self.num_left))
        await self._complete(self.sample, turn, base=base, affinity=self._affinity)
        if self.sample.is_unfinished:
            raise GenerationAborted("the rollout ends before this turn did", sample=self.sample)
        if self.sample.status is SampleStatus.FAILED:
            raise RolloutError(f"turn failed: {self.sample.error}")
        return self.sample.output_ids[base:]

    @checked
    def observe(self, ids: Sequence[TokenId], text: str = "") -> None:
        """Append tokens of the environment.

        Args:
            ids: token ids, shape ``[length]``.
            text: what they say, for the sample's ``text``.

        Raises:
            ConfigError: these are no token ids, or no text.
        """
        self.sample.output_ids.extend(ids)
        self.sample.output_logprobs.extend([0.0] * len(ids))
        self.sample.mask.extend([0] * len(ids))
        self.sample.text += text
