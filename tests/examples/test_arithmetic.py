import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from arithmetic import (
    EOS_ID,
    MAX_NEW_TOKENS,
    PROMPT_LENGTH,
    Problem,
    encode,
    make_splits,
    make_warm_started_model,
    reward,
)

pytestmark = pytest.mark.embedded


def test_no_pair_of_numbers_is_in_two_splits_in_either_order() -> None:
    splits = make_splits(seed=0)
    warm_start, train, held_out = (
        {frozenset((p.left, p.right)) for p in problems}
        for problems in (splits.warm_start, splits.train, splits.held_out)
    )
    assert not warm_start & train
    assert not warm_start & held_out
    assert not train & held_out
    assert len(warm_start) + len(train) + len(held_out) == 90 * 91 // 2


def test_the_same_seed_makes_the_same_splits() -> None:
    assert make_splits(seed=3) == make_splits(seed=3)
    assert make_splits(seed=3) != make_splits(seed=4)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("82", 1.0),
        ("72", 0.0),
        ("28", 0.0),
        ("082", 0.0),
        ("82=", 0.0),
        ("", 0.0),
        ([*encode("82"), EOS_ID], 1.0),
        ((*encode("82"), EOS_ID), 1.0),
        (encode("82"), 0.0),
        ([*encode("82"), EOS_ID, EOS_ID], 0.0),
        ([], 0.0),
    ],
)
def test_only_the_right_answer_is_rewarded(completion: str | list[int], expected: float) -> None:
    assert reward("37+45=", completion, "82") == expected


@pytest.mark.parametrize(
    ("left", "right", "careless"), [(12, 34, "46"), (37, 45, "72"), (80, 90, "70"), (67, 45, "02")]
)
def test_a_careless_teacher_adds_column_by_column(left: int, right: int, careless: str) -> None:
    problem = Problem(left, right)
    assert problem.careless_answer(1.0, random.Random(0)) == careless
    assert problem.careless_answer(0.0, random.Random(0)) == problem.answer == str(left + right)


def test_every_problem_fits_the_stated_lengths() -> None:
    splits = make_splits(seed=0)
    for problem in (*splits.warm_start, *splits.train, *splits.held_out):
        assert len(problem.prompt_ids) == PROMPT_LENGTH
        assert len(encode(problem.answer)) + 1 <= MAX_NEW_TOKENS


def test_the_saved_directory_holds_a_float32_model_and_the_tokenizer_of_the_task(
    tmp_path: Path,
) -> None:
    make_warm_started_model(tmp_path, seed=0, num_steps=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS_ID
    assert tokenizer("37+45=")["input_ids"] == encode("37+45=")
    assert tokenizer.decode([*encode("82"), EOS_ID], skip_special_tokens=True) == "82"


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        make_warm_started_model(tmp_path / name, seed, num_steps=2, batch_size=8)
    first, again, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("first", "again", "other")
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
