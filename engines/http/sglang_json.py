"""SGLang's JSON: bodies for ``/generate``, replies as values of ``protocol``, events.

Plain functions.  A reply of another shape raises as ``plain_json.WRONG_FORM`` has, which
``client.py`` turns into an error that names the engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from engines.http.reply_check import SAMPLING_MASK, check_generate
from engines.protocol import (
    FinishReason,
    GenerateReply,
    Loads,
    MemoryTag,
    ModelInfo,
    SamplingParams,
    ServerInfo,
    TensorInfo,
    TopLogprobs,
    VersionSpan,
    WeightsReport,
)
from engines.protocol.logprob_kind import read_kind
from engines.protocol.plain_text import shortened
from engines.protocol.sampling_params import DEFAULT_SAMPLING

DONE = b"[DONE]"
_GIB = 1 << 30
_MESSAGE_CHARACTERS = 500
_MEMORY_USAGE = {MemoryTag.WEIGHTS: "weight", MemoryTag.KV_CACHE: "kvcache"}


async def sse_payloads(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """What follows ``data:`` on each line of a stream cut anywhere.

    Lines end at a newline only: text in a payload may hold other characters that
    ``str.splitlines`` takes for line ends.
    """
    unread = bytearray()
    async for chunk in chunks:
        unread += chunk
        *lines, unread = unread.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:].strip())


def generate_body(
    *,
    input_ids: Sequence[int] | None = None,
    text: str | None = None,
    sampling_params: SamplingParams = DEFAULT_SAMPLING,
    rid: str | None = None,
    return_logprob: bool = False,
) -> dict[str, Any]:
    """The body for ``/generate``.

    Raises:
        ValueError: not exactly one of ``input_ids`` and ``text``, or more than one completion.
    """
    if (input_ids is None) == (text is None):
        raise ValueError("generate takes either input_ids or text")
    if sampling_params.n != 1:
        raise ValueError(f"generate makes one completion, not n={sampling_params.n}: call it again")
    prompt = {"text": text} if input_ids is None else {"input_ids": list(input_ids)}
    body: dict[str, Any] = prompt | {"sampling_params": sampling_params.to_wire()}
    if rid is not None:
        body["rid"] = rid
    return body | {"return_logprob": True} if return_logprob else body


def read_generate(answer: Any) -> GenerateReply:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    logprobs = meta.get("output_token_logprobs")
    of_prompt = meta.get("input_token_logprobs")
    version = meta.get("weight_version")
    prompt_ids, masks = answer.get("prompt_token_ids"), meta.get(SAMPLING_MASK)
    return GenerateReply(
        rid=str(meta["id"]),
        text=answer.get("text") or "",
        output_ids=tuple(answer.get("output_ids") or ()),
        output_logprobs=None if logprobs is None else _logprobs(logprobs),
        finish_reason=None if reason is None else _read_finish_reason(reason),
        prompt_tokens=meta.get("prompt_tokens", 0),
        completion_tokens=meta.get("completion_tokens", 0),
        cached_tokens=meta.get("cached_tokens", 0),
        weight_version=None if version is None else str(version),
        weight_versions=tuple(
            VersionSpan(version=str(span["version"]), start=span["start"], end=span["end"])
            for span in meta.get("weight_versions") or ()
        ),
        # The first token has no predecessor: SGLang sends null for it.
        input_logprobs=_logprobs(of_prompt[1:]) if of_prompt else None,
        output_top_logprobs=_top_logprobs(meta.get("output_top_logprobs"), 0),
        input_top_logprobs=_top_logprobs(meta.get("input_top_logprobs"), 1),
        routed_experts=_from_base64(meta.get("routed_experts")),
        sampling_mask=None if masks is None else tuple(mask and tuple(mask) for mask in masks),
        num_failovers=meta.get("num_failovers", 0),
        logprob_kind=read_kind(meta.get("logprob_kind")),
        prompt_ids=None if prompt_ids is None else tuple(prompt_ids),
    )


def read_checked(answer: Any, *, wants_logprobs: bool = False) -> GenerateReply:
    """``read_generate`` of a reply that samples are made of.

    Args:
        wants_logprobs: were requested.

    Raises:
        UnusableReply: its tokens cannot be used.
    """
    check_generate(answer, wants_logprobs=wants_logprobs)
    return read_generate(answer)


def _logprobs(entries: Sequence[Any]) -> tuple[float, ...]:
    values = [entry[0] for entry in entries]
    return tuple(map(read_logprob if None in values else float, values))


def _top_logprobs(tokens: Any, begin: int) -> tuple[TopLogprobs, ...] | None:
    """SGLang sends null for a token without any, such as the prompt's first."""
    if not tokens:
        return None
    return tuple({entry[1]: read_logprob(entry[0]) for entry in of or ()} for of in tokens[begin:])


