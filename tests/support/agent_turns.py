"""Random turns of sessions, what a tree of them is, and a worker that writes until it is killed."""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.agents.model.alignment import Checkpoint, Drift
from rollout.agents.turns.files import SessionFiles
from rollout.agents.turns.store import SessionStore
from rollout.agents.turns.tree import Generated, Prompt, Turn, TurnTree
from rollout.agents.wire.messages import History, Message, history_of

STOP = FinishReason("stop", 2)
_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=5)
_TEXTS = st.text(max_size=8)  # half of surrogate pairs, too
_NUMBERS = st.none() | st.integers(0, 2**53)


@st.composite
def generations(draw: Any) -> Generated:
    """With log-probs of all bits that a double can have."""
    ids = draw(_IDS)
    logprobs = draw(st.lists(st.floats(), min_size=len(ids), max_size=len(ids)))
    return Generated(
        ids,
        logprobs,
        tuple(draw(st.lists(st.builds(VersionSpan, _TEXTS, st.just(0), st.just(1)), max_size=2))),
        draw(st.builds(FinishReason, _TEXTS, st.none() | st.integers() | _TEXTS, _TEXTS)),
        draw(_TEXTS),
        draw(st.none() | st.binary(max_size=9)),
        draw(st.none() | st.sampled_from(LogprobKind)),
        draw(_NUMBERS),
        draw(_TEXTS),
    )


_CHECKPOINTS = st.builds(
    Checkpoint, st.integers(0, 99), st.integers(0, 99), st.binary(min_size=16, max_size=16)
)
MOVES = st.tuples(
    st.integers(0, 2),  # the session
    st.integers(-3, 9),  # the turn that is continued, of those that it has; below 0 for none
    st.sampled_from(["a", "bb"]),
    _IDS,
    st.sampled_from(Drift),
    _NUMBERS,
    st.lists(_CHECKPOINTS, max_size=2),
    generations(),
)


def turn_of(tree: TurnTree, move: Any) -> tuple[History, Prompt, Generated, Message]:
    """What ``keep`` takes for a turn that continues one of the tree."""
    _, place, word, ids, drift, difference, checkpoints, generated = move
    parent = place % len(tree.turns) if place >= 0 and tree.turns else None
    prompt = Prompt(parent, ids, drift, difference, checkpoints)
    answer = {"role": "assistant", "content": f"<think>{len(tree.turns)}</think>{generated.text}"}
    return history_of([{"role": "user", "content": word}], None), prompt, generated, answer


def facts(turn: Turn) -> tuple[Any, ...]:
    """All of a turn, with the bits of its log-probs."""
    prompt, made = turn.prompt, turn.generated
    return (
        (turn.number, prompt.parent, list(prompt.ids), prompt.drift, prompt.first_difference),
        list(prompt.checkpoints),
        (list(made.ids), made.logprobs.tobytes(), made.versions, made.finish, made.text),
        (made.experts, made.logprob_kind, made.num_cached, made.engine_id),
        (turn.exact, turn.loose, turn.asked, turn.end, turn.num_bytes),
        b"".join(turn.json()),
    )


def facts_of(tree: TurnTree) -> list[Any]:
    """All of a tree, with what its next requests find."""
    next_ones = [[{"role": "user", "content": word}] for word in ("a", "bb", "c")]
    answers = [
        {"role": "assistant", "content": f"<think>{turn.number}</think>{turn.generated.text}"}
        for turn in tree.turns
    ]
    known = [
        tree.known(history_of([*first, answer, *first], None), begun)
        for first in next_ones
        for answer in [*answers, {"role": "assistant", "content": "none"}]
        for begun in ("", answer["content"])
    ]
    paths = [tree.ids(turn) for turn in tree.turns]
    return [[facts(turn) for turn in tree.turns], known, paths]


def store_in(folder: Path, **bounds: Any) -> SessionStore:
    settings = {"max_bytes": 64 << 20, "max_sessions": 10_000, "ttl_s": 1e9} | bounds
    return SessionStore(SessionFiles(str(folder)), **settings)


async def one_turn(
    store: SessionStore,
    session_id: str,
    now_s: float = 0.0,
    *,
    num_tokens: int = 1,
    version: str = "1",
    finish: FinishReason = STOP,
) -> Turn:
    session = await store.begin_turn(session_id, now_s)
    try:
        ids, logprobs = [1] * num_tokens, [-0.1] * num_tokens
        made = Generated(ids, logprobs, (VersionSpan(version, 0, num_tokens),), finish, "")
        answer = {"role": "assistant", "content": str(len(session.tree.turns))}
        history = history_of([{"role": "user", "content": "a"}], None)
        return await store.keep(session, history, Prompt(None, [1]), made, answer)
    finally:
        store.end_turn(session, now_s)


async def _write_until_killed(folder: Path) -> None:
    """Says each turn on a line of its output, when it is kept."""
    store = store_in(folder)
    for number in count():
        turn = await one_turn(store, f"s-{number % 3}", num_tokens=20_000 + number)
        print(number % 3, turn.number, flush=True)


if __name__ == "__main__":
    asyncio.run(_write_until_killed(Path(sys.argv[1])))
