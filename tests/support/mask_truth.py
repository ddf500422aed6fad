"""What each token of a reply was drawn from, by a forward pass of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from engines.protocol import GenerateReply, SamplingParams
from tests.engines.embedded.reference import model

ROUNDING = 1e-4
"""Probability by which an edge of the cut may differ."""


def check_masks(
    prompt: list[int],
    reply: GenerateReply,
    sampling: SamplingParams,
    path_of: Callable[[str], Path],
) -> None:
    """Check that each token has the ids that top-k and top-p leave, under its own weights.

    Args:
        path_of: the checkpoint of a weight version.
    """
    assert reply.sampling_mask is not None
    assert len(reply.sampling_mask) == len(reply.output_ids)
    ids = torch.tensor([[*prompt, *reply.output_ids]])
    num_checked = 0
    for span in reply.weight_versions:
        with torch.inference_mode():
            logits = model(path_of(span.version))(ids).logits[0].float() / sampling.temperature
        for place in range(span.start, span.end):
            mask, token = reply.sampling_mask[place], reply.output_ids[place]
            assert mask is not None
            assert token in mask
            shares, order = logits[len(prompt) - 1 + place].softmax(-1).sort(descending=True)
            before = (shares.cumsum(-1) - shares)[: sampling.top_k]
            least = int((before < sampling.top_p - ROUNDING).sum())
            most = int((before <= sampling.top_p + ROUNDING).sum())
            assert least <= len(mask) <= most, (place, len(mask))
            assert set(order[:least].tolist()) <= set(mask) <= set(order[:most].tolist())
            num_checked += least == most
    assert num_checked > len(reply.output_ids) / 2
