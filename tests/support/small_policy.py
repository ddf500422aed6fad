"""A policy of one table: the logits of the next token by the last one, without any library."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from engines.protocol import VersionSpan
from rollout.core.samples import EngineSpan, Sample

VOCABULARY = 40


@dataclass(frozen=True)
class Policy:
    """Logits by last token, shape ``[VOCABULARY, VOCABULARY]``."""

    logits: Sequence[Sequence[float]]

    def distribution(self, last: int, temperature: float = 1.0) -> list[float]:
        """The log-prob of each token after ``last``."""
        scaled = [logit / temperature for logit in self.logits[last]]
        total = math.log(sum(map(math.exp, scaled)))
        return [logit - total for logit in scaled]

    def logprobs(self, sample: Sample, temperature: float = 1.0) -> list[float]:
        """Of the output tokens of a sample."""
        lasts = [sample.prompt_ids[-1], *sample.output_ids]
        pairs = zip(lasts, sample.output_ids, strict=False)
        return [self.distribution(last, temperature)[token] for last, token in pairs]

    def sample(
        self,
        draw: random.Random,
        length: int = 40,
        *,
        engine_id: str = "",
        version: str = "",
        temperature: float = 1.0,
    ) -> Sample:
        """What an engine with these weights returns, under the id and version that it reports."""
        last, ids = draw.randrange(VOCABULARY), list[int]()
        prompt = [last]
        for _ in range(length):
            weights = map(math.exp, self.distribution(last, temperature))
            (last,) = draw.choices(range(VOCABULARY), list(weights))
            ids.append(last)
        made = Sample(prompt, ids, [0.0] * length)
        made.output_logprobs = self.logprobs(made, temperature)
        made.engines = (EngineSpan(engine_id, 0, length),) if engine_id else ()
        made.weight_versions = (VersionSpan(version, 0, length),) if version else ()
        return made

    def trained(self, draw: random.Random, step: float = 0.1) -> Policy:
        """The policy after a training step that moves each logit by about ``step``."""
        return Policy([[logit + draw.gauss(0, step) for logit in row] for row in self.logits])

    def with_swapped_rows(self) -> Policy:
        """As if a tensor were loaded in the place of another."""
        return Policy([*self.logits[VOCABULARY // 2 :], *self.logits[: VOCABULARY // 2]])


def new_policy(draw: random.Random, spread: float = 2.0) -> Policy:
    return Policy([[draw.gauss(0, spread) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)])
