"""Log-probs of tokens from logits, as engines compute them.

An engine's log-prob belongs to one of three distributions over the vocabulary:

- ``softmax(logits / temperature)``: what SGLang reports by default, and the embedded engine too;
  top-k, top-p and min-p are not in it;
- ``softmax(logits)``: with ``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` in the engine's environment;
- the first, cut by top-k, top-p and min-p and scaled to a sum of 1: what tokens are drawn from, and
  what vLLM reports with ``processed_logprobs``.

From the log-prob of one token in one of them, that in another cannot be computed: it needs the
logits.  A trainer has them, so it computes whichever is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engines.protocol import SamplingParams
from rollout.core.arguments import wrong, wrong_type
from rollout.driver.client.sampling_check import check_sampling


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    renormalises: bool = False,
    sampling_mask: Sequence[Sequence[int] | None] | None = None,
) -> torch.Tensor:
    """The natural-log probability of each token.

    Args:
        logits: shape ``[..., vocabulary]``; those at a place predict the token with this place in
            ``token_ids``: for a model's own output, of the token before it.
        token_ids: shape ``[...]``.
        temperature: 0 (greedy) counts as 1, as in SGLang.
        top_k, top_p, min_p: cut as SGLang does, in this order; by default nothing is cut.
        renormalises: cut as vLLM and transformers do: first ``min_p``, then ``top_k``, then
            ``top_p`` of what they kept.  It differs from SGLang's where ``top_p`` is not alone.
        sampling_mask: for each token, in C order, the ids that its engine drew it from, or None
            for all: as ``Sample.sampling_mask``.  The log-probs are scaled to those, with no other
            cut: small differences between engine and trainer then move no token over its edge.

    Returns:
        Float32, the shape of ``token_ids``; minus infinity for a token that is cut off.

    Raises:
        TypeError: ``token_ids`` are no whole numbers.
        ValueError: shapes do not fit, a sampling parameter is out of its range, or a mask is
            beside a cut or no mask of these tokens.
    """
    _check_shapes(logits, token_ids)
    check_sampling(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    is_cut = top_k > 0 or top_p < 1.0 or min_p > 0.0
    if sampling_mask is not None:
        if is_cut:
            raise wrong("sampling_mask", "given", "None beside top_k, top_p or min_p")
        return _within(logprobs, token_ids, chosen, sampling_mask)
    if not is_cut:
        return chosen
    ordered, order = logprobs.exp().sort(dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    kept = ordered >= ordered[..., :1] * min_p
    if top_k > 0:
        kept &= rank < top_k
    shares = ordered * kept / (ordered * kept).sum(-1, keepdim=True) if renormalises else ordered
    kept &= shares.cumsum(-1) - shares <= top_p
    is_kept = kept.gather(-1, order.argsort(-1).gather(-1, token_ids.unsqueeze(-1))).squeeze(-1)
    mass = (ordered * kept).sum(-1).log()
    return torch.where(is_kept, chosen - mass, -torch.inf)


def _within(
    logprobs: torch.Tensor,
    token_ids: torch.Tensor,
    chosen: torch.Tensor,
    masks: Sequence[Sequence[int] | None],
) -> torch.Tensor:
    """The log-probs of the tokens, scaled to their masks."""
    if len(masks) != token_ids.numel():
        raise wrong("sampling_mask", f"{len(masks)} masks", f"{token_ids.numel()}, one a token")
    lengths = torch.tensor([len(mask or ()) for mask in masks], device=logprobs.device)
    flat = [token for mask in masks for token in mask or ()]
    ids = torch.tensor(flat, dtype=torch.int64, device=logprobs.device)
    most = logprobs.shape[-1] - 1
    if flat and not 0 <= min(flat) <= max(flat) <= most:
        outside = min(flat) if min(flat) < 0 else max(flat)
        raise wrong("sampling_mask", outside, f"ids from 0 to {most}")
    rows = torch.arange(len(masks), device=logprobs.device).repeat_interleave(lengths)
    kept = logprobs.reshape(len(masks), -1)[rows, ids].exp()
    mass = torch.zeros(len(masks), device=logprobs.device).index_add(0, rows, kept)
    is_in = torch.zeros(len(masks), dtype=torch.int64, device=logprobs.device)
    is_in.index_add_(0, rows, (ids == token_ids.reshape(-1)[rows]).long())
    has_mask = lengths > 0
    scaled = chosen.reshape(-1) - torch.where(has_mask, mass, 1.0).log()
    return torch.where(has_mask & (is_in == 0), -torch.inf, scaled).reshape(token_ids.shape)


def _check_shapes(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise wrong_type("token_ids.dtype", token_ids.dtype, "int64")
    if logits.shape[:-1] != token_ids.shape:
        raise wrong(
            "token_ids.shape",
            list(token_ids.shape),
            f"{list(logits.shape[:-1])}, that of the logits without the vocabulary",
        )
