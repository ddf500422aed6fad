"""Several turns with a tool: a sum, a checker, and a second try.

The policy answers a sum; a tool checks the answer, and where it is wrong the sum is asked again in
the same conversation.  A turn sends the ids of the earlier ones as they were drawn; what the tool
says is masked, so the trainer learns from the policy's own tokens only.

    python examples/multi_turn.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import rollout
import torch
from rollout.driver.batch import packed
from rollout.driver.hooks import Hooks
from rollout.driver.session import Session

from arithmetic import (
    MAX_NEW_TOKENS,
    make_splits,
    make_warm_started_model,
    prompts,
    reward,
)

TRIES = 2
TURN = rollout.SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
WHOLE = rollout.SamplingParams(max_new_tokens=TRIES * MAX_NEW_TOKENS, temperature=1.0)


async def answer_until_right(session: Session) -> None:
    """The environment: one function, called for each sample."""
    answer = session.sample.metadata["answer"]
    for attempt in range(1, TRIES + 1):
        said = await session.generate(TURN)
        session.sample.metadata["right_at"] = attempt if reward("", said, answer) else 0
        if session.sample.metadata["right_at"]:
            return
        if attempt < TRIES:
            session.observe(session.sample.prompt_ids)  # the tool: wrong, once more


def judge(sample: rollout.Sample) -> float:
    """All of it for the first try, half for the second."""
    right_at = sample.metadata["right_at"]
    return 1.0 / right_at if right_at else 0.0


def config(folder: Path, model_path: Path) -> rollout.RolloutConfig:
    engine = {"options": {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"}}
    server = {"model_path": str(model_path), "groups": {"main": {"engine": engine}}}
    return rollout.RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--model", type=Path, help="start from this directory, make none")
    parser.add_argument("--out", type=Path, default=Path("runs/multi_turn"))
    args = parser.parse_args(arguments)
    args.out = args.out.absolute()
    torch.set_num_threads(1)
    model_path = args.model or args.out / "model"
    if args.model is None:
        make_warm_started_model(model_path, seed=1)
    asked = prompts(make_splits(1).train[: args.prompts])
    hooks = Hooks(generate=answer_until_right, reward=judge)
    with (
        rollout.launch(config(args.out / "logs", model_path), backend=args.backend) as deployment,
        rollout.Driver(deployment["policy"].url, hooks=hooks) as driver,
    ):
        groups = driver.rollout(0, asked, group_size=args.group_size, sampling=WHOLE).result()
    samples = [sample for group in groups for sample in group.samples]
    for attempt in (1, 2, 0):
        share = sum(s.metadata["right_at"] == attempt for s in samples) / len(samples)
        print(f"{f'right at try {attempt}' if attempt else 'never right'}: {share:.1%}")
    batch = packed(groups)
    own, told = int(batch["loss_mask"].sum()), int(batch["response_lengths"].sum())
    print(f"{told} tokens of response, {own} of them the policy's own")


if __name__ == "__main__":
    main()