def _from_base64(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def read_logprob(value: float | None) -> float:
    """SGLang's JSON writer has no NaN and sends null for it."""
    return math.nan if value is None else float(value)


def _read_finish_reason(reason: Mapping[str, Any]) -> FinishReason:
    matched = reason.get("matched")
    if isinstance(matched, list):
        matched = matched[-1] if matched else None
    message = shortened(str(reason.get("message") or ""), _MESSAGE_CHARACTERS)
    return FinishReason(kind=reason["type"], matched=matched, message=message)


def read_model_info(answer: Any) -> ModelInfo:
    return ModelInfo(
        model_path=answer["model_path"],
        weight_version=str(answer["weight_version"]),
        raw=answer,
    )


def read_server_info(answer: Any) -> ServerInfo:
    """SGLang does not report its kind; other engines put theirs under ``engine``."""
    return ServerInfo(
        version=str(answer["version"]),
        engine=str(answer.get("engine", "sglang")),
        enable_memory_saver=bool(answer.get("enable_memory_saver", False)),
        enable_weights_cpu_backup=bool(answer.get("enable_weights_cpu_backup", False)),
        resident_bytes=_memory_by_tag(answer),
        released=_tags(answer, "released_tags"),
        update_groups=_tags(answer, "weights_update_groups"),
        fingerprints=str(answer.get("fingerprints") or ""),
        start=_start(answer),
        num_answers_late=_num_answers_late(answer),
        raw=_without_keys(answer),
    )


# SGLang reports what it was started with, to those who have a key; also in each internal state.
_WITH_KEYS = frozenset({"api_key", "admin_api_key", "launch_command"})


def _without_keys(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {
            name: _without_keys(value) for name, value in answer.items() if name not in _WITH_KEYS
        }
    return list(map(_without_keys, answer)) if isinstance(answer, list) else answer


def _num_answers_late(answer: Any) -> int:
    """How far SGLang's last rank may be behind its first, in requests.

    A rank takes a request only after it has done the one before, and gloo sends it only then.  A
    broadcast to tensor-parallel ranks ends when the next ones in its tree (binomial) have taken it.
    A stage does a request before it waits for its send of the one before (``event_loop_pp``).
    """
    if "engine" in answer:
        return 0
    tensor, stages = int(answer.get("tp_size") or 1), int(answer.get("pp_size") or 1)
    return (tensor - 1).bit_length() + (2 * stages - 1 if stages > 1 else 0)


def _start(answer: Any) -> str:
    """SGLang 0.5.23 draws a seed at its start, unless it is given one, and reports how long each
    part of the start took; of several tokenizer workers each reports its own."""
    if own := answer.get("process_start"):
        return str(own)
    has_one_front_end = (answer.get("tokenizer_worker_num") or 1) == 1
    took = answer.get("startup_time") if has_one_front_end else None
    known = {"random_seed": answer.get("random_seed"), "startup_time": took}
    found = {name: value for name, value in known.items() if value is not None}
    if not found:
        return ""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return f"the start {digest[:12]}, of its {' and '.join(found)}"


def _memory_by_tag(answer: Any) -> dict[str, int]:
    """Bytes of each tag on all GPUs.  SGLang reports GiB of one rank of each replica.

    On a CPU, SGLang's figures are those of the whole host.  Those of CUDA graphs are left out:
    whether a release frees them depends on the engine's environment.
    """
    if (reported := answer.get("resident_bytes")) is not None:
        return {tag: int(num) for tag, num in reported.items()}
    states = [state for state in answer.get("internal_states") or () if "memory_usage" in state]
    if not states or answer.get("device") != "cuda":
        return {}
    world_size, tensor, stages = states[0].get("world_size"), answer["tp_size"], answer["pp_size"]
    num_ranks = int(world_size or int(tensor) * int(stages))
    return {
        tag: int(num_ranks * _GIB * fmean(state["memory_usage"][name] for state in states))
        for tag, name in _MEMORY_USAGE.items()
    }


def _tags(answer: Any, key: str) -> frozenset[str] | None:
    return None if answer.get(key) is None else frozenset(answer[key])


def read_loads(answer: Any) -> Loads:
    ranks = answer["loads"]
    num_running = sum(rank["num_running_reqs"] for rank in ranks)
    tokens_per_s = sum(rank.get("gen_throughput") or 0.0 for rank in ranks)
    counts = [rank.get("num_output_tokens") for rank in ranks]
    drafted = [rank.get("num_drafted") for rank in ranks]
    # SGLang 0.5.23 measures them every 40 decoding steps, and counts none.
    measured = [rank["speculative"] for rank in ranks if rank.get("speculative")]
    shares = [float(rank["accept_rate"]) for rank in measured]
    return Loads(
        num_running_reqs=num_running,
        num_waiting_reqs=sum(rank["num_waiting_reqs"] for rank in ranks),
        # Without its metrics, SGLang always reports 0.
        tokens_per_s=tokens_per_s if tokens_per_s or not num_running else None,
        num_output_tokens=None if None in counts else sum(counts),
        kv_use=max((rank["token_usage"] for rank in ranks if "token_usage" in rank), default=None),
        num_drafted=None if None in drafted else sum(drafted),
        num_accepted=sum(rank.get("num_accepted") or 0 for rank in ranks),
        accepted_share=sum(shares) / len(shares) if shares else None,
        interval=str([(rank["accept_rate"], rank["accept_length"]) for rank in measured]),
        raw=answer,
    )


def read_weights_report(answer: Any) -> WeightsReport:
    ranks = answer.get("ranks") or ()
    return WeightsReport(
        checksum=answer.get("per_engine_checksum"),
        tensors=tuple(dict(rank["checksums"]) for rank in ranks),
        message=answer.get("message") or "",
        num_bytes=answer.get("num_bytes"),
        why_partial=_why_partial(ranks),
    )


def _why_partial(ranks: Sequence[Any]) -> str:
    """Why ranks are missing: SGLang 0.5.23 answers for its first pipeline stage alone."""
    found = [info for rank in ranks for info in rank.get("parallelism_info") or ()]
    num_stages = max((info["pp_size"] for info in found), default=0)
    num_seen = len({info["pp_rank"] for info in found})
    if num_seen >= num_stages:
        return ""
    return f"it reports fingerprints of {num_seen} of its {num_stages} pipeline stages"


def read_weights_manifest(answer: Any) -> tuple[TensorInfo, ...]:
    return tuple(
        TensorInfo(
            name=entry["name"],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            is_tied=bool(entry.get("is_tied")),
        )
        for entry in answer
    )
