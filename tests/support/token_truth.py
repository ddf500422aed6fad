"""What a reply should have: each token held against transformers with the weights of its version.

For each span of a reply one forward pass over all that comes before it, with the weights that the
span names, gives the logits; from these come the log-probs of each kind, the tokens that the cuts
keep, and the best token.  Penalties count the whole output, across all seams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from engines.protocol import GenerateReply, SamplingParams, VersionSpan
from engines.protocol.logprob_kind import LogprobRule
from rollout.core.samples import Sample
from rollout.rules.contract import NO_CONTRACT, Contract
from tests.engines.embedded.reference import model

TOLERANCE = 1e-3
"""Nats."""
_EDGE = 1e-4
"""By so much probability a token may be on the other side of a cut."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        served: the newest version when it was sent; None if it does not matter.
        has_experts: it wants routed experts.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    contract: Contract = NO_CONTRACT
    served: int | None = None
    has_experts: bool = False


@dataclass(frozen=True)
class Engines:
    """How the engines behind a reply compute.

    Attributes:
        rule: at which step of sampling they take their log-probs.
        counts_prompt: their repetition penalty sees the prompt, too.
        counts_all: their penalties see each token before the next one is drawn.  SGLang 0.5.23 that
            schedules ahead misses the last one, depending on what else is in the batch.
        holds_stops: no stop string ends a text before its least length.
        cuts_in_turn: top-p is of what min-p and top-k have kept.
        end: the id of the end of a text.
    """

    rule: LogprobRule
    counts_prompt: bool
    counts_all: bool
    holds_stops: bool
    cuts_in_turn: bool
    end: int


def is_judged(sampling: SamplingParams, engines: Engines) -> bool:
    """Whether the tokens of a request are known from the weights and those before them."""
    counting = (
        sampling.frequency_penalty,
        sampling.presence_penalty,
        sampling.repetition_penalty - 1.0,
    )
    return engines.counts_all or not any(counting)


