"""Turns of one agent by the length of its history, beside proxies that do not tokenize.

Each turn sends all messages so far and two new ones.  ``sessions`` has exact ids: the router
renders the chat template, and tokenizes what is new.  ``spliced`` is the same router with the same
bodies on ``/generate``, which it passes on unread; ``fastapi_httpx`` is a plain proxy with these.
``first_s`` is the first turn, whose history is tokenized as a whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.router import load
from tests.support.chat_models import write_chat_model

NUMS_OF_TOKENS = {"4k": 4096, "64k": 65_536, "256k": 262_144}
TARGETS = {
    "sessions": ("ours", "/sessions/{}/v1/chat/completions"),
    "spliced": ("ours", "/generate"),
    "fastapi_httpx": ("fastapi_httpx", "/generate"),
}
_VOCABULARY = 8192
_MESSAGE_CHARACTERS = 2000
_ANSWER = {"role": "assistant", "content": "x" * 64}  # of the stub engine


def write_model(folder: Path) -> Path:
    """A chat model whose tokens have about four characters, as those of real models."""
    from tokenizers import Tokenizer, trainers

    write_chat_model(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    added = tokenizer.get_added_tokens_decoder().values()
    alphabet = [one for one in tokenizer.get_vocab() if len(one) == 1]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([corpus()[: 1 << 20]], trainer)
    tokenizer.add_special_tokens(list(added))
    tokenizer.save(file)
    return folder


def corpus() -> str:
    """The library's own text."""
    root = Path(__file__).parents[2]
    files = sorted(path for name in ("rollout", "engines") for path in (root / name).rglob("*.py"))
    text = "".join(path.read_text() for path in files)
    return text.replace("kind=", "kind ")  # which the stub engine looks for


def history(folder: Path, num_tokens: int) -> list[dict[str, str]]:
    """Messages of about so many tokens, in turns."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = corpus()
    sample = text[: 1 << 18]
    per_token = len(sample) / len(tokenizer.encode(sample).ids)
    num = int(num_tokens * per_token / _MESSAGE_CHARACTERS)
    parts = [
        text[place % len(text) : place % len(text) + _MESSAGE_CHARACTERS]
        for place in range(0, num * _MESSAGE_CHARACTERS, _MESSAGE_CHARACTERS)
    ]
    return [
        {"role": "assistant" if place % 2 else "user", "content": part}
        for place, part in enumerate(parts)
    ]


async def converse(
    port: int,
    path: str,
    messages: list[dict[str, str]],
    num_turns: int,
    cpu_s: Callable[[], float],
) -> dict[str, float]:
    """The first turn, and turns per second and CPU of the router for those after it."""
    messages = [*messages[: len(messages) // 2 * 2], {"role": "user", "content": "begin"}]
    client = await load.connect(port)
    num_errors, began_s, used_s, first_s = 0, time.perf_counter(), 0.0, 0.0
    for number in range(num_turns + 1):
        if number == 1:
            first_s = time.perf_counter() - began_s
            began_s, used_s = time.perf_counter(), cpu_s()
        num_errors += not await client.send(_request(path, messages), "agent")
        messages += [_ANSWER, {"role": "user", "content": f"{number}: " + "and then? " * 50}]
    elapsed_s, used_s = time.perf_counter() - began_s, cpu_s() - used_s
    assert client.transport is not None
    client.transport.close()
    return {
        "first_s": first_s,
        "turns_per_s": num_turns / elapsed_s,
        "cpu_ms_per_turn": used_s * 1e3 / num_turns,
        "errors": float(num_errors),
    }


def _request(path: str, messages: list[dict[str, str]]) -> bytes:
    payload: dict[str, Any] = {"messages": messages, "max_tokens": 128, "stop": ["kind=turn"]}
    body = json.dumps(payload).encode()
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % (
        path.encode()
    ) + b"content-length: %d\r\n\r\n%s" % (len(body), body)
