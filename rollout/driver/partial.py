"""Going on with a sample that was cut off: what is still to be asked for, and the sum of both.

Always true: tokens that were drawn are never asked for again; together the parts never exceed the
budget of the first; every token keeps the weight version that drew it; how it ended is what the
last engine said.  A sequence with ``sampling_seed`` is not repeated across the seam, and a stop
string that the seam divides is not noticed.
"""

from __future__ import annotations

from dataclasses import replace

from engines.protocol import GenerateReply, SamplingParams, VersionSpan
from rollout.samples import Sample, SampleStatus

_STATUS = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


def remaining(sampling: SamplingParams, num_output: int) -> SamplingParams | None:
    """What to ask for after ``num_output`` tokens; None when the budget is used up."""
    if num_output >= sampling.max_new_tokens:
        return None
    if not num_output:
        return sampling
    return replace(
        sampling,
        max_new_tokens=sampling.max_new_tokens - num_output,
        min_new_tokens=max(0, sampling.min_new_tokens - num_output),
    )


def extend(sample: Sample, reply: GenerateReply, *, budget: int | None = None) -> None:
    """Add to ``sample`` what an engine answered for prompt and output so far.

    Args:
        budget: ``max_new_tokens`` of the whole; an aborted sample that has as many is truncated.

    Raises:
        ValueError: the answer has no log-prob for each id, or no end, or is longer than the
            budget; ``sample`` is as before.
    """
    reason = reply.finish_reason
    if reason is None or reason.kind not in _STATUS:
        raise ValueError(f"finish reason {reason} is none of {', '.join(_STATUS)}")
    logprobs = reply.output_logprobs or ()
    if len(logprobs) != len(reply.output_ids):
        raise ValueError(f"{len(reply.output_ids)} output ids but {len(logprobs)} log-probs")
    begin = len(sample.output_ids)
    length = begin + len(reply.output_ids)
    if budget is not None and length > budget:
        raise ValueError(f"{length} output tokens where at most {budget} were asked for")
    spans = join_spans(sample.weight_versions, _spans(reply), begin)
    if any(sample.mask) and not sample.weight_versions:
        spans = ()  # versions of the first part are not known, so neither are those of the whole
    if spans and spans[-1].end != length:
        raise ValueError(f"version spans end at {spans[-1].end} of {length} output tokens")
    sample.output_ids.extend(reply.output_ids)
    sample.output_logprobs.extend(logprobs)
    sample.mask.extend([1] * len(reply.output_ids))
    sample.text += reply.text
    sample.weight_versions = spans
    sample.finish_reason = reason
    sample.status = _STATUS[reason.kind]
    if sample.status is SampleStatus.ABORTED and budget is not None and length >= budget:
        sample.status = SampleStatus.TRUNCATED


def restart(sample: Sample) -> None:
    """Forget what was drawn; prompt and metadata stay."""
    sample.output_ids.clear()
    sample.output_logprobs.clear()
    sample.mask.clear()
    sample.text = sample.error = sample.traceback = ""
    sample.weight_versions = ()
    sample.finish_reason = sample.reward = None
    sample.status = SampleStatus.PENDING


def join_spans(
    first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...], begin: int
) -> tuple[VersionSpan, ...]:
    """Spans of two parts as those of the whole, the second part beginning at token ``begin``."""
    spans = list(first)
    for span in second:
        moved = VersionSpan(span.version, span.start + begin, span.end + begin)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            spans[-1] = VersionSpan(moved.version, spans[-1].start, moved.end)
        elif moved.end > moved.start:
            spans.append(moved)
    return tuple(spans)


def _spans(reply: GenerateReply) -> tuple[VersionSpan, ...]:
    if reply.weight_versions or reply.weight_version is None or not reply.output_ids:
        return reply.weight_versions
    return (VersionSpan(reply.weight_version, 0, len(reply.output_ids)),)
