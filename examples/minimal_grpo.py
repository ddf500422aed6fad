"""A trainer in 40 lines: GRPO on a tiny model that learns to answer in digits.

python examples/minimal_grpo.py    # about a minute on a laptop, without a GPU
"""

import tempfile

import rollout
import torch
from rollout.testing import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = tempfile.TemporaryDirectory()
path = str(make_tiny_model(folder.name, "qwen3"))
model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
prompts = [rollout.Prompt(tuple(tokenizer.encode(text))) for text in ("one", "two", "six", "ten")]
sampling = rollout.SamplingParams(max_new_tokens=8)
engines = {"num_engines": 2, "engine": {"kind": "embedded"}}
server = {"model_path": path, "groups": {"main": engines}}
config = rollout.RolloutConfig.from_dict({"run_id": "minimal", "servers": {"policy": server}})


def reward(sample):
    text = tokenizer.decode(sample.output_ids)
    return sum(letter.isdigit() for letter in text) / sampling.max_new_tokens


def train(groups):
    loss = 0.0
    for group in groups:
        mean = sum(sample.reward for sample in group) / len(group)
        for sample in group:
            ids = torch.tensor([sample.prompt_ids + sample.output_ids])
            logprobs = model(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            loss = loss - (sample.reward - mean) * logprobs[0, -len(sample.output_ids) :].sum()
    optimizer.zero_grad()
    (loss / len(groups)).backward()
    optimizer.step()


with rollout.launch(config) as deployment:
    policy = deployment["policy"]
    with rollout.Driver(policy.url, reward) as driver:
        for step in range(1, 21):
            groups = driver.rollout(step, prompts, group_size=16, sampling=sampling).result()
            with policy.offloaded() as window:
                train(groups)
                window.push(model.state_dict(), version=step)
            rewards = [sample.reward for group in groups for sample in group]
            print(f"step {step}: reward {sum(rewards) / len(rewards):.2f}")
