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
