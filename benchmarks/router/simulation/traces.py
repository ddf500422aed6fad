"""Sessions from recorded traces: lengths and order of turns; no text.

``tau_airline.txt``: 200 trajectories of an agent for an airline (gpt-4o, 50 tasks, four each) from
github.com/sierra-research/tau-bench, ``historical_trajectories/gpt-4o-airline.json`` at commit
59a200c, MIT licence.  A line is a trajectory: its task, then for each answer ``t`` (a tool) or
``u`` (a user) before it, the new tokens, and the tokens of the answer.  A token is four characters
of the recorded text.  Times were not recorded: waits are drawn by seed, for a tool with median 1 s
and for a user, who is a model, with median 2 s (log-normal).

``kimi_conversations.txt``: the 182 conversations with at least five turns of an hour of Kimi, from
github.com/kvcache-ai/Mooncake, ``FAST25-release/traces/conversation_trace.jsonl`` at commit
3b5a594, Apache-2.0 licence.  A line is a conversation, put together from the hashes of its
prefixes: when it begins in seconds, prompt and answer of its first turn, then for each further one
the recorded seconds since the turn before, the new tokens and the answer.  They are chats of
people, not agents: that trace's file for agents was not to be had.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.router.simulation.engine import Turn

_FOLDER = Path(__file__).parent
_TAU_ROOT = 1539
"""The system prompt of the airline's agent: 6155 characters."""
_KIMI_ROOT = 512
"""The first block of all conversations."""
_MEDIAN_WAIT_S = {"t": 1.0, "u": 2.0}
_SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Wait:
    """When a turn is sent: so long after the answer before, or after the arrival before."""

    after_answer_s: float = 0.0
    after_arrival_s: float = 0.0

    def next_s(self, arrived_s: float, answered_s: float) -> float:
        return max(answered_s + self.after_answer_s, arrived_s + self.after_arrival_s)


@dataclass(frozen=True, slots=True)
class Part:
    """What a turn adds: new tokens of the prompt, and the answer."""

    wait: Wait
    new: int
    output: int


@dataclass(frozen=True, slots=True)
class Session:
    """A session of one agent.

    Attributes:
        root: tokens that all sessions begin with.
        group: sessions of one task.
    """

    group: int
    root: int
    begins_s: float
    turns: tuple[Part, ...]

    def turn(self, session: int, number: int) -> Turn:
        before = sum(part.new + part.output for part in self.turns[:number])
        part = self.turns[number]
        return Turn(session, number, self.root + before + part.new, self.root, part.output)


@lru_cache
def _lines(name: str) -> tuple[str, ...]:
    return tuple((_FOLDER / name).read_text().splitlines())


def tau_airline(seed: int, times: int = 1) -> list[Session]:
    """The agents of the airline, group by group as a driver sends them; all may begin at once.

    Args:
        times: how often each trajectory runs, each with waits of its own.
    """
    rng = random.Random(seed)
    sessions = []
    for line in _lines("tau_airline.txt"):
        task, *parts = line.split()
        for _ in range(times):
            turns = tuple(_tau_parts(parts, rng))
            sessions.append(Session(int(task), _TAU_ROOT, 0.0, turns))
    by_group: dict[int, list[Session]] = {}
    for session in sessions:
        by_group.setdefault(session.group, []).append(session)
    groups = list(by_group.values())
    rng.shuffle(groups)
    return [session for group in groups for session in group]


def _tau_parts(parts: list[str], rng: random.Random) -> Iterator[Part]:
    for number, part in enumerate(parts):
        new, output = part[1:].split(":")
        wait_s = _MEDIAN_WAIT_S[part[0]] * rng.lognormvariate(0.0, _SIGMA) if number else 0.0
        yield Part(Wait(after_answer_s=wait_s), int(new), int(output))


def kimi_conversations(seed: int, speed: float, times: int = 1) -> list[Session]:
    """The conversations, as they begin; ``seed`` moves beginnings and gaps by up to a tenth.

    Args:
        speed: all times are divided by it, so that an hour is less.
        times: how often each conversation runs.
    """
    rng = random.Random(seed)
    sessions: list[Session] = []
    for line in _lines("kimi_conversations.txt"):
        begins, first, *rest = line.split()
        for _ in range(times):
            new, output = map(int, first.split(":"))
            turns = [Part(Wait(), max(1, new - _KIMI_ROOT), output)]
            for part in rest:
                gap, new, output = map(int, re.split("[+:]", part))
                gap_s = gap * rng.uniform(0.9, 1.1) / speed
                turns.append(Part(Wait(after_arrival_s=gap_s), new, output))
            begins_s = int(begins) * rng.uniform(0.9, 1.1) / speed
            sessions.append(Session(len(sessions), _KIMI_ROOT, begins_s, tuple(turns)))
    return sorted(sessions, key=lambda session: session.begins_s)
