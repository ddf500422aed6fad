"""What transformers itself says about the models of the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # two engines and colleagues share the cores


@cache
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


def greedy(path: Path, prompt: list[int], max_new_tokens: int = 16) -> list[int]:
    """The completion of ``model.generate``."""
    ids = torch.tensor([prompt])
    output = model(path).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
    )
    completion: list[int] = output[0, len(prompt) :].tolist()
    return completion


def logprobs(path: Path, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    """Log-probabilities of ``output`` after ``prompt``, from one forward pass."""
    with torch.no_grad():
        logits = model(path)(torch.tensor([prompt + output])).logits[0]
    rows = logits[len(prompt) - 1 : -1].float() / temperature
    chosen = rows.log_softmax(-1).gather(1, torch.tensor(output).unsqueeze(1))
    values: list[float] = chosen.squeeze(1).tolist()
    return values


def state_dict(path: Path) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in model(path).named_parameters()}
