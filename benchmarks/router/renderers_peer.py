"""Verifiers' way of a turn, as a server: its renderer client on the package ``renderers``.

Mirrors ``TrainClient.get_response`` of ``verifiers/v1/clients/train.py`` (verifiers 0.4.0): the
prompt of a turn is ``bridge_to_next_turn`` of the ids of the turn before it, in a thread; else it
is rendered as a whole; ``renderers.client.generate`` requests and reads it.  Thinking is kept
(``thinking_retention``), because Qwen3's default renders the history again for each message of a
user.  Left out is what costs verifiers more: its typed messages, its graph with a hash of each
message, and transformers' tokenizer, for which the same tokenizer alone stands here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from openai import AsyncOpenAI
from renderers.client import generate
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer

_SAMPLING = ("max_tokens", "stop")


class _PlainTokenizer:
    """A tokenizer as ``renderers`` takes it, without transformers."""

    name_or_path = ""
    unk_token_id = eos_token_id = None

    def __init__(self, folder: str) -> None:
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: list[Any]
    prompt_ids: list[int]
    completion_ids: list[int]


def renderers_peer(router_url: str, folder: str) -> FastAPI:
    """Chats of sessions in front of a router.

    Args:
        folder: with ``tokenizer.json``, which has Qwen3's tokens.
    """
    app = FastAPI()
    client = AsyncOpenAI(base_url=f"{router_url}/v1", api_key="none", max_retries=0)
    renderer = Qwen3Renderer(_PlainTokenizer(folder), Qwen3RendererConfig(thinking_retention="all"))
    last: dict[str, _Turn] = {}

    async def rendered(messages: list[Any], turn: _Turn | None) -> tuple[Any, bool]:
        """The prompt, and whether the history was rendered again."""
        if turn is not None and messages[: len(turn.messages)] == turn.messages:
            tail = messages[len(turn.messages) :]
            known = turn.prompt_ids, turn.completion_ids
            bridge = partial(renderer.bridge_to_next_turn, *known, tail, tools=None)
            if (found := await asyncio.to_thread(bridge)) is not None:
                return found, False
        render = partial(renderer.render, messages, tools=None, add_generation_prompt=True)
        return await asyncio.to_thread(render), True

    @app.post("/sessions/{session_id}/v1/chat/completions")
    async def chat_completions(session_id: str, request: Request) -> Response:
        body: Mapping[str, Any] = json.loads(await request.body())
        messages = body["messages"]
        prompt, is_rendered = await rendered(messages, last.get(session_id))
        result = await generate(
            client=client,
            renderer=renderer,
            messages=messages,
            model="stub",
            prompt_ids=prompt.token_ids,
            prompt_attribution=prompt,
            sampling_params={name: body[name] for name in _SAMPLING},
            extra_headers={"x-session-id": session_id},
        )
        answer = {"role": "assistant", "content": result["content"]}
        ids = result["prompt_ids"], result["completion_ids"]
        last[session_id] = _Turn([*messages, answer], *ids)
        choice = {"index": 0, "message": answer, "finish_reason": result["finish_reason"]}
        usage = {"prompt_tokens": len(ids[0]), "completion_tokens": len(ids[1])}
        reply = {"id": result["request_id"], "object": "chat.completion", "choices": [choice]}
        reply |= {"usage": usage, "is_rendered": is_rendered}
        return Response(json.dumps(reply), media_type="application/json")

    return app
