"""The dialects, by route and by kind of engine: one more is one more row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.router.continuation.dialects import openai, sglang, vllm
from rollout.router.continuation.reply import Route
from rollout.router.http.routes import GENERATE_PATH, VLLM_GENERATE_PATH

ROUTES: Mapping[str, Route] = {
    GENERATE_PATH: Route(
        sglang.read,
        sglang.chunks,
        sglang.whole,
        {"sglang": sglang.ENGINE, "vllm": vllm.TRANSLATED},
        nests_sampling=True,
    ),
    VLLM_GENERATE_PATH: Route(
        vllm.read, vllm.chunks, vllm.whole, {"vllm": vllm.ENGINE}, nests_sampling=True
    ),
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


@dataclass(frozen=True, slots=True)
class Served:
    """What a route is where engines of some dialects serve.

    Attributes:
        is_lacking: some of them do not have it.
        is_translated: some of them get other bodies than the client's.
    """

    is_lacking: bool
    is_translated: bool


def served(path: str, dialects: frozenset[str]) -> Served | None:
    """What the route of a path is there, or None if it does not generate."""
    if (route := ROUTES.get(path)) is None:
        return None
    engines = [route.engines.get(dialect) for dialect in dialects]
    is_translated = any(engine is not None and engine.is_translated for engine in engines)
    return Served(None in engines, is_translated)
