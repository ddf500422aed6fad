"""Sources: every row once per epoch, in the order of the seed, and exact after a restore."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.core.errors import ConfigError
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import FixedPrompts, PromptData


def rows(num: int) -> list[dict]:
    return [{"input_ids": [number], "answer": str(number)} for number in range(num)]


def take(source, num: int) -> list[int]:
    return [prompt.ids[0] for _ in range(num) if (prompt := source.take()) is not None]


def test_each_epoch_gives_every_row_once_in_a_new_order() -> None:
    source = PromptData(rows(50), seed=3)
    first, second = take(source, 50), take(source, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert first == take(PromptData(rows(50), seed=3), 50)
    assert first != take(PromptData(rows(50), seed=4), 50)


def test_without_a_seed_the_order_is_that_of_the_rows() -> None:
    assert take(PromptData(rows(3), seed=None), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_source_ends_after_its_epochs() -> None:
    source = PromptData(rows(3), num_epochs=2)
    assert len(take(source, 10)) == 6
    assert source.take() is None
    assert source.epoch == 2


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(0, 9))
def test_a_source_continues_at_the_next_prompt(num_rows, before, after, seed) -> None:
    whole = PromptData(rows(num_rows), seed=seed)
    take(whole, before)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptData(rows(num_rows), seed=seed)
    resumed.load_state_dict(state)
    assert take(resumed, after) == take(whole, after)


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptData(rows(5), seed=1).state_dict()
    with pytest.raises(ValueError, match="rows 5, not 6"):
        PromptData(rows(6), seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="seed 1, not 2"):
        PromptData(rows(5), seed=2).load_state_dict(state)


def test_a_data_set_is_named_by_its_rows_alike_in_each_process() -> None:
    math = [{"prompt": f"{n} + {n}", "answer": 2.0 * n, "tags": ("a", None)} for n in range(500)]
    name = PromptData(math).name
    assert name == PromptData([dict(row) for row in math], seed=None, num_epochs=2).name
    program = (
        "from rollout.driver.data.prompt_data import PromptData\n"
        "math = [{'prompt': f'{n} + {n}', 'answer': 2.0 * n, 'tags': ('a', None)} "
        "for n in range(500)]\nprint(PromptData(math).name)"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert other.stdout.strip() == name
    names = {name, *(PromptData(some).name for some in (math[:-1], math[1:], rows(500)))}
    assert len(names) == 4
    assert PromptData(math, name="math").name == "math"


def test_rows_of_numpy_have_a_name_and_those_of_unknown_objects_need_one() -> None:
    numpy = pytest.importorskip("numpy")
    first, second = (PromptData([{"input_ids": numpy.array([n])}]) for n in (1, 2))
    assert first.name != second.name
    source = PromptData([{"input_ids": [1], "image": object()}])
    with pytest.raises(ConfigError, match=r"row 0 has a value of type object.*PromptData\(name="):
        assert source.name
    with pytest.raises(ValueError, match=r"name = 'a/b': must be"):
        PromptData(rows(1), name="a/b")


def test_a_state_with_a_place_that_is_none_is_refused() -> None:
    source = PromptData(rows(5), seed=1)
    state = source.state_dict()
    with pytest.raises(ValueError, match=r"state\['epoch'\] = -1: must be at least 0"):
        source.load_state_dict({**state, "epoch": -1})
    with pytest.raises(TypeError, match=r"state\['place'\] = '2': must be a whole number"):
        source.load_state_dict({**state, "place": "2"})


def test_the_metadata_of_a_prompt_is_the_rest_of_its_row() -> None:
    source = PromptData([{"prompt": "2+2=", "answer": "4"}], encode=lambda text: text.encode())
    assert source.take() == Prompt(tuple(b"2+2="), {"prompt": "2+2=", "answer": "4"})


def test_messages_go_to_the_encoder_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi"}]
    source = PromptData([{"chat": messages}], encode=lambda m: [len(m)], prompt_key="chat")
    prompt = source.take()
    assert prompt is not None
    assert prompt.ids == (1,)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"text": "x"}, {}, "row 0 has no 'prompt', 'prompt_ids' or 'input_ids'; it has text"),
        ({}, {}, "it has nothing"),
        ({"prompt": "x"}, {}, "no token ids: set encode"),
        ({"input_ids": []}, {}, "the prompt of row 0 has no tokens"),
        ({"input_ids": ["x"]}, {}, "input_ids of row 0 are not token ids"),
        ({"input_ids": 5}, {}, "input_ids of row 0 are not token ids"),
        ("x", {}, "row 0 is str, not a mapping"),
        ({"input_ids": [1, 2, 3]}, {"max_prompt_tokens": 2}, "row 0 has 3 tokens, at most 2 fit"),
    ],
)
def test_an_unusable_row_is_named_and_the_source_stays_before_it(row, settings, message) -> None:
    source = PromptData([row], **settings)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            source.take()


def test_long_prompts_are_left_out_on_request_and_counted() -> None:
    mixed = [{"input_ids": [i] * (1 + i % 2 * 9)} for i in range(10)]
    source = PromptData(mixed, seed=None, max_prompt_tokens=5, skip_too_long=True)
    assert take(source, 7) == [0, 2, 4, 6, 8, 0, 2]
    assert source.num_skipped == 6


def test_prompts_that_are_all_too_long_are_an_error_and_no_endless_loop() -> None:
    source = PromptData(rows(3), max_prompt_tokens=0, skip_too_long=True)
    with pytest.raises(ConfigError, match="every prompt is longer than 0 tokens"):
        source.take()


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        PromptData([])


@pytest.mark.parametrize("format", ["json", "parquet"])
def test_files_are_read_by_datasets(format: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data, path = datasets.Dataset.from_list(rows(9)), tmp_path / f"prompts.{format}"
    getattr(data, f"to_{format}")(path)
    read = datasets.load_dataset(
        format, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )
    source = PromptData(read, seed=None)
    assert source.take() == Prompt((0,), {"answer": "0"})
    assert take(source, 8) == list(range(1, 9))


def test_a_hugging_face_data_set_is_taken_as_it_is() -> None:
    datasets = pytest.importorskip("datasets")
    source = PromptData(datasets.Dataset.from_list(rows(5)), seed=None)
    assert take(source, 5) == list(range(5))


def test_fixed_prompts_continue_where_they_were() -> None:
    source = FixedPrompts([Prompt((1,)), Prompt((2,))])
    source.take()
    other = FixedPrompts([Prompt((1,)), Prompt((2,))])
    other.load_state_dict(source.state_dict())
    assert (other.take(), other.take()) == (Prompt((2,)), None)
    with pytest.raises(ValueError, match="rows 2, not 0"):
        FixedPrompts([]).load_state_dict(source.state_dict())
