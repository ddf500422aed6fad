"""Importance weights and rejection for samples that another policy than the trainer's has drawn.

A gap g_t is a token's log-prob under the trainer less the engine's, so the ratio of the token is
exp(g_t).  A ``level`` says which ratio decides about a token t of a sequence of T tokens:

    token      rho_t = exp(g_t)                       biased in sequences, small variance
    sequence   rho   = exp(g_1 + ... + g_T)           unbiased, its variance grows with T
    geometric  rho   = exp((g_1 + ... + g_T) / T)     does not depend on T

The first two are importance sampling with the tokens or whole sequences as its draws; the third is
the ratio of GSPO (Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071,
equation 7).  A weight is truncated, min(rho, cap): E. L. Ionides, "Truncated Importance Sampling"
(2008).  A rejection takes tokens out of the loss whose rho is outside of two bounds, and whole
sequences with a token far below: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL
Collapse from the Training-Inference Mismatch".

Always true: ratios are compared and truncated as logarithms, so none overflows; no gradient flows
through a weight or a mask, because weights change where the mean is taken, not what is taken; a
gap that is NaN gives the weight 0 and is rejected; tokens with mask 0 change nothing.  Torch is not
imported: ``rollout`` has these names also where it is not installed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import SkipValidation

from rollout.core.arguments import AboveZero, checked, wrong
from rollout.driver.logprobs.gap_figures import LARGEST_EXPONENT
from rollout.driver.logprobs.ratio_bounds import TIS_CAP, Level, RatioBounds

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = SkipValidation[Any]

_FLOAT32_BYTES = 4


@checked
def importance_weights(
    gaps: Tensor, mask: Tensor, *, level: Level = "sequence", cap: AboveZero = TIS_CAP
) -> Tensor:
    """Truncated importance weights min(rho, cap), to multiply the loss of each token with.

    Args:
        gaps: the trainer's log-prob of each token less the engine's, in nats; shape ``[N, T]``.
        mask: 1 for a token of the policy, shape ``[N, T]``: the ``loss_mask`` of a padded batch.
        level: which ratio rho is, see the module.
        cap: the largest weight, over 0.

    Returns:
        Shape ``[N, T]``, 0 where the mask is 0; float32, or float64 if ``gaps`` are.

    Raises:
        ValueError: the shapes differ, or an argument is wrong.
    """
    logs, is_token = _log_ratios(gaps, mask, level)
    weights = logs.clamp(max=math.log(cap)).exp()
    return weights.where(is_token & ~logs.isnan(), 0.0)


@checked
def rejection_mask(
    gaps: Tensor,
    mask: Tensor,
    *,
    level: Level = "sequence",
    upper: AboveZero,
    lower: AboveZero | None = None,
    veto: AboveZero | None = None,
) -> Tensor:
    """The mask without the tokens that a trainer should leave out.

    Average the loss over the tokens of this mask: with those of the old one in the divisor, a
    rejection would also scale the gradient down.

    Args:
        gaps, mask, level: see ``importance_weights``.  At the levels ``sequence`` and
            ``geometric`` a sequence is left out as a whole.
        upper, lower: tokens with lower <= rho <= upper stay; ``lower`` is 1 / ``upper`` if it is
            None.
        veto: a sequence with a token whose own ratio is below is left out, at each level.

    Returns:
        Shape and dtype of ``mask``.

    Raises:
        ValueError: the shapes differ, ``lower`` is over ``upper``, or an argument is wrong.
    """
    bounds = RatioBounds(upper, lower, veto)
    logs, is_token = _log_ratios(gaps, mask, level)
    stays = (logs >= bounds.log_lower) & (logs <= bounds.log_upper)
    if bounds.log_veto is not None:
        # "not at least", because a NaN is neither above nor below.
        stays &= ((gaps.detach() >= bounds.log_veto) | ~is_token).all(-1, keepdim=True)
    return mask * stays.to(mask.dtype)


@checked
def correction_metrics(
    gaps: Tensor,
    mask: Tensor,
    *,
    weights: Tensor | None = None,
    accepted: Tensor | None = None,
    cap: AboveZero = TIS_CAP,
) -> dict[str, float]:
    """Figures of a correction under names for trackers; each is finite.

    Args:
        gaps, mask: see ``importance_weights``.
        weights: what ``importance_weights`` returned, if it is used.
        accepted: what ``rejection_mask`` returned, if it is used.
        cap: of the weights.

    Returns:
        ``correction/`` and, over the tokens with a finite gap: ``kl_k1`` and ``kl_k3``, estimates
        of KL(engine || trainer), ``chi2_token`` and ``chi2_sequence``, those of the chi-squared
        divergence (mean of rho^2, less 1).  With weights: ``weight_mean``, ``weight_std``,
        ``weight_smallest``, ``weight_largest``, ``capped_share`` and ``effective_share``, the
        effective sample size (Kish 1965), (sum of w)^2 / sum of w^2, divided by the number of
        tokens.  With a rejection: ``rejected_share`` of the tokens, ``rejected_sequences`` the
        share of the sequences that have lost a token.

    Raises:
        ValueError: the shapes differ.
    """
    token_logs, is_token = _log_ratios(gaps, mask, "token")
    is_finite = is_token & token_logs.isfinite()
    # Sums of float32 over a whole batch would lose digits.
    logs = token_logs[is_finite].double()
    of_sequences = token_logs.double().where(is_finite, 0.0).sum(-1)[is_finite.any(-1)]
    ratios = _ratios(logs)
    figures = {
        "kl_k1": -_mean(logs),
        "kl_k3": _mean(ratios - 1 - logs),
        "chi2_token": _mean(ratios.square() - 1),
        "chi2_sequence": _mean(_ratios(of_sequences).square() - 1),
    }
    if weights is not None:
        _check_shape("weights", weights, gaps)
        figures |= _weight_figures(weights.detach()[is_token].double(), cap)
    if accepted is not None:
        _check_shape("accepted", accepted, gaps)
        is_rejected = is_token & (accepted == 0)
        figures |= {
            "rejected_share": _mean(is_rejected[is_token].double()),
            "rejected_sequences": _mean(is_rejected.any(-1)[is_token.any(-1)].double()),
        }
    return {f"correction/{name}": value for name, value in figures.items()}


def _log_ratios(gaps: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """The logarithm of the ratio of each token, shape ``[N, T]``, and which are of the policy."""
    if gaps.dim() != 2:
        raise wrong("gaps.shape", list(gaps.shape), "[samples, tokens]")
    _check_shape("mask", mask, gaps)
    is_token = mask != 0
    wide = gaps.detach() if gaps.element_size() >= _FLOAT32_BYTES else gaps.detach().float()
    logs = wide.where(is_token, 0.0)
    if level == "token":
        return logs, is_token
    total = logs.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / is_token.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(logs), is_token


def _weight_figures(weights: Tensor, cap: float) -> dict[str, float]:
    mean = _mean(weights)
    squares = _mean(weights.square())
    return {
        "weight_mean": mean,
        "weight_std": math.sqrt(max(0.0, squares - mean * mean)),
        "weight_smallest": float(weights.min()) if weights.numel() else 0.0,
        "weight_largest": float(weights.max()) if weights.numel() else 0.0,
        "capped_share": _mean((weights >= cap * (1 - 1e-6)).double()),
        "effective_share": mean * mean / squares if squares else 0.0,
    }


def _ratios(logs: Tensor) -> Tensor:
    return logs.clamp(max=LARGEST_EXPONENT).exp()


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def _check_shape(name: str, tensor: Tensor, gaps: Tensor) -> None:
    if tensor.shape != gaps.shape:
        raise wrong(f"{name}.shape", list(tensor.shape), f"{list(gaps.shape)}, that of gaps")
