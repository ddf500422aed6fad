"""Sampling parameters alone and in pairs, and what an engine's log-probs of its tokens then are,
computed by transformers: its model, its logits processors and its warpers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from engines.protocol.logprob_kind import CUTS

PROMPT = (11, 12, 13)
NUM = 16
STOPS = (40, 41, 42, 43)
"""Tokens that would end an output, so a least length forbids them."""
_LETTERS = tuple(range(64, 80))  # a to p, of the tiny tokenizer
_AXES: Mapping[str, Sequence[Any]] = {
    "temperature": (0.3, 1.7, 0.0),
    "top_p": (0.5, 0.9),
    "top_k": (5,),
    "min_p": (0.2,),
    "repetition_penalty": (1.2,),
    "presence_penalty": (1.5,),
    "frequency_penalty": (1.0,),
    "logit_bias": ({"45": 4.0},),
    "min_new_tokens": (NUM,),
    "regex": ("[a-p]{64}",),
}
_POINTS = [(name, value) for name, values in _AXES.items() for value in values]
SINGLES: list[dict[str, Any]] = [{}, *({name: value} for name, value in _POINTS)]
PAIRS: list[dict[str, Any]] = [
    dict(pair) for pair in combinations(_POINTS, 2) if pair[0][0] != pair[1][0]
]
CELLS = SINGLES + PAIRS


@dataclass(frozen=True)
class Steps:
    """What an engine does to logits before it takes its log-probs.

    Attributes:
        counts_late: penalties count the last token of the prompt, and tokens of the output late,
            as its scheduler has them, so what was counted at a token is not known.
        is_vllm: in vLLM's order: a repetition penalty counts the prompt, too, and comes first.
    """

    has_penalties: bool = True
    has_temperature: bool = True
    has_cuts: bool = False
    counts_late: bool = False
    is_vllm: bool = False


COUNTING = ("repetition_penalty", "presence_penalty", "frequency_penalty")
"""Penalties that count the output."""
MODES: Mapping[str, Mapping[str, Steps]] = {
    "embedded": {
        "default": Steps(),
        "original": Steps(has_temperature=False),
    },
    "sglang": {
        "default": Steps(counts_late=True),
        "original": Steps(counts_late=True, has_temperature=False),
    },
    "vllm": {
        "processed": Steps(has_cuts=True, is_vllm=True),
        "raw": Steps(has_penalties=False, has_temperature=False, is_vllm=True),
    },
}
"""Of each kind of engine, as it is and with its log-probs before the sampling."""


class Truth:
    """A model of transformers.

    Args:
        path: its folder.
    """

    def __init__(self, path: Any) -> None:
        import torch
        import transformers

        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(path, dtype=torch.float32).eval()
        self._eos = self._model.config.eos_token_id

    def full(
        self,
        ids: Sequence[int],
        temperature: float = 1.0,
        prompt: Sequence[int] = PROMPT,
        *,
        cuts: Mapping[str, Any] | None = None,
    ) -> Any:
        """What a trainer computes of these tokens, greedy at temperature 1.

        Args:
            cuts: sampling parameters whose cuts it knows.
        """
        import torch

        from rollout.driver.logprobs.token_logprobs import token_logprobs

        known = {name: value for name, value in (cuts or {}).items() if name in CUTS}
        logits, tokens = self._logits(ids, prompt), torch.tensor(list(ids))
        return token_logprobs(logits, tokens, temperature=temperature, renormalises=True, **known)

    def changed(self, ids: Sequence[int], sampling: Mapping[str, Any], steps: Steps) -> Any:
        """After all steps of an engine."""
        import torch

        rows = self._logits(ids, PROMPT)
        return _of(torch.cat([self._after(rows[i : i + 1], ids[:i], sampling, steps)
                              for i in range(len(ids))]), ids)  # fmt: skip

    def _logits(self, ids: Sequence[int], prompt: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            whole = self._model(torch.tensor([[*prompt, *ids]])).logits[0]
        return whole[len(prompt) - 1 : -1]

    def _after(
        self, row: Any, seen: Sequence[int], sampling: Mapping[str, Any], steps: Steps
    ) -> Any:
        import torch
        from transformers.generation import logits_process as of

        temperature = sampling.get("temperature", 1.0)
        if "regex" in sampling:  # 64 letters: no token but these, and no end
            forbidden = torch.ones_like(row, dtype=torch.bool)
            forbidden[0, list(_LETTERS)] = False
            row = row.masked_fill(forbidden, -torch.inf)
        if steps.has_penalties:
            row = _biased(self._without_ends(row, len(seen), sampling, steps), sampling)
            # Of a counted token, SGLang subtracts before it divides.
            for change in (_divided, _subtracted) if steps.is_vllm else (_subtracted, _divided):
                has_prompt = steps.is_vllm and change is _divided
                row = change(row, [*PROMPT, *seen] if has_prompt else seen, sampling)
        if steps.has_temperature and temperature:
            row = row / temperature
        if steps.has_cuts and temperature:
            for name, warper in (
                ("min_p", of.MinPLogitsWarper),
                ("top_k", of.TopKLogitsWarper),
                ("top_p", of.TopPLogitsWarper),
            ):
                if name in sampling:
                    row = warper(sampling[name])(None, row)
        return row

    def _without_ends(
        self, row: Any, num_seen: int, sampling: Mapping[str, Any], steps: Steps
    ) -> Any:
        if "min_new_tokens" not in sampling:
            return row
        from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

        ends = [*STOPS, self._eos]
        forbid = MinNewTokensLengthLogitsProcessor(0, sampling["min_new_tokens"], ends)
        return forbid(_row([0] * num_seen), row)


def _biased(row: Any, sampling: Mapping[str, Any]) -> Any:
    if "logit_bias" not in sampling:
        return row
    from transformers.generation.logits_process import SequenceBiasLogitsProcessor

    biases = {(int(token),): bias for token, bias in sampling["logit_bias"].items()}
    return SequenceBiasLogitsProcessor(biases)(_row(()), row)


def _divided(row: Any, counted: Sequence[int], sampling: Mapping[str, Any]) -> Any:
    if "repetition_penalty" not in sampling or not counted:
        return row
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"])(_row(counted), row)


def _subtracted(row: Any, counted: Sequence[int], sampling: Mapping[str, Any]) -> Any:
    """Transformers has no such penalties."""
    once, each = (sampling.get(f"{name}_penalty", 0.0) for name in ("presence", "frequency"))
    row = row.clone()
    for token, num in Counter(counted).items():
        row[0, token] -= once + each * num
    return row


def _row(ids: Sequence[int]) -> Any:
    import torch

    return torch.tensor([list(ids)], dtype=torch.long)


def _of(scores: Any, ids: Sequence[int]) -> Any:
    """The log-softmax of these tokens."""
    return scores.log_softmax(-1)[range(len(ids)), list(ids)]
