"""An agent that learns to call tools: the openai client, unchanged, and its tokens as samples.

A question is for a price or a stock of a shop.  The agent calls one of two tools for one of six
items, gets a number, and answers with it.  Each step is

    policy.session() -> openai client -> tool -> openai client -> session.samples()
        -> policy gradient -> policy.push()

    python examples/agent_tools.py     # about two minutes on two cores, no GPU

``shop.py`` makes the tiny model.  Its warm-up teaches how a call looks, and to call mostly the
wrong thing: about one answer in nine is right.  What to call is learned from the rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import rollout
import torch
from rollout.driver import padded, to_torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from shop import TASKS, TOOLS, Shop, make_warmed_up_model, question, token_logprobs

Group = rollout.SampleGroup
MAX_TURNS = 3


async def episode(
    policy: rollout.ServerHandle, client: openai.AsyncOpenAI, task: tuple[str, str], seed: int
) -> rollout.Sample:
    """One conversation, as any agent has it, and then its tokens with a reward."""
    shop = Shop(random.Random(seed))
    async with policy.session() as session:
        # The client's connections, in this session.
        agent = client.with_options(base_url=session.base_url, api_key=session.api_key)
        messages: list[Any] = [question(*task)]
        for turn in range(MAX_TURNS):
            reply = await agent.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, max_tokens=40, seed=seed + turn
            )
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                result = shop.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        (sample,) = await session.samples()  # the history only grew, so there is one branch
        sample.reward = shop.reward(task, message.content or "")
        return sample


async def play(policy: rollout.ServerHandle, rng: random.Random, size: int) -> list[Group]:
    """``size`` episodes of each task, all at once, each in a shop of its own."""
    # Without retries of the client: a turn that is repeated would be a branch, so two samples.
    async with openai.AsyncOpenAI(
        base_url=policy.url, api_key="none", max_retries=0, timeout=120.0
    ) as client:
        tasks = [task for task in TASKS for _ in range(size)]
        seeds = [rng.randrange(1 << 30) for _ in tasks]
        samples = await asyncio.gather(
            *(episode(policy, client, *each) for each in zip(tasks, seeds, strict=True))
        )
    return [Group(at, samples[at * size : (at + 1) * size]) for at in range(len(TASKS))]


def accuracy(groups: list[Group]) -> float:
    """The share of episodes with the right call and the right answer."""
    rewards = [reward for group in groups for reward in group.rewards]
    return rewards.count(1.0) / len(rewards)


def policy_gradient(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[Group]
) -> float:
    """One step on the tokens that the policy generated; those of tools and template have mask 0.

    Returns:
        The mean gap between log-probs of engine and trainer.  It is rounding: these are the tokens
        that the engine generated, under the weights that it had.
    """
    batch = to_torch(padded(groups))
    rewards = batch["rewards"].view(len(groups), -1)
    scale = rewards.std(1, keepdim=True) + 1e-3
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / scale).flatten()
    mask, behaviour = batch["loss_mask"][:, 1:], batch["behaviour_logprobs"][:, 1:]
    logprobs = token_logprobs(model, batch["token_ids"])
    optimizer.zero_grad()
    (-(logprobs * mask).sum(1) * advantages).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(((logprobs.detach() - behaviour) * mask).abs().sum() / mask.sum())


def config(folder: Path) -> rollout.RolloutConfig:
    options = {"dtype": "float32", "max-total-tokens": 65536, "log-level": "warning"}
    groups = {"main": {"engine": {"kind": "embedded", "options": options}}}
    server = {"model_path": str(folder / "model"), "groups": groups}
    return rollout.RolloutConfig.from_dict(
        {"log_dir": str(folder / "logs"), "servers": {"policy": server}}
    )


def options(program: str, out: str) -> argparse.Namespace:
    """The command line of a program whose documentation is ``program``."""
    parser = argparse.ArgumentParser(description=program.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25, help="training steps")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of each question")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser.parse_args()


def train(
    args: argparse.Namespace,
    episodes: Callable[[rollout.ServerHandle, int], list[Group]],
    tools: Any = TOOLS,
) -> None:
    """Warm a model up, and train it on episodes.

    Args:
        episodes: plays those of a step.
        tools: as the agent sends them.
    """
    folder = args.out.absolute()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    started = time.monotonic()
    make_warmed_up_model(folder / "model", args.seed, tools)
    print(f"the warm-up took {time.monotonic() - started:.0f} s", flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    with rollout.launch(config(folder)) as deployment:
        policy = deployment["policy"]
        groups = episodes(policy, 0)
        before = now = accuracy(groups)
        print(f"step  0  accuracy {before:6.1%}", flush=True)
        for step in range(1, args.steps + 1):
            gap = policy_gradient(model, optimizer, groups)
            policy.push(model.state_dict(), version=step).result()
            groups = episodes(policy, step)
            now, seconds = accuracy(groups), time.monotonic() - started
            figures = f"accuracy {now:6.1%}  log-prob gap {gap:.0e}  {seconds:3.0f} s"
            print(f"step {step:2}  {figures}", flush=True)
    print(f"accuracy {before:.1%} -> {now:.1%}")


def main() -> None:
    args = options(__doc__, "runs/agent_tools")
    rng = random.Random(args.seed)
    train(args, lambda policy, step: asyncio.run(play(policy, rng, args.group_size)))


if __name__ == "__main__":
    main()
