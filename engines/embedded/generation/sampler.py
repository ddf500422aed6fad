"""Next tokens from logits.

The reported log-probability is SGLang's default: log-softmax of the logits at the request's
temperature (at 1 for greedy and top-k 1), before top-k and top-p cut the distribution.  As with
SGLang, it is at 1 for all requests with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` in the engine's
environment.

Each request draws one uniform number per token from its own stream and inverts the cumulative
distribution with it, so a seeded request does not depend on what else is in the batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from engines.embedded.core.errors import NotFinite
from engines.embedded.generation.generation import Generation

RETURNS_ORIGINAL = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
_BELOW_ONE = 1.0 - 2.0**-24  # the greatest float32 below 1: the draw stays inside the last token


def sample(
    logits: torch.Tensor, generations: Sequence[Generation]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and, if any request wants them, log-probabilities, one per row of ``logits``.

    ``logits`` is float32 ``[rows, vocabulary]``; it is changed in place.  A generation whose row
    has NaN is refused.  One that wants masks gets that of its token.
    """
    is_nan = torch.isnan(logits).any(dim=1)
    if is_nan.any():
        for generation in (generations[row] for row in is_nan.nonzero()[:, 0].tolist()):
            generation.refusal = NotFinite(
                "the model's logits are not numbers: its weights are lost or damaged"
            )
        torch.nan_to_num_(logits)
    _forbid_early_stops(logits, generations)
    scores = logits.clone() if RETURNS_ORIGINAL else logits
    every = [generation.params for generation in generations]
    temperatures = [1.0 if params.is_greedy else params.temperature for params in every]
    if any(temperature != 1.0 for temperature in temperatures):
        logits.div_(torch.tensor(temperatures, device=logits.device).unsqueeze(1))
    masks: dict[int, list[int]] = {}
    if all(generation.params.is_greedy for generation in generations):
        tokens = logits.argmax(dim=-1)
    else:
        tokens, masks = _draw(logits, generations)
    for row, generation in enumerate(generations):
        if generation.wants_masks:
            is_greedy = generation.params.is_greedy
            generation.masks.append([int(tokens[row])] if is_greedy else masks.get(row))
    if not any(generation.return_logprob for generation in generations):
        return tokens, None
    chosen = scores.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, chosen - scores.logsumexp(dim=-1)


def _forbid_early_stops(logits: torch.Tensor, generations: Sequence[Generation]) -> None:
    for row, generation in enumerate(generations):
        if len(generation.output_ids) < generation.params.min_new_tokens:
            logits[row, list(generation.early_ids)] = -torch.inf


def _draw(
    logits: torch.Tensor, generations: Sequence[Generation]
) -> tuple[torch.Tensor, dict[int, list[int]]]:
    """One token per row of temperature-scaled ``logits``, each by its own request's rules, and
    the ids that were left to draw it from, of rows that are cut and want them."""
    device = logits.device
    uniform = torch.tensor([generation.random() for generation in generations], device=device)
    probabilities = logits.softmax(dim=-1)
    tokens = _invert(probabilities, uniform)
    masks: dict[int, list[int]] = {}
    cut = [row for row, generation in enumerate(generations) if generation.params.is_truncated]
    if cut:
        rows = torch.tensor(cut, device=device)
        params = [generations[row].params for row in cut]
        vocabulary = logits.shape[1]
        top_k = torch.tensor([p.top_k if p.top_k > 0 else vocabulary for p in params])
        top_p = torch.tensor([p.top_p for p in params])
        kept, order = _truncated(probabilities[rows], top_k.to(device), top_p.to(device))
        index = _invert(kept, uniform[rows]).unsqueeze(1)
        tokens[rows] = order.gather(1, index).squeeze(1)
        for row, weights, ids in zip(cut, kept, order, strict=True):
            if generations[row].wants_masks:
                masks[row] = ids[weights > 0].tolist()
    greedy = [row for row, generation in enumerate(generations) if generation.params.is_greedy]
    if greedy:
        rows = torch.tensor(greedy, device=device)
        tokens[rows] = logits[rows].argmax(dim=-1)
    return tokens, masks


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds that share of the row's total."""
    cumulative = weights.cumsum(dim=-1)
    target = uniform.clamp(max=_BELOW_ONE).unsqueeze(1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return index.clamp_(max=weights.shape[1] - 1)


def _truncated(
    probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities, the greatest first, of the ``top_k`` likeliest and the fewest that reach
    ``top_p``, 0 for the others; and the id of each."""
    ordered, order = probabilities.sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    before = ordered.cumsum(dim=-1) - ordered
    return ordered * ((rank < top_k.unsqueeze(1)) & (before < top_p.unsqueeze(1))), order
