"""The experts that a forward pass of transformers chooses, and those of a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.protocol import GenerateReply

NUM_LAYERS, PER_TOKEN = 2, 2
ROUNDING = 1e-5
"""Of a router's logits, in float32."""


class ExpertTruth:
    """The experts of fresh forward passes.

    Args:
        models: the checkpoint of each weight version.
    """

    def __init__(self, models: Mapping[int, Path]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._models: dict[int, Any] = {
            version: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for version, path in models.items()
        }

    def logits_of(self, version: int, ids: Sequence[int], rows: Any, places: slice) -> Any:
        """Of each of these tokens and each layer, what the router gives the experts, when the
        tokens at ``places`` are computed by the experts of ``rows``.

        Without that, one choice between two experts that are equal but for rounding would change
        those of the layers and tokens behind it.
        """
        import torch

        model, found = self._models[version], []

        def replay(gate: Any, given: Any, out: Any) -> Any:
            logits, scores, chosen = given[0].reshape(len(ids), -1) @ gate.weight.T, *out[1:]
            forced = chosen.clone()
            forced[places] = rows[places, len(found)]
            found.append(logits)
            shares = logits.softmax(-1).gather(-1, forced)
            if model.config.norm_topk_prob:
                shares /= shares.sum(-1, keepdim=True)
            return out[0], shares.to(scores.dtype), forced

        hooks = [layer.mlp.gate.register_forward_hook(replay) for layer in model.model.layers]
        try:
            with torch.no_grad():
                model(torch.tensor([list(ids)]))
        finally:
            for hook in hooks:
                hook.remove()
        return torch.stack(found, dim=1)

    def num_wrong(self, prompt: Sequence[int], reply: GenerateReply) -> dict[str, int]:
        """Of each version of a reply, the rows whose experts are not those of a forward pass with
        the weights of that version, over all tokens before it."""
        import torch

        rows = torch.tensor(experts_of(prompt, reply))
        first = len(prompt) - 1  # this one gave the first token of the reply
        ids = [*prompt, *reply.output_ids][:-1]
        found: dict[str, int] = {}
        for number, span in enumerate(reply.weight_versions):
            places = slice(first + span.start if number else 0, first + span.end)
            logits = self.logits_of(int(span.version), ids, rows, places)
            least = logits.topk(PER_TOKEN).values[..., -1]
            chosen = logits.gather(-1, rows).min(dim=-1).values
            wrong = (chosen < least - ROUNDING).any(dim=-1)[places]
            found[span.version] = found.get(span.version, 0) + int(wrong.sum())
        return found


def experts_of(prompt: Sequence[int], reply: GenerateReply) -> list[list[list[int]]]:
    """Its rows: of each token but the last, the experts of each layer."""
    import numpy as np

    assert reply.routed_experts is not None
    num = len(prompt) + len(reply.output_ids) - 1
    rows = np.frombuffer(reply.routed_experts, np.int32).reshape(num, NUM_LAYERS, PER_TOKEN)
    assert all(len(set(layer)) == PER_TOKEN for row in rows.tolist() for layer in row)
    return list(rows.tolist())
