"""Several turns with a tool: a sum, a checker, and a second try.

The policy answers a sum and a tool checks the answer.  If it is wrong, the sum comes once more in
the same conversation.  Each turn sends the token ids of the earlier turns unchanged.  Tokens from
the tool are masked, so the trainer learns only from tokens of the policy.

    python examples/multi_turn.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import rollout
import torch
from rollout.driver import Hooks, Session, packed

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
    """The environment: called once per sample."""
    answer = session.sample.metadata["answer"]
    for attempt in range(1, TRIES + 1):
        completion = await session.generate(TURN)
        is_right = reward("", completion, answer) == 1.0
        session.sample.metadata["right_at"] = attempt if is_right else 0
        if is_right:
            return
        if attempt < TRIES:
            session.observe(session.sample.prompt_ids)  # the tool repeats the question


def judge(sample: rollout.Sample) -> float:
    """1.0 if the first try is right, 0.5 if the second is."""
    right_at = sample.metadata["right_at"]
    return 1.0 / right_at if right_at else 0.0


def config(folder: Path, model_path: Path) -> rollout.RolloutConfig:
    engine = {
        "kind": "embedded",
        "options": {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"},
    }
    server = {"model_path": str(model_path), "groups": {"main": {"engine": engine}}}
    return rollout.RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=64, help="prompts of the rollout")
    parser.add_argument("--group-size", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--model", type=Path, help="start from this model directory")
    parser.add_argument("--out", type=Path, default=Path("runs/multi_turn"))
    args = parser.parse_args(arguments)
    args.out = args.out.absolute()
    torch.set_num_threads(1)
    model_path = args.model or args.out / "model"
    if args.model is None:
        make_warm_started_model(model_path, seed=1)
    batch = prompts(make_splits(1).train[: args.prompts])
    hooks = Hooks(generate=answer_until_right, reward=judge)
    with (
        rollout.launch(config(args.out / "logs", model_path), backend=args.backend) as deployment,
        rollout.Driver(deployment["policy"].url, hooks=hooks) as driver,
    ):
        groups = driver.rollout(0, batch, group_size=args.group_size, sampling=WHOLE).result()
    samples = [sample for group in groups for sample in group]
    for attempt in (1, 2, 0):
        share = sum(sample.metadata["right_at"] == attempt for sample in samples) / len(samples)
        print(f"{f'right at try {attempt}' if attempt else 'never right'}: {share:.1%}")
    tensors = packed(groups)
    num_tokens = int(tensors["response_lengths"].sum())
    num_trained = int(tensors["loss_mask"].sum())
    print(f"{num_tokens} tokens of response, {num_trained} of them from the policy")


if __name__ == "__main__":
    main()
