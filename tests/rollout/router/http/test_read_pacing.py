from __future__ import annotations

from collections.abc import Callable

import pytest

from rollout.router.http.read_pacing import PAUSE_S, ReadPacing


class Loop:
    """A loop whose clock is set by the test."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []
        self.due: list[Callable[[], None]] = []
        self.pace = ReadPacing(self.due.append, clock=lambda: self.now_s, sleep=self._sleep)

    def _sleep(self, for_s: float) -> None:
        self.slept.append(for_s)
        self.now_s += for_s

    def look(self, *, num_pieces: int, takes_s: float = 0.0) -> None:
        """One turn: so many pieces are read, then what is due is called."""
        for _ in range(num_pieces):
            self.pace.reply_continues()
        self.now_s += takes_s
        due, self.due[:] = list(self.due), []
        for call in due:
            call()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_piece_after_a_quiet_time_is_read_at_once(loop: Loop) -> None:
    loop.look(num_pieces=1)
    loop.now_s += 2 * PAUSE_S
    loop.look(num_pieces=1)
    assert loop.slept == []


def test_pieces_that_arrive_together_are_read_once_a_pause(loop: Loop) -> None:
    loop.look(num_pieces=1)
    for _ in range(10):
        loop.look(num_pieces=16, takes_s=0.0001)
    assert loop.slept == pytest.approx([PAUSE_S - 0.0001] * 10)
    assert loop.now_s == pytest.approx(100.0 + 10 * PAUSE_S)


def test_a_loop_that_is_always_busy_does_not_sleep(loop: Loop) -> None:
    for _ in range(5):
        loop.look(num_pieces=64, takes_s=PAUSE_S)
    assert loop.slept == []


def test_without_pieces_nothing_is_due(loop: Loop) -> None:
    loop.look(num_pieces=3)
    assert loop.due == []
    loop.look(num_pieces=0)
    assert loop.slept == []
