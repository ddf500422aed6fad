"""Drawing tokens from logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engines.embedded.generation.generation import Generation
from engines.embedded.generation.sampling_params import Params

pytestmark = pytest.mark.embedded
PROBABILITIES = [0.1, 0.4, 0.2, 0.3]


def generation(
    seed: int = 0, *, early_ids: frozenset[int] = frozenset(), **params: float
) -> Generation:
    drawn: Any = params
    return Generation(
        "r", [1], Params(**drawn), early_ids=early_ids, seed=seed, return_logprob=True
    )


def draw(*generations: Generation, times: int = 1) -> tuple[list[list[int]], list[list[float]]]:
    import torch
    from engines.embedded.generation.sampler import sample

    tokens, logprobs = [], []
    for _ in range(times):
        logits = torch.tensor([PROBABILITIES]).log().repeat(len(generations), 1)
        drawn, values = sample(logits, generations)
        assert values is not None
        tokens.append(drawn.tolist())
        logprobs.append(values.tolist())
    return tokens, logprobs


def shares(one: Generation, times: int = 4000) -> list[float]:
    tokens = []
    for _ in range(times):
        tokens.append(draw(one)[0][0][0])
        one.output_ids.append(0)  # a seed draws by the place of the token
    return [tokens.count(token) / times for token in range(4)]


def test_tokens_come_as_often_as_they_should() -> None:
    assert shares(generation()) == pytest.approx(PROBABILITIES, abs=0.03)


def test_temperature_sharpens() -> None:
    weights = [p**2 for p in PROBABILITIES]
    expected = [weight / sum(weights) for weight in weights]
    assert shares(generation(temperature=0.5)) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_likeliest() -> None:
    assert shares(generation(top_k=2)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert shares(generation(top_p=0.65)) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.03)


def test_requests_of_all_kinds_share_a_batch() -> None:
    greedy = generation(temperature=0.0)
    tokens, logprobs = draw(greedy, generation(1), generation(1), generation(2, top_k=1))
    assert tokens[0][0] == tokens[0][3] == 1
    assert tokens[0][1] == tokens[0][2]
    assert logprobs[0][0] == pytest.approx(math.log(0.4))


def test_logprobs_are_of_the_whole_distribution_at_the_temperature() -> None:
    _, logprobs = draw(generation(top_p=0.1, temperature=0.5), generation(top_k=1, temperature=0.5))
    assert logprobs[0] == pytest.approx([math.log(0.16 / 0.3), math.log(0.4)])


def test_logprobs_are_without_the_temperature_if_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engines.embedded.generation import sampler

    monkeypatch.setattr(sampler, "RETURNS_ORIGINAL", True)
    tokens, logprobs = draw(generation(top_k=1, temperature=0.5), generation(temperature=0.0))
    assert tokens == [[1, 1]]
    assert logprobs[0] == pytest.approx([math.log(0.4)] * 2)


def test_a_stop_token_is_not_drawn_before_the_minimum() -> None:
    early = generation(early_ids=frozenset({1}), min_new_tokens=3, temperature=0.0)
    drawn = []
    for _ in range(4):
        ((token,),), _ = draw(early)
        drawn.append(token)
        early.output_ids.append(token)
    assert drawn == [3, 3, 3, 1]


def test_only_generations_whose_logits_are_no_numbers_are_refused() -> None:
    import torch
    from engines.embedded.generation.sampler import sample

    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    made = [generation() for _ in range(3)]
    tokens, _ = sample(logits, made)
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert [one.refusal is not None for one in made] == [False, True, False]
    assert made[1].refusal is not None
    assert made[1].refusal.body()["error"] == {
        "message": "the model's logits are not numbers: its weights are lost or damaged",
        "type": "not_finite",
        "code": 500,
    }


def naive_mask(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """The ids that are left, one after the other."""
    weights = [math.exp(value / temperature) for value in logits]
    total, mass, kept = sum(weights), 0.0, set[int]()
    for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
        if mass >= top_p or (top_k > 0 and len(kept) == top_k):
            break
        kept.add(token)
        mass += weights[token] / total
    return kept


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.7), (5, 0.7), (40, 0.3)])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_mask_has_the_ids_that_a_naive_cut_leaves(
    top_k: int, top_p: float, temperature: float
) -> None:
    import torch
    from engines.embedded.generation.sampler import sample

    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(5))
    rows = [generation(row, temperature=temperature, top_k=top_k, top_p=top_p) for row in range(8)]
    for one in rows[1:]:
        one.wants_masks = True
    drawn, _ = sample(logits.clone(), rows)
    assert rows[0].masks == []
    for one, values, token in zip(rows[1:], logits[1:].tolist(), drawn[1:].tolist(), strict=True):
        (mask,) = one.masks
        assert mask is not None
        assert len(mask) == len(set(mask))
        assert set(mask) == naive_mask(values, temperature, top_k, top_p)
        assert token in mask


def test_a_mask_is_the_token_of_a_greedy_request_and_none_where_nothing_is_cut() -> None:
    requests = [generation(temperature=0.0), generation(top_k=1), generation(), generation(top_k=2)]
    for one in requests:
        one.wants_masks = True
    draw(*requests, times=2)
    assert [one.masks for one in requests] == [[[1]] * 2, [[1]] * 2, [None] * 2, [[1, 3]] * 2]


def test_a_mask_has_no_token_that_is_forbidden() -> None:
    one = generation(top_k=3, min_new_tokens=1, early_ids=frozenset({1}))
    one.wants_masks = True
    draw(one)
    assert one.masks == [[3, 2, 0]]
    few = generation(top_k=4, min_new_tokens=1, early_ids=frozenset({1}))
    few.wants_masks = True
    draw(few)
    assert few.masks == [[3, 2, 0]]
