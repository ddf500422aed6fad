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

import torch

from engines.protocol import SamplingParams
from rollout.core.arguments import wrong
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

    Returns:
        Float32, the shape of ``token_ids``; minus infinity for a token that is cut off.

    Raises:
        ConfigError: shapes or types do not fit, or a sampling parameter is out of its range.
    """
    _check_shapes(logits, token_ids)
    check_sampling(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
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


def _check_shapes(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    if token_ids.dtype not in (torch.int32, torch.int64):
        raise wrong("token_ids.dtype", token_ids.dtype, "int64")
    if logits.shape[:-1] != token_ids.shape:
        raise wrong(
            "token_ids.shape",
            list(token_ids.shape),
            f"{list(logits.shape[:-1])}, that of the logits without the vocabulary",
        )
