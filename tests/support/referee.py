"""Which weights answered?  Every token of an answer is held against transformers.

A greedy token has to be the best one, and its log-probability the right one, under the weights of
the version that its span names, after everything that comes before it.  A cache entry of other
weights, or a span that names the wrong version, changes both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.engines.embedded.reference import model

TOLERANCE = 2e-3
"""Of a log-probability; what two implementations in float32 differ by is a hundredth of it."""


@dataclass(frozen=True)
class Span:
    """Tokens ``start`` to ``end`` of an answer came from weights of this version."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Answer:
    """One reply to ``/generate``.

    Attributes:
        kind: of its finish reason.
    """

    rid: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    kind: str

    @classmethod
    def of(cls, prompt: Sequence[int], payload: Mapping[str, Any]) -> Answer:
        meta = payload["meta_info"]
        return cls(
            rid=meta["id"],
            prompt=tuple(prompt),
            output=tuple(payload["output_ids"]),
            logprobs=tuple(one[0] for one in meta.get("output_token_logprobs") or ()),
            spans=tuple(
                Span(int(one["version"]), one["start"], one["end"])
                for one in meta.get("weight_versions") or ()
            ),
            kind=meta["finish_reason"]["type"],
        )


class Referee:
    """Judges answers.

    Args:
        weights_of: the checkpoint whose weights a version has.
    """

    def __init__(self, weights_of: Callable[[int], Path]) -> None:
        self._weights_of = weights_of

    def findings(self, answers: Sequence[Answer]) -> list[str]:
        """What is wrong with them, a line each."""
        wrong = [line for one in answers if (line := _malformed(one))]
        by_weights: dict[Path, list[tuple[Answer, Span]]] = {}
        for one in answers:
            for span in one.spans:
                if span.start == span.end:  # aborted before its first token
                    continue
                by_weights.setdefault(self._weights_of(span.version), []).append((one, span))
        for path, spans in by_weights.items():
            wrong += _not_of(path, spans)
        return wrong

    def could_tell(self, answers: Sequence[Answer], others: Sequence[Path]) -> bool:
        """Whether the first span of each of these answers is wrong under all ``others``."""
        spans = [(one, one.spans[0]) for one in answers]
        return all(
            len(_not_of(path, [(one, span) for one, span in spans if self._is_of(span) != path]))
            == sum(self._is_of(span) != path for _, span in spans)
            for path in others
        )

    def _is_of(self, span: Span) -> Path:
        return self._weights_of(span.version)


def _malformed(one: Answer) -> str:
    if len(one.logprobs) != len(one.output):
        return f"{one.rid}: {len(one.logprobs)} log-probabilities of {len(one.output)} tokens"
    ends = [0, *(span.end for span in one.spans)]
    starts = [*(span.start for span in one.spans), len(one.output)]
    if ends != starts:
        return f"{one.rid}: spans {one.spans} are not its {len(one.output)} tokens"
    return ""


def _not_of(path: Path, spans: Sequence[tuple[Answer, Span]]) -> list[str]:
    """Spans that did not come from these weights."""
    if not spans:
        return []
    rows = [one.prompt + one.output[: span.end] for one, span in spans]
    # Padded on the right, where a causal model does not look.
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    with torch.inference_mode():
        logits = model(path)(ids).logits.log_softmax(-1)
    wrong = []
    for row, (one, span) in zip(logits, spans, strict=True):
        first = len(one.prompt) + span.start - 1
        at = row[first : len(one.prompt) + span.end - 1]
        said = torch.tensor(one.logprobs[span.start : span.end])
        chosen = at.gather(1, torch.tensor(one.output[span.start : span.end])[:, None])[:, 0]
        off = torch.maximum((chosen - said).abs(), at.max(-1).values - chosen)
        if off.max() > TOLERANCE:
            place = int((off > TOLERANCE).nonzero()[0]) + span.start
            wrong.append(
                f"{one.rid}: token {place} of {len(one.output)} is not of version {span.version}, "
                f"off by {float(off.max()):.3g}; spans {one.spans}, finished by {one.kind}"
            )
    return wrong
