"""TRL's ``GRPOTrainer`` with engines of this library, on the task of ``colocated_grpo.py``.

python examples/trl_grpo.py    # needs the extra trl; about a minute on two cores
"""

from __future__ import annotations

import json

import rollout
from datasets import Dataset
from rollout.adapters.trl import RolloutFunction
from trl import GRPOConfig, GRPOTrainer

from arithmetic import MAX_NEW_TOKENS, make_splits, reward
from options import find_model, make_config, make_parser, prepare_model, read_options


def right_answers(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
    return [reward("", ids, right) for ids, right in zip(completion_ids, answer, strict=True)]


def main() -> None:
    args = read_options(make_parser(__doc__, "runs/trl_grpo"))
    prepare_model(args)
    problems = make_splits(args.seed).train
    dataset = Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems])
    settings = GRPOConfig(
        output_dir=str(args.out / "trl"),
        max_steps=args.steps,
        per_device_train_batch_size=args.prompts * args.group_size,
        num_generations=args.group_size,
        max_completion_length=MAX_NEW_TOKENS,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    with (
        rollout.launch(make_config(args, f"trl-grpo-{args.seed}")) as deployment,
        RolloutFunction(deployment["policy"]) as rollout_func,
    ):
        model = str(find_model(args))
        trainer = GRPOTrainer(model, right_answers, settings, dataset, rollout_func=rollout_func)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    (args.out / "trl_grpo.json").write_text(json.dumps({"steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
