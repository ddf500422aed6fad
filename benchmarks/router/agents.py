"""Turns of one agent by the length of its history, beside a peer that does the same work.

Each turn sends all messages so far and two new ones.  ``agents`` has exact ids: a worker of our
agents' program makes the prompt and sends it to our router; ``renderers`` is verifiers' renderer
client as a server (``renderers_peer``), which sends it to the same router in vLLM's form.
``spliced`` is the router alone with the same bodies on ``/generate``, which it passes on unread.
CPU is that of router and worker; ``rendered`` are turns of the peer after the first that were no
bridge.  ``first_s`` is the first turn, whose history is tokenised as a
whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import aiohttp

from tests.support.chat_models import write_chat_model

NUMS_OF_TOKENS = {"4k": 4096, "64k": 65_536, "256k": 262_144}
KINDS = {"agents": "turn", "renderers": "inference", "spliced": "turn"}
"""Targets, and the replies that their engines give."""
PATHS = dict.fromkeys(KINDS, "/sessions/{}/v1/chat/completions") | {"spliced": "/generate"}
_VOCABULARY = 8192
_MESSAGE_CHARACTERS = 2000
_QWEN3 = ("think", "tool_call", "tool_response")
_MARKS = [mark for name in _QWEN3 for mark in (f"<{name}>", f"</{name}>")]


def write_model(folder: Path) -> Path:
    """A chat model whose tokens have about four characters, as those of real models."""
    from tokenizers import Tokenizer, trainers

    write_chat_model(folder, special=_MARKS)
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
    target: str,
    session: str,
    messages: list[dict[str, str]],
    num_turns: int,
    cpu_s: Callable[[], float],
) -> dict[str, float]:
    """The first turn, and turns per second and CPU for those after it."""
    messages = [*messages[: len(messages) // 2 * 2], {"role": "user", "content": "begin"}]
    path, used_s, first_s = PATHS[target].format(session), 0.0, 0.0
    errors = num_rendered = 0
    began_s = time.perf_counter()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for number in range(num_turns + 1):
            if number == 1:
                first_s = time.perf_counter() - began_s
                began_s, used_s = time.perf_counter(), cpu_s()
            stop = [f"kind={KINDS[target]}"]
            body = json.dumps({"messages": messages, "max_tokens": 128, "stop": stop}).encode()
            headers = {"content-type": "application/json"}
            async with client.post(path, data=BytesIO(body), headers=headers) as response:
                errors += response.status != 200
                reply = await response.json()
            num_rendered += bool(number and reply.get("is_rendered"))
            choice, *_ = reply.get("choices") or [{}]
            content = choice.get("message", {}).get("content", "x" * 64)
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": f"{number}: " + "and then? " * 50})
        elapsed_s, used_s = time.perf_counter() - began_s, cpu_s() - used_s
    return {
        "first_s": first_s,
        "turns_per_s": num_turns / elapsed_s,
        "cpu_ms_per_turn": used_s * 1e3 / num_turns,
        "errors": float(errors),
        "rendered": float(num_rendered),
    }
