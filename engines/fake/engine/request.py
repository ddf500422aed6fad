"""A request in flight on a fake engine, and its reply as far as it has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines.fake.engine.fake_sampling import Drawing
from engines.fake.engine.faults import Fault
from engines.protocol import FinishReason, GenerateReply, SamplingParams, VersionSpan
from engines.protocol.sampling_params import DEFAULT_SAMPLING

_PLAIN = Drawing(DEFAULT_SAMPLING)


def numbers_of(tokens: Sequence[int]) -> str:
    """The text of tokens of a fake."""
    return " ".join(map(str, tokens))


@dataclass(slots=True)
class FakeRequest:
    """One request that was admitted.

    Attributes:
        versions: weight version of each output token, same length as ``output_ids``.
        rid: empty until it is admitted, if its sender gave none.
        is_aborted: it ends before its next token.
        fault: the fault that strikes it, if any.
        input_logprobs: those of its prompt, if they were requested.
        logprob: of each of its tokens.
        cached_tokens: of its prompt, that came from a cache.
        drawing: how its tokens are drawn; made when it is admitted.
        text_of: makes a text of tokens.
        matched: the token or text that ended it, or None while none did.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    return_logprob: bool
    output_ids: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    is_aborted: bool = False
    fault: Fault | None = None
    input_logprobs: tuple[float, ...] | None = None
    logprob: float = -1.0
    cached_tokens: int = 0
    drawing: Drawing = _PLAIN
    text_of: Callable[[Sequence[int]], str] = numbers_of
    matched: int | str | None = None

    @property
    def is_over(self) -> bool:
        has_ended = self.is_aborted or self.matched is not None
        return has_ended or len(self.output_ids) >= self.sampling.max_new_tokens

    def add_token(self, version: str, vocab_size: int, shift: int = 0) -> None:
        """One more token: a function of prompt, position and sampling parameters, so that replies
        are predictable.

        Args:
            shift: added when the weights are corrupt.
        """
        first = (sum(self.input_ids) + 7 * len(self.output_ids) + shift) % vocab_size
        self.output_ids.append(self.drawing.token(first, self.output_ids, vocab_size))
        self.versions.append(version)
        text = self.text_of(self.output_ids) if self.sampling.stop else ""
        self.matched = self.drawing.end_of(self.output_ids, text)

    def reply(self) -> GenerateReply:
        """The reply; without a finish reason while the request runs."""
        reason = None
        if self.is_aborted:
            reason = FinishReason("abort", message="Aborted")
        elif self.matched is not None:
            reason = FinishReason("stop", matched=self.matched)
        elif self.is_over:
            reason = FinishReason("length")
        return GenerateReply(
            rid=self.rid,
            text=self.drawing.shown(self.text_of(self.output_ids), self.matched),
            output_ids=tuple(self.output_ids),
            output_logprobs=(self.logprob,) * len(self.output_ids) if self.return_logprob else None,
            finish_reason=reason,
            prompt_tokens=len(self.input_ids),
            completion_tokens=len(self.output_ids),
            weight_version=self.versions[-1] if self.versions else None,
            weight_versions=tuple(self._spans()),
            input_logprobs=self.input_logprobs,
            cached_tokens=self.cached_tokens,
        )

    def _spans(self) -> list[VersionSpan]:
        spans: list[VersionSpan] = []
        for position, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = VersionSpan(version, spans[-1].start, position + 1)
            else:
                spans.append(VersionSpan(version, position, position + 1))
        return spans
