"""An environment of ``verifiers``, unchanged, whose episodes become samples with exact token ids.

``verifiers`` (PyPI, by Prime Intellect) has environments with tools and rubrics.  They call an
OpenAI client, so each episode gets the client of a session, and its tokens come from there, not
from a tokenizer that reads its texts once more.  Each step is

    policy.session() -> env.rollout(...) -> env.rubric.score_group(...) -> session.samples()
        -> policy gradient -> policy.push()

    pip install 'verifiers>=0.1.10,<0.1.11'
    python examples/verifiers_grpo.py     # about two minutes on two cores, no GPU

The environment is the shop of ``agent_tools.py``: two tools, six items, and a policy whose warm-up
leaves most calls wrong.  For an environment of the Hub, use ``verifiers.load_environment(...)``.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import AsyncExitStack
from typing import Any

import openai
import rollout
import verifiers as vf
from datasets import Dataset

from agent_tools import Group, options, train
from shop import TASKS, question

NUM_SHOPS = 64
MAX_TURNS = 3


# -- the environment: verifiers alone -------------------------------------------------------------


def price(item: str, facts: dict[str, Any]) -> str:
    return str(facts["price"][item])


def stock(item: str, facts: dict[str, Any]) -> str:
    return str(facts["stock"][item])


class ShopEnv(vf.StatefulToolEnv):
    """The tools know the numbers of their episode, which the policy does not see."""

    def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: Any, **_: Any
    ) -> dict[str, Any]:
        return {**tool_args, "facts": state["info"]["facts"]}


def calls(completion: Any) -> list[tuple[str, str]]:
    """Tool and item of each call; an item that is none is empty."""
    functions = [
        call["function"] for message in completion for call in message.get("tool_calls") or []
    ]
    return [
        (function["name"], str(json.loads(function["arguments"]).get("item", "")))
        for function in functions
    ]


async def right_tool(completion: Any, info: Any) -> float:
    return float([tool for tool, _ in calls(completion)] == info["task"][:1])


async def right_item(completion: Any, info: Any) -> float:
    return float([item for _, item in calls(completion)] == info["task"][1:])


async def right_answer(completion: Any, info: Any, answer: str) -> float:
    is_right = calls(completion) == [tuple(info["task"])]
    return float(is_right and re.findall(r"\d+", completion[-1]["content"] or "") == [answer])


def load_environment(seed: int) -> ShopEnv:
    """As an environment of the Hub: its data, tools and rubric."""
    rng, rows = random.Random(seed), []
    for _ in range(NUM_SHOPS):
        facts: dict[str, dict[str, int]] = {}
        for fact, item in TASKS:
            facts.setdefault(fact, {})[item] = rng.randrange(10, 100)
        rows += [
            {
                "prompt": [question(fact, item)],
                "answer": str(facts[fact][item]),
                "info": json.dumps({"task": [fact, item], "facts": facts}),
            }
            for fact, item in TASKS
        ]
    rubric = vf.Rubric([right_tool, right_item, right_answer], weights=[0.25, 0.25, 0.5])
    env = ShopEnv(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=MAX_TURNS)
    for tool in (price, stock):
        env.add_tool(tool, args_to_skip=["facts"])
    return env


# -- its episodes as samples ----------------------------------------------------------------------


async def play_group(
    policy: rollout.ServerHandle,
    env: vf.MultiTurnEnv,
    client: openai.AsyncOpenAI,
    row: dict[str, Any],
    seeds: list[int],
) -> Group:
    """Episodes of one row of the environment's data, each in a session of its own."""
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(policy.session()) for _ in seeds]
        states = await asyncio.gather(
            *(
                env.rollout(
                    row,
                    client.with_options(base_url=session.base_url, api_key=session.api_key),
                    "policy",
                    {"max_tokens": 40, "seed": seed},
                )
                for session, seed in zip(sessions, seeds, strict=True)
            )
        )
        # As env.run_group does, which has one client for all.
        await env.rubric.score_group(states)
        samples = []
        for session, state in zip(sessions, states, strict=True):
            if state["error"] is not None:
                raise state["error"]
            for sample in await session.samples():  # one for each branch of the conversation
                sample.reward = state["reward"]
                samples.append(sample)
    return Group(row["example_id"], samples, {"metrics": [state["metrics"] for state in states]})


async def play(
    policy: rollout.ServerHandle,
    env: vf.MultiTurnEnv,
    rows: list[Any],
    rng: random.Random,
    size: int,
) -> list[Group]:
    """``size`` episodes of each row, all at once."""
    async with openai.AsyncOpenAI(
        base_url=policy.url, api_key="none", max_retries=0, timeout=120.0
    ) as client:
        seeds = [[rng.randrange(1 << 30) for _ in range(size)] for _ in rows]
        groups = (
            play_group(policy, env, client, row, of_row)
            for row, of_row in zip(rows, seeds, strict=True)
        )
        return list(await asyncio.gather(*groups))


def main() -> None:
    args = options(__doc__, "runs/verifiers_grpo")
    env, rng = load_environment(args.seed), random.Random(args.seed)
    data = list(env.get_dataset())

    def episodes(policy: rollout.ServerHandle, step: int) -> list[Group]:
        shop = step % NUM_SHOPS * len(TASKS)
        rows = data[shop : shop + len(TASKS)]
        return asyncio.run(play(policy, env, rows, rng, args.group_size))

    train(args, episodes, env.oai_tools)


if __name__ == "__main__":
    main()
