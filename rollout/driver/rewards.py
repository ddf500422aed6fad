"""Common rewards: they compare a sample's text with the right answer in its metadata.

Always true: these rewards are 0.0 or 1.0.  If the metadata has no
answer, the reward raises, so the sample counts as failed and not as wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import string
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import aiohttp

from rollout.core.arguments import Positive, Seconds, checked, wrong, wrong_type
from rollout.core.optional_deps import optional_import
from rollout.core.samples import Sample
from rollout.driver.math_judge.judges import MathJudges
from rollout.driver.stream.hooks import Reward

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_BOXED = r"\boxed{"
_STATED = re.compile(
    r"(?:answer|option|choice)\s*(?:(?:is|:)\s*)?[*_(\[]*([A-Za-z])\b", re.IGNORECASE
)
_STANDALONE = re.compile(r"(?<![A-Za-z'])\(?([A-Z])\)?(?![A-Za-z'])")


def exact_match(key: str = "answer") -> Reward:
    """Whether the text equals an answer after normalisation.

    Args:
        key: of the answer, or the list of answers, in a sample's metadata.
    """
    return lambda sample: float(
        _normalized(sample.text) in {_normalized(answer) for answer in _answers(sample, key)}
    )


def multiple_choice(key: str = "answer") -> Reward:
    r"""Whether the letter that the text chooses is the right one.

    The chosen letter is the last in ``\boxed{}``, else the last after "answer is" and the like,
    else the last standalone capital.

    Args:
        key: see ``exact_match``.
    """
    return lambda sample: float(
        _chosen_letter(sample.text) in {answer.strip().upper() for answer in _answers(sample, key)}
    )


@checked
def math(key: str = "answer", *, timeout_s: Seconds = 10.0) -> Reward:
    """Whether the text's last mathematical expression equals the answer, by ``math-verify``.

    The reward is async.  Up to four processes judge, so neither ``$9^{9^{9}}$`` nor other texts of
    a model stop the driver or take its memory: a judgement that takes too long, needs more than
    2 GiB or fails gives 0.0, and the first that end a process are logged.  Of a text the last
    262 144 characters are read.  ``reward_timeout_s`` of ``Hooks`` also counts the wait for a
    process that is free.

    Args:
        key: see ``exact_match``.
        timeout_s: of one judgement; its process is killed then, and the next starts another.

    Raises:
        ConfigError: math-verify is not installed, or the time is wrong.
    """
    with optional_import("data", "rewards.math needs math-verify, which is not installed"):
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError
    judges = MathJudges(timeout_s)

    async def reward(sample: Sample) -> float:
        answers = [_as_math(answer) for answer in _answers(sample, key)]
        return float(await judges.is_right(sample.text, answers))

    return reward


def _normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: SQuAD's normalisation."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _chosen_letter(text: str) -> str:
    """The letter that a text chooses, or empty if there is none."""
    inside = _boxed(text)
    if inside:
        found = re.search(r"[A-Za-z]", inside.replace(r"\text", ""))
        return found[0].upper() if found else ""
    for pattern in (_STATED, _STANDALONE):
        letters = pattern.findall(text)
        if letters:
            return str(letters[-1]).upper()
    return ""


def _boxed(text: str) -> str:
    r"""The content of the last ``\boxed{...}``, braces balanced, or empty if there is none."""
    start = text.rfind(_BOXED)
    if start < 0:
        return ""
    depth, begin = 1, start + len(_BOXED)
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return ""


def _as_math(answer: str) -> str:
    return answer if "$" in answer or _BOXED in answer else f"${answer}$"


def in_thread(reward: Callable[[Sample], float]) -> Reward:
    """Call a slow synchronous reward in a thread, so that it does not block the driver.

    Args:
        reward: a plain function.

    Raises:
        TypeError: it is none.
    """
    if not callable(reward) or inspect.iscoroutinefunction(reward):
        raise wrong_type("reward", reward, "a plain function of a sample")
    return lambda sample: asyncio.to_thread(reward, sample)


class RemoteReward:
    """A reward computed by a server: POST of prompt, text, ids and metadata to ``url``.

    The server returns ``{"reward": number}``.  Each call is one try; ``reward_timeout_s`` and
    ``reward_tries`` of ``Hooks`` set timeout and retries.  Use it as an async context manager, or
    call ``close``.

    Args:
        url: http or https.
        max_at_once: calls at the same time; more wait.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """

    @checked
    def __init__(self, url: str, *, max_at_once: Positive = 64) -> None:
        if not url.startswith(("http://", "https://")):
            raise wrong("url", url, "an http or https address")
        self._url = url
        self._max_at_once = max_at_once
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, sample: Sample) -> float:
        """The reward.

        Args:
            sample: with its text.

        Raises:
            ValueError: the response has no reward.
            aiohttp.ClientError: there is no response, or it is an HTTP error.
        """
        body = {
            "prompt_ids": sample.prompt_ids,
            "output_ids": sample.output_ids,
            "text": sample.text,
            "metadata": sample.metadata,
        }
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._max_at_once)
            self._session = aiohttp.ClientSession(connector=connector)
        async with self._session.post(self._url, json=body) as response:
            response.raise_for_status()
            reply = await response.json()
        if not isinstance(reply, dict) or "reward" not in reply:
            raise ValueError(f"no reward in the response of {self._url}: {str(reply)[:200]}")
        return float(reply["reward"])

    async def close(self) -> None:
        """Close the connections; the next call opens new ones."""
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
    answers = [str(answer) for answer in value] if isinstance(value, list | tuple) else [str(value)]
    if not answers:
        raise ValueError(f"metadata {key!r} is an empty list")
    return answers


__all__ = ["RemoteReward", "exact_match", "in_thread", "math", "multiple_choice"]
