"""The tokens of replies that have not ended, for a client that writes them to its disk.

Always true: a client gets what another engine would continue from, and of that only what it has not
yet; it sees when tokens that it has are generated a second time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rollout.router.continuation.core import Payload, span_payloads
from rollout.router.continuation.reply import Reply
from rollout.rules.continuation import Part

_MOST_AT_ONCE = 64
_COLUMN = "output_token_logprobs"
_Count = Annotated[int, Field(ge=0)]


class Known(TypedDict):
    """How much of one reply a client has, and ``num_recomputed`` of the reply at that time."""

    tokens: _Count
    characters: _Count
    recomputed: _Count


_KNOWN = TypeAdapter(Annotated[dict[str, Known], Field(max_length=_MOST_AT_ONCE)])


def new_tokens(replies: Iterable[tuple[str, str, Reply]], body: bytes) -> dict[str, Payload]:
    """By request id, what its client has not yet, in the form of SGLang's ``/generate``.

    ``begin`` is the number of tokens in front of it.

    Args:
        replies: each with the id of its request and its engine's.
        body: JSON, ``{request id: Known}``.

    Raises:
        ValueError: the body has another form, or too many ids.
    """
    known = _KNOWN.validate_json(body)
    new: dict[str, Payload] = {}
    for rid, engine_id, reply in replies:
        if rid not in known:
            continue
        has, num_recomputed = known[rid], reply.num_recomputed
        is_same = has["recomputed"] == num_recomputed
        begin, begin_text = (has["tokens"], has["characters"]) if is_same else (0, 0)
        part = reply.continuable().behind(begin, begin_text)
        if part.num or not is_same:
            new[rid] = _payload(rid, reply, part)
            new[rid] |= {"begin": begin, "engine_id": "" if reply.num_failovers else engine_id}
    return new


def _payload(rid: str, reply: Reply, part: Part) -> Payload:
    return {
        "text": part.text,
        "output_ids": part.ids,
        "meta_info": {
            "id": rid,
            "completion_tokens": part.num,
            "finish_reason": {"type": "abort"},
            "weight_versions": span_payloads(part.spans),
            "num_recomputed_tokens": reply.num_recomputed,
            "logprob_kind": reply.logprob_kind,
            _COLUMN: part.columns.get(_COLUMN),
        },
    }
