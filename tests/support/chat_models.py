"""Folders with a tokenizer and a chat template, without transformers; and engines that speak."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.router.stub_engine import STREAM, Connection, Script, Seen, chunk, reply

END = 256
"""The id of ``<|im_end|>``; an id below it is a byte in the alphabet's order."""

# As Qwen3's: thinking is dropped from answers before the last user's message.
THINKING = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{%- endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- set content = message.content %}
    {%- if loop.index0 < ns.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' + content }}
    {%- for call in message.tool_calls or [] %}
      {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
    {{- '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# The prompt ends within the thinking, which the template does not write into the history.
ANSWER = "<|im_start|>assistant\n' }}{% endif %}"
THINKS_FIRST = THINKING.replace(ANSWER, ANSWER.replace("\n", "\n<think>\n"))

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

_MODELS = b'{"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]}'


def write_chat_model(
    folder: Path,
    template: str = THINKING,
    *,
    special: Sequence[str] = (),
    eos: str = "<|im_end|>",
    vocabulary_size: int = 0,
) -> Path:
    """One token per byte, three special ones, and ``special``; skips where no tokenizers are.

    Args:
        vocabulary_size: with so many tokens at least, as engines have that say what they like.
    """
    pytest.importorskip("tokenizers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
    names = (*names, *(name for name in special if name not in names))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    num_words = max(0, vocabulary_size - tokenizer.get_vocab_size())
    tokenizer.add_tokens([f"word{number} " for number in range(num_words)])
    assert tokenizer.token_to_id("<|im_end|>") == END
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def speaking(
    folder: Path,
    say: Callable[[str], str],
    *,
    dies_after: Callable[[], int | None] = lambda: None,
    begin: str = "<|im_start|>assistant\n",
    end_of: Callable[[str], str] = lambda answer: "<|im_end|>",
    num_cached: int | None = None,
) -> Script:
    """An engine that answers a prompt's text with ``say``, four tokens an event, with its end.

    Its model is ``policy``.

    Args:
        begin: of an answer, whose first tokens may be in the prompt; empty if they are not.
        end_of: the token that ends an answer.
        num_cached: tokens of each prompt that it reports as cached; None: it reports none.
        dies_after: a number of tokens after which the connection breaks; None: it does not.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    async def script(connection: Connection, seen: Seen) -> None:
        if seen.target == "/v1/models":
            await reply(_MODELS)(connection, seen)
            return
        raw = seen.json
        prompt = raw["input_ids"]
        text, begun = text_of(prompt), ""
        if begin:
            text, _, begun = text.rpartition(begin)
        answer = say(text)
        end = tokenizer.token_to_id(end_of(answer))
        whole = [*tokenizer.encode(answer, add_special_tokens=False).ids, end]
        ids = whole[len(tokenizer.encode(begun, add_special_tokens=False).ids) :]
        if (budget := raw["sampling_params"]["max_new_tokens"]) is not None:
            ids = ids[:budget]
        limit = dies_after()
        await connection.send(STREAM)
        for num in [*range(4, len(ids), 4), len(ids)]:
            if limit is not None and num > limit:
                connection.reset()
                raise ConnectionResetError
            skips = raw["sampling_params"].get("skip_special_tokens", True)
            event = _event(tokenizer, ids[:num], num == len(ids), end, skips, num_cached)
            await connection.send(chunk(event))
        await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    return script


def _event(
    tokenizer: Any,
    ids: list[int],
    is_last: bool,
    end: int,
    skips: bool,
    num_cached: int | None,
) -> bytes:
    finish = None
    if is_last:
        finish = {"type": "stop", "matched": end}
        if ids[-1] != end:
            finish = {"type": "length", "length": len(ids)}
    meta = {
        "id": "r",
        "finish_reason": finish,
        "completion_tokens": len(ids),
        "weight_version": "7",
        "output_token_logprobs": [[logprob_of(one), one, None] for one in ids],
    }
    if num_cached is not None:
        meta["cached_tokens"] = num_cached
    shown = ids[:-1] if ids[-1:] == [end] else ids  # engines leave out what ended an answer
    text = tokenizer.decode(shown, skip_special_tokens=skips)
    payload = {"text": text, "output_ids": ids, "meta_info": meta}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def logprob_of(token_id: int) -> float:
    """What a speaking engine reports for a token."""
    return -token_id / 1000
