"""Log-probs from logits, and tensors as the trainer's log-probs."""

import math

import pytest

from rollout.core.samples import Sample
from rollout.driver.logprobs.comparison import compare_logprobs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROBABILITIES = [0.1, 0.4, 0.2, 0.3]


def logprobs(*token_ids: int, **settings: float) -> list[float]:
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.tensor([PROBABILITIES]).log().repeat(len(token_ids), 1) + 3.0
    found = token_logprobs(logits, torch.tensor(token_ids), **settings)
    assert found.dtype == torch.float32
    return [math.exp(value) for value in found.tolist()]


def test_a_temperature_scales_the_logits() -> None:
    assert logprobs(1, 2) == pytest.approx([0.4, 0.2])
    assert logprobs(1, temperature=0.5) == pytest.approx([0.16 / 0.3])
    assert logprobs(1, temperature=0.0) == pytest.approx([0.4])


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"top_k": 2}, [0.4, 0.3]), ({"top_p": 0.65}, [0.4, 0.3]), ({"min_p": 0.5}, [0.4, 0.3, 0.2])],
)
def test_what_is_kept_of_the_distribution_sums_to_one(settings, kept) -> None:
    found = logprobs(0, 1, 2, 3, **settings)
    assert sum(found) == pytest.approx(1)
    assert found[0] == 0.0
    assert found[1] == pytest.approx(0.4 / sum(kept))
    assert found[2] == pytest.approx(0.2 / sum(kept) if 0.2 in kept else 0.0)


def test_a_mask_is_what_the_log_probs_are_scaled_to() -> None:
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(3), requires_grad=True)
    tokens = logits.argmax(-1)
    masks = [[int(token), 1 if token != 1 else 2] for token in tokens.flatten()]
    masks[1], masks[2], masks[3] = None, [*range(30)], [int(tokens[1, 0])]
    found = token_logprobs(logits, tokens, temperature=0.7, sampling_mask=masks)
    rows = (logits / 0.7).detach().flatten(0, 1)
    for row, token, mask, value in zip(
        rows, tokens.flatten(), masks, found.detach().flatten(), strict=True
    ):
        kept = row if mask is None else row[mask]
        assert float(value) == pytest.approx(float(row[token] - kept.logsumexp(-1)), abs=1e-5)
    assert float(found.detach()[1, 0]) == pytest.approx(0.0, abs=1e-6)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    # What is outside of a mask has no part in the log-prob.
    assert int((logits.grad[0, 0].abs() > 1e-6).sum()) == 2


def test_a_mask_is_what_a_cut_leaves() -> None:
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.tensor([PROBABILITIES]).log()
    tokens = torch.tensor([1])
    cut = token_logprobs(logits, tokens, top_k=2)
    assert torch.equal(token_logprobs(logits, tokens, sampling_mask=[[1, 3]]), cut)
    assert token_logprobs(logits, tokens, sampling_mask=[[0, 3]]).tolist() == [-math.inf]


@pytest.mark.parametrize(
    ("masks", "settings", "why"),
    [
        ([[1]], {"top_p": 0.9}, "beside top_k, top_p or min_p"),
        ([[1], [1]], {}, "1, one a token"),
        ([[1, 4]], {}, "4: must be ids from 0 to 3"),
        ([[1, -1]], {}, "-1: must be ids from 0 to 3"),
    ],
)
def test_masks_that_cannot_be_those_of_the_tokens_are_refused(masks, settings, why) -> None:
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.tensor([PROBABILITIES]).log()
    with pytest.raises(ValueError, match=why):
        token_logprobs(logits, torch.tensor([1]), sampling_mask=masks, **settings)


def test_cuts_are_transformers_where_each_renormalises() -> None:
    transformers = pytest.importorskip("transformers")
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(3)) * 2
    tokens = logits.argmax(-1)
    cuts = {"min_p": 0.05, "top_k": 6, "top_p": 0.6}
    rows, of = logits / 0.8, transformers.generation.logits_process
    for name, warper in (("min_p", "MinP"), ("top_k", "TopK"), ("top_p", "TopP")):
        rows = getattr(of, f"{warper}LogitsWarper")(cuts[name])(None, rows)
    expected = rows.log_softmax(-1)[range(40), tokens].tolist()
    found = token_logprobs(logits, tokens, temperature=0.8, renormalises=True, **cuts)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    other = token_logprobs(logits, tokens, temperature=0.8, **cuts)  # SGLang's
    assert (other - found).abs().max() > 0.1


@pytest.mark.embedded
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_it_is_what_the_embedded_engine_reports(temperature: float) -> None:
    pytest.importorskip("transformers")
    from engines.embedded.generation.generation import Generation
    from engines.embedded.generation.sampler import sample
    from engines.embedded.generation.sampling_params import Params
    from rollout.driver.logprobs.token_logprobs import token_logprobs

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    params = Params(temperature=temperature, top_p=0.8)
    drawn, reported = sample(
        logits.clone(), [Generation("r", [1], params, seed=4, return_logprob=True)]
    )
    assert reported is not None
    mine = token_logprobs(logits, drawn, temperature=temperature)
    assert mine.tolist() == pytest.approx(reported.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainers_log_probs_may_be_tensors_with_a_gradient(dtype: str) -> None:
    samples = [Sample([1], [5, 6], [-1.0, -2.0]), Sample([1], [7], [-0.5])]
    values = torch.tensor([-1.0, -2.0, -0.5], dtype=getattr(torch, dtype), requires_grad=True)
    assert compare_logprobs(samples, values.split([2, 1])).overall.largest == 0.0
    square = torch.tensor([[-1.0], [-0.5]])
    cut = [Sample([1], [5], [-1.0]), Sample([1], [7], [-0.5])]
    assert compare_logprobs(cut, square).overall.largest == 0.0
