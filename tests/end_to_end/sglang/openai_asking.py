"""Completions and chats that may go on elsewhere, and whether their answers are right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from tests.engines.embedded.reference import greedy
from tests.support.generate_asking import TOKENS, text_of
from tests.support.load import PROMPTS
from tests.support.referee import Answer, Span

CHATS = [[{"role": "user", "content": f"Say {number}"}] for number in range(6)]


class AskingOpenAI:
    """Two completions, two chats, and so on; four streams, four answers in one.

    Attributes:
        num_events: of each stream so far.
        completions: by the engine's own tokens and log-probabilities.
        chats: number of the chat and the text of its answer.
        begun_chats: of streams that ended with an error, because SGLang gives no ids of a chat.
        num_failovers: of the replies that are not streamed; only these report it.
    """

    def __init__(self, session: aiohttp.ClientSession, version: int) -> None:
        self._session = session
        self._version = version
        self.num_events: Counter[int] = Counter()
        self.completions: list[Answer] = []
        self.chats: list[tuple[int, str]] = []
        self.begun_chats: list[tuple[int, str]] = []
        self.num_failovers = 0

    async def ask(self, number: int) -> None:
        is_chat, is_streamed = number // 2 % 2 == 1, number // 4 % 2 == 0
        body = {
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": is_streamed,
            **({"stream_options": {"include_usage": True}} if is_streamed else {}),
        }
        if is_chat:
            path, more = "/v1/chat/completions", {"messages": CHATS[number % len(CHATS)]}
        else:
            prompt = list(PROMPTS[number % len(PROMPTS)])
            more = {"prompt": prompt, "logprobs": 0, "return_token_ids": True}
            path = "/v1/completions"
        events = await self._events(number, path, body | more)
        if not is_streamed:
            self.num_failovers += events[0]["metadata"]["num_failovers"]
        is_broken = "error" in events[-1]
        assert not is_broken or (is_chat and is_streamed), events[-1]
        choices = [choice for event in events for choice in event.get("choices", [])]
        if is_broken:
            self.begun_chats.append((number % len(CHATS), _text_of_chat(choices)))
            return
        ends = [one["finish_reason"] for one in choices if one["finish_reason"]]
        assert ends == ["length"], ends
        usages = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        assert usages == [TOKENS], usages
        if is_chat:
            self.chats.append((number % len(CHATS), _text_of_chat(choices)))
        else:
            self.completions.append(self._answer(number, choices))

    async def _events(self, number: int, path: str, body: dict[str, Any]) -> list[Any]:
        headers = {"X-Token-Failover": "on"}
        async with self._session.post(path, json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
            if not body["stream"]:
                return [await reply.json()]
            events = []
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line[6:]))
                    self.num_events[number] += 1
            return events

    def _answer(self, number: int, choices: list[Any]) -> Answer:
        ids = [token for one in choices for token in one.get("token_ids") or ()]
        told = [one["logprobs"]["token_logprobs"] for one in choices if one.get("logprobs")]
        assert "".join(one["text"] for one in choices) == text_of(ids)
        return Answer(
            rid=f"completion {number}",
            prompt=PROMPTS[number % len(PROMPTS)],
            output=tuple(ids),
            logprobs=tuple(one for part in told for one in part),
            spans=(Span(self._version, 0, len(ids)),),
            kind="length",
        )

    def wrong_chats(self, model: Path) -> list[str]:
        """Those that are not what transformers says."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        expected = []
        for messages in CHATS:
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
            expected.append(text_of(greedy(model, prompt, TOKENS)))
        return [
            f"{text!r}, not {expected[of]!r}" for of, text in self.chats if text != expected[of]
        ] + [
            f"{text!r}, not the beginning of {expected[of]!r}"
            for of, text in self.begun_chats
            if not expected[of].startswith(text)
        ]


def _text_of_chat(choices: list[Any]) -> str:
    parts = [one.get("delta") or one.get("message") or {} for one in choices]
    return "".join(one.get("content") or "" for one in parts)
