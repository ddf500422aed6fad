"""TRL's ``GRPOTrainer`` on engines of this library learns two-digit addition; needs extra trl."""

import json

import rollout
from datasets import Dataset
from rollout.adapters.trl import RolloutFunction
from trl import GRPOConfig, GRPOTrainer

from arithmetic import MAX_NEW_TOKENS, make_splits, reward
from options import find_model, make_config, make_parser, prepare_model, read_options

ON_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
LEARNING = {"learning_rate": 5e-4, "lr_scheduler_type": "constant"}
LOGS = {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}


def right_answers(completion_ids: list[list[int]], answer: list[str], **_: object) -> list[float]:
    return [reward("", ids, right) for ids, right in zip(completion_ids, answer, strict=True)]


def main() -> None:
    args = read_options(make_parser(__doc__, "runs/trl_grpo"))
    prepare_model(args)
    rows = [{"prompt": one.prompt, "answer": one.answer} for one in make_splits(args.seed).train]
    batch = {"per_device_train_batch_size": args.prompts * args.group_size, "seed": args.seed}
    group = {"num_generations": args.group_size, "max_completion_length": MAX_NEW_TOKENS}
    settings = GRPOConfig(
        f"{args.out}/trl", max_steps=args.steps, **batch, **group, **ON_CPU, **LEARNING, **LOGS
    )
    config, model, data = make_config(args, "trl-grpo"), find_model(args), Dataset.from_list(rows)
    with rollout.launch(config) as run, RolloutFunction(run["policy"]) as rollout_func:
        trainer = GRPOTrainer(str(model), right_answers, settings, data, rollout_func=rollout_func)
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    (args.out / "trl_grpo.json").write_text(json.dumps({"steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