class Truth:
    """Judges replies.

    Args:
        weights_of: the checkpoint whose weights a version has.
        text_of: of token ids.
    """

    def __init__(
        self, weights_of: Callable[[int], Path], text_of: Callable[[Sequence[int]], str]
    ) -> None:
        self._weights_of = weights_of
        self._text_of = text_of

    def differences(self, asked: Asked, reply: GenerateReply, engines: Engines) -> list[str]:
        """What of a reply is not what it should be, a line each."""
        wrong = _malformed(reply) or self._wrong_end(asked, reply, engines)
        if wrong:
            return wrong
        spans = reply.weight_versions
        wrong = _outside(asked, spans)
        kind = engines.rule.kind_of(asked.sampling.to_wire())
        if reply.logprob_kind is not kind:
            wrong.append(f"its log-probs are {reply.logprob_kind} by name, and {kind} by rule")
        for span in spans if is_judged(asked.sampling, engines) else ():
            wrong += self._of_span(asked, reply, span, engines)
        return wrong

    def differences_of_sample(
        self, sampling: SamplingParams, sample: Sample, engines: Engines
    ) -> list[str]:
        """The same of a session's sample, in whose output are tokens that no engine has drawn."""
        drawn = [index for index, is_drawn in enumerate(sample.mask) if is_drawn]
        spans = sample.weight_versions
        if not spans or drawn != [at for span in spans for at in range(span.start, span.end)]:
            return [f"spans {spans} of a loss mask of {len(drawn)} tokens"]
        reply = GenerateReply(
            "", "", tuple(sample.output_ids), tuple(sample.output_logprobs), sample.finish_reason
        )
        asked = Asked(tuple(sample.prompt_ids), sampling)
        return [line for span in spans for line in self._of_span(asked, reply, span, engines)]

    def _wrong_end(self, asked: Asked, reply: GenerateReply, engines: Engines) -> list[str]:
        sampling, ids = asked.sampling, reply.output_ids
        assert reply.finish_reason is not None
        if reply.finish_reason.kind == "length":
            most = sampling.max_new_tokens
            return [] if len(ids) == most else [f"{len(ids)} of {most} tokens, and length"]
        if reply.finish_reason.kind != "stop":
            return [f"its finish reason is {reply.finish_reason}"]
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {engines.end})
        text = self._text_of(ids)
        has_stop = any(stop in text for stop in sampling.stop)
        may_be_short = has_stop and not engines.holds_stops
        if len(ids) < sampling.min_new_tokens and not may_be_short:
            return [f"{len(ids)} tokens, and min_new_tokens is {sampling.min_new_tokens}"]
        if ids[-1] in ends or has_stop:
            return []
        return [f"it stopped at {ids[-1]} after {text[-20:]!r}"]

    def _of_span(
        self, asked: Asked, reply: GenerateReply, span: VersionSpan, engines: Engines
    ) -> list[str]:
        wrong = self._by_weights(asked, reply, span, engines)
        if not wrong:
            return []
        version = int(span.version)
        near = range(max(0, version - 3), version + 4)
        fit = [
            other
            for other in near
            if not self._by_weights(asked, reply, replace(span, version=str(other)), engines)
        ]
        return [*wrong, f"all of that is right for the weights of {fit}"] if fit else wrong

    def _by_weights(
        self, asked: Asked, reply: GenerateReply, span: VersionSpan, engines: Engines
    ) -> list[str]:
        """What of a span is wrong, if it is of the weights of its version."""
        weights = self._weights_of(int(span.version))
        whole = torch.tensor([*asked.prompt, *reply.output_ids[: span.end]])
        first = len(asked.prompt) + span.start
        with torch.inference_mode():
            out = model(weights)(whole[None, :-1], output_router_logits=asked.has_experts)
        logits, chosen = out.logits[0, first - 1 :].float(), whole[first:]
        assert reply.output_logprobs is not None
        found = torch.tensor(reply.output_logprobs[span.start : span.end])
        drawn = _penalised(logits, asked, reply.output_ids, span, engines)
        at, where = asked.sampling.temperature, f"of version {span.version} from {span.start}"
        is_greedy, rule = at < 1e-5, engines.rule
        scaled = drawn if is_greedy else drawn / at
        cuts = [
            _cut(scaled.softmax(-1), asked.sampling, in_turn=engines.cuts_in_turn, edge=edge)
            for edge in (_EDGE, 0.0, -_EDGE)
        ]
        wrong = []
        if is_greedy:
            best = drawn.max(-1).values - drawn.gather(1, chosen[:, None])[:, 0]
            wrong += _first(best > TOLERANCE, best, f"is not the best one, {where}")
        else:
            probability = scaled.softmax(-1).gather(1, chosen[:, None])[:, 0]
            is_out = probability < cuts[0].least * (1 - TOLERANCE)
            wrong += _first(is_out, probability, f"was cut off, {where}")
        base = drawn if rule.has_penalties else logits
        base = base / at if rule.has_temperature and not is_greedy else base
        whole_of = base.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        masses = [cut.mass for cut in cuts] if rule.has_cuts and not is_greedy else [torch.ones(1)]
        far = torch.stack([(whole_of - mass.log() - found).abs() for mass in masses]).amin(0)
        wrong += _first(far > TOLERANCE, far, f"has another log-prob, {where}")
        if asked.has_experts:
            wrong += _wrong_experts(asked, reply, span, out.router_logits, where)
        return wrong


def _malformed(reply: GenerateReply) -> list[str]:
    num = len(reply.output_ids)
    if reply.finish_reason is None or not num:
        return [f"{num} tokens, finish reason {reply.finish_reason}"]
    if len(reply.output_logprobs or ()) != num:
        return [f"{len(reply.output_logprobs or ())} log-probs of {num} tokens"]
    ends = [0, *(span.end for span in reply.weight_versions)]
    starts = [*(span.start for span in reply.weight_versions), num]
    return [] if ends == starts else [f"spans {reply.weight_versions} of {num} tokens"]


