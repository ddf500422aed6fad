"""One forward pass and the drawing of its tokens, in transformers' ``ModelRunner``."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import ModelRunner

from engines.embedded.sampler import sample


class Runner(ModelRunner):
    """Draws each row by its own request's parameters instead of one set for the whole batch."""

    def maybe_pad_inputs(
        self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool
    ) -> tuple[int, int]:
        """Our attention reads the cache by pages itself: no list of every cached token is made."""
        cache: Any = self.cache
        return num_q_tokens, 0 if cache.is_bucketed else max_kv_read

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """``scores`` is ``[1, rows, vocabulary]``; rows past the last new token are padding."""
        batch: Any = self.inputs_and_outputs
        generations = [one.state.generation for one in batch.requests_in_batch if one.has_new_token]
        count = len(generations)
        if count:
            tokens, logprobs = sample(scores[0, :count], generations)
            output_ids[0, :count] = tokens
            if logprobs is None:
                output_ids[1, :count] = 0
            else:  # transformers carries the float's bits in the integer tensor
                output_ids[1, :count] = logprobs.view(torch.int32)
