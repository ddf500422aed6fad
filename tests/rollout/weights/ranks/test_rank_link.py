"""The messages of ranks through a store whose host may be frozen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import RankFailure

pytest.importorskip("torch")
from rollout.weights.ranks import messages
from rollout.weights.ranks.link import RankLink, SharedTexts
from rollout.weights.ranks.messages import (
    EnginesNotNeeded,
    ErrorText,
    MakeBucket,
    Message,
    Share,
    Stop,
    Wait,
    decode,
    encode,
)
from rollout.weights.ranks.protocol import Get, PushRound, Put

pytestmark = pytest.mark.embedded


class FrozenStore:
    """A ``TCPStore`` whose host does not run: a call waits until it is thawed."""

    def __init__(self) -> None:
        self.thawed = threading.Event()
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            self.thawed.wait()
            raise RuntimeError("the test is over")

        return call


def test_a_rank_does_not_wait_for_a_frozen_rank_0() -> None:
    frozen = FrozenStore()
    link = RankLink(1, 2, SharedTexts(frozen, frozen, answer_s=0.2))
    started = time.monotonic()
    try:
        with pytest.raises(RankFailure, match=r"^rank 0 has sent nothing within 1 s"):
            link.run(
                PushRound("p", 1, 2, timeout_s=1).follow(EnginesNotNeeded()), lambda step: None
            )
        assert 1 < time.monotonic() - started < 5
        # What stops rank 0 when it goes on.
        assert [call for call in frozen.calls if call[0] == "compare_set"]
    finally:
        frozen.thawed.set()


def test_a_message_that_nobody_takes_is_left_to_be_taken() -> None:
    frozen = FrozenStore()
    messages = SharedTexts(frozen, frozen, answer_s=0.1)
    try:
        messages.put("k", "{}")
        messages.delete(["k"])
        assert messages.get(["k", "l"], 0.1) == [None, None]
        with pytest.raises(TimeoutError):
            messages.claim("k", "{}")
    finally:
        frozen.thawed.set()


@pytest.mark.parametrize("call", ["set", "wait", "multi_get"])
def test_the_end_of_rank_0_has_one_text_whatever_the_store_says(call: str, tmp_path: Path) -> None:
    """Also before the first push: rank 0 may have left when this rank asks where the others are."""

    class Ended:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def called(*arguments: Any) -> None:
                if name == call:
                    raise RuntimeError("Connection reset by peer [127.0.0.1]:741")

            return called

    def steps() -> Any:
        yield Put("k", Wait())
        yield Get(("k",), 1.0)

    link = RankLink(1, 2, SharedTexts(Ended(), Ended(), answer_s=5))
    for ask in (partial(link.run, steps(), lambda other: None), partial(link.hosts, str(tmp_path))):
        with pytest.raises(RankFailure, match=r"^rank 0 has ended, and the push with it$"):
            ask()


MESSAGES: list[Message] = [
    Wait(),
    MakeBucket(3),
    Share("ab", False, {"shared_memory 0": {"path": "/dev/shm/x"}}, {"w": "1"}, num_bytes=8),
    Stop(ErrorText("WeightMismatch", "no", {"tensor": "w"})),
]


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_message_of_another_version_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(messages, "VERSION", "0.0.9")
        older = encode(MakeBucket(3))

    class Older:
        def wait(self, *arguments: Any) -> None:
            """All messages are there."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [older.encode() for _ in keys]

        def set(self, key: str, text: str) -> None:
            """Rank 0 is no part of this test."""

    link = RankLink(1, 2, SharedTexts(Older(), Older(), answer_s=5))
    wrong = (
        r"^a rank of the trainer runs rollout 0.0.9, and this one .*: all ranks must run the same"
    )
    with pytest.raises(RankFailure, match=wrong):
        link.run(PushRound("p", 1, 2, timeout_s=1).follow(EnginesNotNeeded()), lambda step: None)
    name, version, _ = encode(MakeBucket(3)).split(" ", 2)
    with pytest.raises(RankFailure, match="a message MakeBucket has other fields than here"):
        decode(f'{name} {version} {{"number": 3}}')
