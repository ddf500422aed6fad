"""Replies to bodies, as the router reads them."""

from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.fast_path import FastReply
from rollout.router.continuation.reply import Reply

GENERATE, VLLM_GENERATE = "/generate", "/inference/v1/generate"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def read(path: str, body: bytes, interval: int = 1, dialects: str = "sglang") -> Reply | None:
    """The reply, which the first of these engines sends unless ``body`` is for another."""
    reply = ROUTES[path].reply(body, interval, frozenset(dialects.split()))
    if reply is not None:
        reply.engine = next(iter(reply.route.engines.values()))
    return reply


def generate(body: bytes, interval: int = 1) -> FastReply | None:
    reply = read(GENERATE, body, interval)
    assert reply is None or isinstance(reply, FastReply)
    return reply


def completion(body: bytes) -> Reply | None:
    return read(COMPLETIONS, body)


def chat(body: bytes, dialects: str = "sglang") -> Reply | None:
    return read(CHAT, body, dialects=dialects)
