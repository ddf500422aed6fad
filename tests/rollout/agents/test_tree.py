"""Trees of turns over random conversations, without a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason, VersionSpan
from rollout.agents.turns.tree import Generated, Prompt, TurnTree
from rollout.agents.wire.messages import history_of, read_messages
from rollout.driver.client.branch_samples import branch_samples

STOP = FinishReason("stop", 0)


@dataclass
class Agent:
    """A client that begins, continues and edits; every message is one token, and every answer two.

    Each answer has token ids of its own, so equal ids mean the same turn.
    """

    tree: TurnTree = field(default_factory=TurnTree)
    histories: list[list[dict[str, Any]]] = field(default_factory=list)
    whole_ids: list[list[int]] = field(default_factory=list)
    next_id: int = 1000

    def ask(self, messages: list[dict[str, Any]], *, strip: bool) -> int | None:
        """The number of the turn that the new one continues."""
        messages = read_messages(messages)
        if strip:
            messages = [
                {**one, "content": one["content"].rpartition("</think>")[2].strip()}
                for one in messages
            ]
        history = history_of(messages, None)
        match = self.tree.match(history)
        new = [len(one["content"]) for one in messages[match.num_known :]]
        parent = None if match.turn is None else match.turn.number
        ids = [self.next_id, self.next_id + 1]
        self.next_id += 2
        answer = {"role": "assistant", "content": f"<think>t</think> answer {len(self.histories)}"}
        made = Generated(ids, [-0.5, -1.0], (VersionSpan("1", 0, 2),), STOP, answer["content"])
        self.whole_ids.append(self.tree.ids(match.turn).tolist() + new + ids)
        self.tree.add(self.tree.made(history, Prompt(parent, new), made, answer))
        self.histories.append([*messages, answer])
        return parent


def user(word: str) -> dict[str, Any]:
    return {"role": "user", "content": word}


MOVES = st.lists(
    st.tuples(st.integers(-1, 30), st.sampled_from(["a", "bb", "ccc"]), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(MOVES)
def test_a_turn_continues_the_answer_its_history_ends_with(moves: list[Any]) -> None:
    agent = Agent()
    for place, word, strip in moves:
        num = len(agent.histories)
        if place < 0 or not num:
            assert agent.ask([user(word)], strip=strip) is None
        else:
            history = agent.histories[place % num]
            assert agent.ask([*history, user(word)], strip=strip) == place % num
    for turn, ids in zip(agent.tree.turns, agent.whole_ids, strict=True):
        assert agent.tree.ids(turn).tolist() == ids
    check_samples(agent)


def check_samples(agent: Agent) -> None:
    """Every generated token is trained on once, with its log-prob, in a path of exact ids."""
    samples = branch_samples("s", [json.loads(b"".join(turn.json())) for turn in agent.tree.turns])
    trained = [
        (token, logprob)
        for sample in samples
        for token, logprob, mask in zip(
            sample.output_ids, sample.output_logprobs, sample.mask, strict=True
        )
        if mask
    ]
    generated = [
        pair
        for turn in agent.tree.turns
        for pair in zip(turn.generated.ids, turn.generated.logprobs, strict=True)
    ]
    assert sorted(trained) == sorted(generated)
    for sample in samples:
        leaf = sample.metadata["turns"][-1]
        assert sample.prompt_ids + sample.output_ids == agent.whole_ids[leaf]


def test_a_changed_answer_is_a_fork_behind_the_last_known_one() -> None:
    agent = Agent()
    agent.ask([user("a")], strip=False)
    first = agent.histories[0]
    agent.ask([*first, user("b")], strip=False)
    changed = [*first, user("b"), {"role": "assistant", "content": "no"}, user("c")]
    match = agent.tree.match(history_of(changed, None))
    assert match.turn is agent.tree.turns[0]
    assert (match.num_known, match.is_fork) == (2, True)
    other = agent.tree.match(history_of([*first, user("z")], None))
    assert (other.turn, other.is_fork) == (agent.tree.turns[0], False)


def test_other_tools_begin_anew() -> None:
    agent = Agent()
    agent.ask([user("a")], strip=False)
    messages = [*agent.histories[0], user("b")]
    assert agent.tree.match(history_of(messages, [{"type": "function"}])).turn is None


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_answers_that_differ_in_their_thinking_alone_are_told_apart_by_it(field: str) -> None:
    """Whether it is in the content or in a field of its own."""
    tree = TurnTree()
    history = history_of([user("a")], None)
    thoughts = [f"<think>{one}</think>x" if field == "content" else one for one in "ab"]
    answers = [{"role": "assistant", "content": "x"} | {field: thought} for thought in thoughts]
    answers = read_messages(answers)
    for answer in answers:
        made = Generated([2], [0.0], (), STOP, "")
        tree.add(tree.made(history, Prompt(None, [1]), made, answer))
    for number, answer in enumerate(answers):
        match = tree.match(history_of([user("a"), answer, user("b")], None))
        assert match.turn is tree.turns[number]
    bare = {"role": "assistant", "content": "x"}
    assert tree.match(history_of([user("a"), bare, user("b")], None)).turn is tree.turns[1]


def test_arguments_of_a_call_are_compared_as_values() -> None:
    def calling(arguments: Any) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    tree = TurnTree()
    asked = [user("a")]
    made = Generated([2], [0.0], (), STOP, "")
    history = history_of(asked, None)
    tree.add(tree.made(history, Prompt(None, [1]), made, calling('{"x":1}')))
    result = {"role": "tool", "tool_call_id": "c", "content": "4"}
    messages = read_messages([*asked, calling('{ "x": 1 }'), result])
    assert tree.match(history_of(messages, None)).turn is tree.turns[0]


def test_a_turn_without_a_logprob_for_each_token_is_not_kept() -> None:
    tree = TurnTree()
    made = Generated([2, 3], [0.0], (), STOP, "")
    with pytest.raises(ValueError, match="1 log-probs for 2 tokens"):
        tree.made(history_of([user("a")], None), Prompt(None, [1]), made, {"role": "assistant"})
    assert tree.turns == []


def test_a_turn_keeps_the_experts_that_its_parent_does_not_have() -> None:
    tree = TurnTree()
    answer = {"role": "assistant", "content": "x"}
    history = history_of([user("a")], None)
    for parent, reported, num in ((None, b"1122", 2), (0, b"aabb334455", 5)):
        prompt = Prompt(parent, [1] * 2)
        made = Generated([2], [0.0], (), STOP, "", tree.new_experts(prompt, reported, num))
        tree.add(tree.made(history, prompt, made, answer))
    (sample,) = branch_samples("s", [json.loads(b"".join(turn.json())) for turn in tree.turns])
    assert sample.routed_experts == b"1122334455"
    with pytest.raises(ValueError, match="not those of 4 tokens"):
        tree.new_experts(Prompt(0, [1]), b"aabb33", 4)
    prompt = Prompt(1, [1])
    assert tree.new_experts(prompt, None, 9) is None
    tree.add(tree.made(history, prompt, Generated([2], [0.0], (), STOP, ""), answer))
    assert tree.new_experts(Prompt(2, [1]), b"1" * 22, 11) is None
    (sample,) = branch_samples("s", [json.loads(b"".join(turn.json())) for turn in tree.turns])
    assert sample.routed_experts is None


def test_a_turn_follows_the_one_before_it_and_continues_one_that_is_there() -> None:
    tree = TurnTree()
    history, answer = history_of([user("a")], None), {"role": "assistant", "content": "x"}
    made = Generated([2], [0.0], (), STOP, "")
    turn = tree.made(history, Prompt(None, [1]), made, answer)
    tree.add(turn)
    with pytest.raises(ValueError, match="turn 0 follows 1 turns"):
        tree.add(turn)
    with pytest.raises(ValueError, match="turn 1 continues turn 1"):
        tree.add(tree.made(history, Prompt(1, [1]), made, answer))
    assert tree.turns == [turn]
