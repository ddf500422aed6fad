"""Continuing a sample that was cut off: the request for the rest, and both parts joined.

Always true: tokens that were generated are never requested again; all parts together stay within
the budget of the first request; every token keeps the weight version and the engine that generated
it; the finish reason is the last engine's.  Behind the cut, a seed is another one, since engines
may draw the random numbers of the first tokens again, and a stop string that is split by the cut is
not found.
"""

from __future__ import annotations

from dataclasses import replace

from engines.http.reply_check import check_columns, check_lengths
from engines.protocol import GenerateReply, SamplingParams
from engines.protocol.logprob_kind import LogprobKind, joined
from rollout.core.samples import EngineSpan, Sample, SampleStatus
from rollout.rules.continuation import check_budget, join_experts, join_spans, seed_after, spans_of

_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def remaining(sampling: SamplingParams, num_output: int) -> SamplingParams | None:
    """The request after ``num_output`` tokens, or None when the budget is used up."""
    if num_output >= sampling.max_new_tokens:
        return None
    if not num_output:
        return sampling
    seed = sampling.sampling_seed
    return replace(
        sampling,
        sampling_seed=None if seed is None else seed_after(seed, num_output),
        max_new_tokens=sampling.max_new_tokens - num_output,
        min_new_tokens=max(0, sampling.min_new_tokens - num_output),
    )


def extend(sample: Sample, reply: GenerateReply, *, budget: int | None = None) -> None:
    """Append an engine's reply for prompt and output so far to ``sample``.

    Args:
        budget: ``max_new_tokens`` of the whole; an aborted sample of that length is truncated.

    Raises:
        ValueError: the reply lacks log-probs or a finish reason, is longer than the budget, or has
            routed experts or sampling masks of other tokens; ``sample`` is unchanged.
    """
    reason = reply.finish_reason
    if reason is None or reason.kind not in _STATUS:
        raise ValueError(f"finish reason {reason} is none of {', '.join(_STATUS)}")
    logprobs = reply.output_logprobs or ()
    check_lengths(len(reply.output_ids), len(logprobs))
    begin = len(sample.output_ids)
    length = begin + len(reply.output_ids)
    check_budget(length, budget)
    reported = spans_of(reply.weight_versions, reply.weight_version, len(reply.output_ids))
    spans = join_spans(sample.weight_versions, reported, begin)
    if any(sample.mask) and not sample.weight_versions:
        spans = ()  # the first part has no versions, so the whole has none
    if spans and reply.output_ids and spans[-1].end != length:
        raise ValueError(f"version spans end at {spans[-1].end} of {length} output tokens")
    sample.routed_experts, sample.sampling_mask = _experts(sample, reply), _masks(sample, reply)
    sample.output_ids.extend(reply.output_ids)
    sample.output_logprobs.extend(logprobs)
    sample.mask.extend([1] * len(reply.output_ids))
    sample.text += reply.text
    sample.weight_versions = spans
    if reply.engine_id and reply.output_ids:
        sample.engines = (*sample.engines, EngineSpan(reply.engine_id, begin, length))
    if reply.output_ids:
        sample.logprob_kind = joined(sample.logprob_kind, reply.logprob_kind)
    sample.finish_reason = reason
    sample.status = _STATUS[reason.kind]
    sample.error, sample.failure = "", None  # of a turn before, after which its hook went on
    if sample.status is SampleStatus.ABORTED and budget is not None and length >= budget:
        sample.status = SampleStatus.TRUNCATED


def has_other_kind(sample: Sample, reply: GenerateReply, *, has_least_length: bool = False) -> bool:
    """Whether the log-probs of a reply are of another distribution than those of ``sample``.

    Args:
        has_least_length: the whole request has one, and the rest has reached it: from there on it
            changes no log-prob.
    """
    kinds = {sample.logprob_kind, reply.logprob_kind} - {None}
    if has_least_length and reply.logprob_kind is LogprobKind.FULL:
        kinds.discard(LogprobKind.PENALISED)
    return len(kinds) > 1 and len(reply.output_ids) > 0


def is_begun_by(sample: Sample, other: Sample) -> bool:
    """Whether the output of ``sample`` begins with all of ``other``'s."""
    num = len(other.output_ids)
    return (
        sample.output_ids[:num] == other.output_ids
        and sample.output_logprobs[:num] == other.output_logprobs
        and sample.mask[:num] == other.mask
        and sample.text.startswith(other.text)
    )


def extend_from(sample: Sample, whole: Sample, num_tokens: int, num_characters: int) -> None:
    """Have as much of the output of ``whole``, which begins with that of ``sample``."""
    begin = len(sample.output_ids)
    sample.output_ids += whole.output_ids[begin:num_tokens]
    sample.output_logprobs += whole.output_logprobs[begin:num_tokens]
    sample.mask.extend(whole.mask[begin:num_tokens])
    masks = whole.sampling_mask
    sample.sampling_mask = None if masks is None else masks[:num_tokens]
    sample.text = whole.text[:num_characters]
    sample.logprob_kind = whole.logprob_kind
    sample.weight_versions = tuple(
        replace(span, end=min(span.end, num_tokens))
        for span in whole.weight_versions
        if span.start < num_tokens
    )
    sample.engines = tuple(
        replace(span, end=min(span.end, num_tokens))
        for span in whole.engines
        if span.start < num_tokens
    )


def _experts(sample: Sample, reply: GenerateReply) -> bytes | None:
    """The experts of all tokens with ``reply``, or None if a part has none."""
    is_missing = any(sample.mask) and sample.routed_experts is None
    if is_missing or not reply.output_ids:
        return sample.routed_experts
    if reply.routed_experts is None:
        return None
    num = len(sample.prompt_ids) + len(sample.output_ids) + len(reply.output_ids) - 1
    joined = join_experts(sample.routed_experts or b"", reply.routed_experts, num)
    if joined is None:
        num_bytes = len(reply.routed_experts)
        raise ValueError(f"{num_bytes} bytes of routed experts do not fit {num} tokens")
    return joined


def _masks(sample: Sample, reply: GenerateReply) -> list[list[int] | None] | None:
    """The sampling masks of all tokens with ``reply``, or None if a part has none.

    Raises:
        ValueError: they are not those of its tokens.
    """
    if not reply.output_ids:
        return sample.sampling_mask
    if reply.sampling_mask is None or (sample.sampling_mask is None and any(sample.mask)):
        return None
    check_columns({"sampling masks": reply.sampling_mask}, len(reply.output_ids))
    before = sample.sampling_mask or [None] * len(sample.output_ids)  # of an environment
    return [*before, *(mask if mask is None else list(mask) for mask in reply.sampling_mask)]


def restart(sample: Sample) -> None:
    """Discard the output; prompt and metadata stay."""
    sample.output_ids, sample.output_logprobs, sample.loss_mask = [], [], []
    sample.text = sample.error = sample.traceback = ""
    sample.weight_versions = ()
    sample.engines = ()
    sample.routed_experts = sample.logprob_kind = sample.failure = None
    sample.sampling_mask = None
    sample.finish_reason = sample.reward = None
    sample.status = SampleStatus.PENDING
