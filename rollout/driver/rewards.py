"""Rewards that people expect, made of a sample's text and what its metadata says is right.

Always true: a reward made here is 0.0 or 1.0, or for ``f1`` between them; a sample without the
metadata it is to be judged by raises, and is counted as failed rather than as wrong.
"""

from __future__ import annotations

import asyncio
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from rollout.driver.hooks import Reward
from rollout.extras import extra
from rollout.samples import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BOXED = r"\boxed{"
_SAID = re.compile(r"(?:answer|option|choice)\s*(?:is|:)?\s*[*_(\[]*([A-Za-z])\b", re.IGNORECASE)
_ALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's way to compare answers."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(key: str = "answer") -> Reward:
    """Whether the text is the answer, or one of the answers, after normalisation."""
    return lambda sample: float(
        any(normalized(sample.text) == normalized(one) for one in _answers(sample, key))
    )


def f1(key: str = "answer") -> Reward:
    """Harmonic mean of precision and recall over words, of the best answer."""
    return lambda sample: max(_f1(sample.text, one) for one in _answers(sample, key))


def _f1(said: str, right: str) -> float:
    ours, theirs = normalized(said).split(), normalized(right).split()
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def multiple_choice(key: str = "answer") -> Reward:
    r"""Whether the letter that the text settles on is the right one.

    It is the last in ``\boxed{}``, else the last after "answer is" and the like, else the last
    capital that stands alone.
    """
    return lambda sample: float(
        chosen_letter(sample.text) in {one.strip().upper() for one in _answers(sample, key)}
    )


def chosen_letter(text: str) -> str:
    """The choice a text makes; empty where it makes none."""
    inside = boxed(text)
    if inside:
        found = re.search(r"[A-Za-z]", inside.replace(r"\text", ""))
        return found[0].upper() if found else ""
    for pattern in (_SAID, _ALONE):
        letters = pattern.findall(text)
        if letters:
            return str(letters[-1]).upper()
    return ""


def boxed(text: str) -> str:
    r"""What stands in the last ``\boxed{...}``, braces balanced; empty where there is none."""
    start = text.rfind(_BOXED)
    if start < 0:
        return ""
    depth, begin = 1, start + len(_BOXED)
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return ""


def math(key: str = "answer") -> Reward:
    """Whether the text's last mathematical expression equals the answer, by ``math-verify``.

    Raises:
        ConfigError: math-verify is not installed.
    """
    with extra("data", "rewards.math needs math-verify, which is not installed"):
        from math_verify import parse, verify

    def judge(sample: Sample) -> float:
        # Its own deadlines use signals, which only the main thread can have.
        said = parse(sample.text, parsing_timeout=None)
        return float(
            any(
                verify(parse(_as_math(one), parsing_timeout=None), said, timeout_seconds=None)
                for one in _answers(sample, key)
            )
        )

    return judge


def _as_math(answer: str) -> str:
    return answer if "$" in answer or _BOXED in answer else f"${answer}$"


def in_thread(reward: Callable[[Sample], float]) -> Reward:
    """A slow synchronous reward, called so that it does not hold up the driver."""

    def judge(sample: Sample) -> Awaitable[float]:
        return asyncio.to_thread(reward, sample)

    return judge


class RemoteReward:
    """Asks a server: POST of prompt, text, ids and metadata; ``{"reward": number}`` comes back.

    Give ``Hooks`` its ``reward_timeout_s`` and ``reward_tries``: each call is one try.  Use as
    an async context manager or ``close`` it.

    Args:
        max_at_once: calls; more wait.
    """

    def __init__(self, url: str, *, max_at_once: int = 64) -> None:
        self._url = url
        self._max_at_once = max_at_once
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, sample: Sample) -> float:
        """The reward.

        Raises:
            ValueError: the answer has none.
            aiohttp.ClientError: there is no answer, or it is an error.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_at_once)
            self._session = aiohttp.ClientSession(connector=connector)
        body = {
            "prompt_ids": sample.prompt_ids,
            "output_ids": sample.output_ids,
            "text": sample.text,
            "metadata": sample.metadata,
        }
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        if not isinstance(answer, dict) or "reward" not in answer:
            raise ValueError(f"no reward in the answer of {self._url}: {str(answer)[:200]}")
        return float(answer["reward"])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> RemoteReward:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _answers(sample: Sample, key: str) -> Sequence[str]:
    if key not in sample.metadata:
        raise KeyError(f"metadata has no {key!r}; it has {', '.join(sample.metadata) or 'nothing'}")
    value: Any = sample.metadata[key]
    answers = [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
    if not answers:
        raise ValueError(f"metadata {key!r} is an empty list")
    return answers
