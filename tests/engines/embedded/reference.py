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


def routing(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and choices of all sparse layers, ``[layers, tokens, experts]``."""
    outputs: list[Any] = []
    gates = [part for name, part in model.named_modules() if name.endswith(".mlp.gate")]
    handles = [gate.register_forward_hook(lambda _, __, out: outputs.append(out)) for gate in gates]
    try:
        with torch.no_grad():
            model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(outputs[0], torch.Tensor):  # transformers 4: the logits alone
        probabilities = torch.stack([logits.softmax(-1) for logits in outputs])
        return probabilities, probabilities.topk(model.config.num_experts_per_tok).indices
    probabilities = torch.stack([logits.softmax(-1) for logits, _, _ in outputs])
    return probabilities, torch.stack([chosen for _, _, chosen in outputs])


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
