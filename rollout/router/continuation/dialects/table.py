"""The dialects, by route and by kind of engine: one more is one more row."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.router.continuation.dialects import openai, sglang, vllm
from rollout.router.continuation.reply import Route
from rollout.router.http.routes import GENERATE_PATH, VLLM_GENERATE_PATH

ROUTES: Mapping[str, Route] = {
    GENERATE_PATH: Route(
        sglang.read,
        sglang.chunks,
        sglang.whole,
        {"sglang": sglang.ENGINE, "vllm": vllm.TRANSLATED},
    ),
    VLLM_GENERATE_PATH: Route(vllm.read, vllm.chunks, vllm.whole, {"vllm": vllm.ENGINE}),
    "/v1/completions": Route(
        openai.read_completion,
        openai.completion_chunks,
        openai.whole_completion,
        openai.COMPLETION_ENGINES,
    ),
    "/v1/chat/completions": Route(
        openai.read_chat, openai.chat_chunks, openai.whole_chat, openai.CHAT_ENGINES
    ),
}
