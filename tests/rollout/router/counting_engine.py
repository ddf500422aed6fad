"""A stub engine whose tokens count up from the prompt's length."""

from __future__ import annotations

import json

from tests.rollout.router.stub_engine import CHUNKED, chunk

ASK = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 20}, "return_logprob": True}


def counting(*, dies_after=None, aborts_after=None, version="1", hold=None, every=1):
    """Token n of a sequence is n; streams an event for so many tokens."""

    async def script(connection, seen):
        body = seen.json
        start, budget = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        assert body["stream"] is True
        await connection.send(CHUNKED % b"text/event-stream")
        for num in [*range(every, budget, every), budget]:
            finish = {"type": "length", "length": num} if num == budget else None
            if num == aborts_after:
                finish = {"type": "abort", "message": "paused"}
            ids = list(range(start, start + num))
            event = {
                "text": "x" * num,
                "output_ids": ids,
                "meta_info": {
                    "id": body.get("rid"),
                    "completion_tokens": num,
                    "prompt_tokens": start,
                    "finish_reason": finish,
                    "weight_version": version,
                    "output_token_logprobs": [[-float(entry), entry, None] for entry in ids],
                },
            }
            await connection.send(chunk(b"data: " + json.dumps(event).encode() + b"\n\n"))
            if num == dies_after:
                if hold is not None:
                    await hold()
                connection.reset()
                raise ConnectionResetError
            if finish is not None:
                break
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script
