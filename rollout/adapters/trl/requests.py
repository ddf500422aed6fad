"""From TRL's settings to requests, and from replies to what TRL takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.protocol import GenerateReply, SamplingParams
from engines.protocol.types import VersionSpan
from rollout.core.arguments import wrong_type
from rollout.core.errors import GenerationFailed, WeightMismatch


def check_policy(policy: Any) -> None:
    """Raise TypeError unless it generates, as the handle of a server does."""
    if not hasattr(policy, "generate"):
        raise wrong_type("policy", policy, "the handle of a server, such as deployment['policy']")


def sampling_of(args: Any, end_ids: Sequence[int]) -> SamplingParams:
    """The sampling that a ``GRPOConfig`` or ``AsyncGRPOConfig`` asks for.

    Args:
        end_ids: tokens that end a completion, besides those of the checkpoint.

    Raises:
        ValueError: ``generation_kwargs`` has a name that engines do not know.
    """
    chosen: dict[str, Any] = {
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k or -1,  # all tokens: TRL writes 0
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "regex": getattr(args, "vllm_structured_outputs_regex", None),
        "stop_token_ids": tuple(end_ids),
    }
    more: Mapping[str, Any] = getattr(args, "generation_kwargs", None) or {}
    if unknown := sorted(set(more) - set(SamplingParams.__slots__)):
        known = ", ".join(SamplingParams.__slots__)
        raise ValueError(
            f"generation_kwargs has {unknown[0]!r}, which engines do not know; known: {known}"
        )
    return SamplingParams(**{**chosen, **more})


def check_versions(replies: Sequence[GenerateReply], pushed: int) -> None:
    """Check that every token was sampled with the weights that the trainer has pushed.

    Raises:
        WeightMismatch: one was not.
    """
    for index, reply in enumerate(replies):
        for span in spans_of(reply):
            if span.version != str(pushed):
                raise WeightMismatch(
                    f"reply {index} of {len(replies)}: tokens {span.start} to {span.end} were "
                    f"sampled with weight version {span.version}, but the trainer pushed version "
                    f"{pushed}. Nothing else may push to these engines or load weights in them "
                    "while this trainer uses them"
                )


def spans_of(reply: GenerateReply) -> Sequence[VersionSpan]:
    """Spans that cover all output tokens, also of an engine that reports the last version only."""
    whole = VersionSpan(reply.weight_version or "unknown", 0, len(reply.output_ids))
    return reply.weight_versions or (whole,)


def check_complete(replies: Sequence[GenerateReply]) -> None:
    """Check that TRL can train on every reply.

    Raises:
        GenerationFailed: one was aborted, or has no tokens or log-probs.
    """
    failures = {index: why for index, reply in enumerate(replies) if (why := _why_not(reply))}
    if failures:
        index, why = next(iter(failures.items()))
        raise GenerationFailed(
            f"{len(failures)} of {len(replies)} replies cannot be trained on; reply {index} {why}",
            failures=failures,
            replies=replies,
        )


def _why_not(reply: GenerateReply) -> str:
    reason = reply.finish_reason
    if reason is not None and reason.kind == "abort":
        return f"was aborted: {reason.message or 'the engine gave no reason'}"
    if not reply.output_ids:
        return "has no tokens"
    if len(reply.output_logprobs or ()) != len(reply.output_ids):
        return "does not have a log-prob for each token"
    return ""