def _wrong_experts(
    asked: Asked,
    reply: GenerateReply,
    span: VersionSpan,
    router_logits: Sequence[torch.Tensor],
    where: str,
) -> list[str]:
    """Experts of the tokens that this span's weights have computed first: behind the first span all
    but the last token of each, which the next one computes; in the first one the prompt, too."""
    if reply.routed_experts is None:
        return ["no routed experts"]
    num_tokens = len(asked.prompt) + len(reply.output_ids) - 1
    rows = torch.frombuffer(bytearray(reply.routed_experts), dtype=torch.int32)
    rows = rows.reshape(num_tokens, len(router_logits), -1)
    begin = 0 if span.start == 0 else len(asked.prompt) + span.start - 1
    end = len(asked.prompt) + span.end - 1
    wrong = []
    for layer, logits in enumerate(router_logits):
        at = logits[begin:end].float()
        found = at.gather(1, rows[begin:end, layer].long())
        num = found.shape[1]
        far = at.topk(num).values.amin(1) - found.amin(1)
        has_twice = rows[begin:end, layer].sort(1).values.diff(dim=1).eq(0).any(1)
        wrong += _first((far > _EDGE) | has_twice, far, f"has other experts, {where}")
    return wrong


def _outside(asked: Asked, spans: Sequence[VersionSpan]) -> list[str]:
    """How it breaks its contract; the version that is served can only have grown meanwhile."""
    versions = [int(span.version) for span in spans]
    why = asked.contract.why_broken(min(versions), max(versions), asked.served)
    return [why] if why else []


def _penalised(
    logits: torch.Tensor,
    asked: Asked,
    output: Sequence[int],
    span: VersionSpan,
    engines: Engines,
) -> torch.Tensor:
    """The logits behind logit bias, penalties and what is forbidden before the least length."""
    sampling = asked.sampling
    changed = logits.clone()
    for token, bias in (sampling.logit_bias or {}).items():
        changed[:, token] += bias
    counts = torch.zeros_like(logits)
    for row in range(len(logits)):
        before = output[: span.start + row]
        counts[row] = torch.bincount(
            torch.tensor(before, dtype=torch.long), minlength=len(counts[0])
        )
    seen = counts > 0
    if engines.counts_prompt:
        seen = seen.clone()
        seen[:, list(asked.prompt)] = True
    by = sampling.repetition_penalty
    changed = torch.where(seen, torch.where(changed > 0, changed / by, changed * by), changed)
    changed -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    num_short = max(0, sampling.min_new_tokens - span.start)
    if num_short:
        changed[:num_short, [*sampling.stop_token_ids, engines.end]] = -torch.inf
    return changed


class Cut(NamedTuple):
    """What top-k, top-p and min-p keep of each row: the least probability, and their sum."""

    least: torch.Tensor
    mass: torch.Tensor


def _cut(probs: torch.Tensor, sampling: SamplingParams, *, in_turn: bool, edge: float) -> Cut:
    """The cut of each row, with tokens that are out by less than ``edge``.

    Of equal tokens it is not known which ones an engine keeps, only how many.
    """
    ordered = probs.sort(dim=-1, descending=True).values
    kept = ordered >= ordered[:, :1] * sampling.min_p - edge
    if sampling.top_k > 0:
        kept &= ordered >= ordered[:, sampling.top_k - 1 : sampling.top_k] - edge
    if sampling.top_p < 1.0:
        rest = ordered * kept if in_turn else ordered
        rest = rest / rest.sum(-1, keepdim=True)
        kept &= rest.cumsum(-1) - rest <= sampling.top_p + edge
    return Cut(ordered.masked_fill(~kept, torch.inf).amin(-1), (ordered * kept).sum(-1))


def _first(is_wrong: torch.Tensor, by: torch.Tensor, what: str) -> list[str]:
    if not bool(is_wrong.any()):
        return []
    place = int(is_wrong.nonzero()[0])
    return [f"{int(is_wrong.sum())} tokens: the one at {place} {what} ({float(by[place]):.3g})"]


def counted(reasons: Mapping[str, int]) -> str:
    """Numbers by reason, the largest first."""
    rows = sorted(reasons.items(), key=lambda row: -row[1])
    return ", ".join(f"{num} {reason}" for reason, num in rows) or "none"
