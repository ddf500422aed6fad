"""Events of a streamed reply of ``/generate``, as an engine of weights 7 sends them."""

from __future__ import annotations

import json

from rollout.router.http.head_cache import ReplyHead

STREAM = ReplyHead(200, [(b"content-type", b"text/event-stream")])
PROMPT = {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}


def event(*ids: int, finish: str = "") -> bytes:
    reason = {"type": finish, "length": 4} if finish else None
    meta = {"id": "r", "completion_tokens": len(ids), "finish_reason": reason}
    meta["weight_version"] = "7"
    text = "".join(chr(96 + one) for one in ids)
    payload = {"text": text, "output_ids": list(ids), "meta_info": meta}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def with_logprobs(*ids: int, finish: str) -> bytes:
    payload = json.loads(event(*ids, finish=finish)[6:])
    payload["meta_info"]["output_token_logprobs"] = [[-1.0, one, None] for one in ids]
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
