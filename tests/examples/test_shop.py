"""The task of the example ``agent_tools.py``: what is trained, and what is rewarded."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from shop import TASKS, TOOLS, Shop, demonstration, make_tokenizer, tokens_of

pytestmark = pytest.mark.embedded
TASK = ("price", "figs")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    rng = random.Random(0)
    return make_tokenizer([json.dumps(demonstration(rng, 1.0)) for _ in range(200)])


def test_the_trained_tokens_of_a_demonstration_are_what_a_policy_generates(tokenizer: Any) -> None:
    """Ids, whole and in pieces, are those of the template; the answers end with their end."""
    messages = demonstration(random.Random(1), 1.0)
    ids, mask = tokens_of(tokenizer, messages)
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert ids == tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False)
    trained = tokenizer.decode([one for one, is_answer in zip(ids, mask, strict=True) if is_answer])
    call, answer, rest = trained.split("<|im_end|>")
    function = messages[1]["tool_calls"][0]["function"]
    assert json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")) == function
    assert (answer, rest) == (messages[3]["content"], "")


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_the_right_share_of_the_calls_is_right(share: float) -> None:
    rng, right = random.Random(2), 0
    for _ in range(2000):
        asked, called, *_ = demonstration(rng, share)
        function = called["tool_calls"][0]["function"]
        task = (function["name"], function["arguments"]["item"])
        right += asked["content"] == "What is the {} of {}?".format(*task)
    assert right / 2000 == pytest.approx(share + (1 - share) / len(TASKS), abs=0.03)


@pytest.mark.parametrize(
    ("calls", "answer", "reward"),
    [
        ([TASK], "It is {}.", 1.0),
        ([TASK], "It is 1{}.", 0.5),
        ([TASK], "", 0.5),
        ([("price", "nuts")], "It is {}.", 0.25),
        ([("stock", "figs")], "It is {}.", 0.25),
        ([("stock", "nuts")], "It is {}.", 0.0),
        ([TASK, TASK], "It is {}.", 0.0),
        ([], "It is {}.", 0.0),
    ],
)
def test_the_reward_is_for_the_one_right_call_and_the_right_answer(
    calls: list[tuple[str, str]], answer: str, reward: float
) -> None:
    shop = Shop(random.Random(3))
    for tool, item in calls:
        shop.call(tool, json.dumps({"item": item}))
    assert shop.reward(TASK, answer.format(shop.facts[TASK])) == reward


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"item": []}', '{"item": "pens"}', "null"])
def test_a_call_that_makes_no_sense_gets_an_error_as_its_result(arguments: str) -> None:
    assert Shop(random.Random(4)).call("price", arguments).startswith("error: ")
