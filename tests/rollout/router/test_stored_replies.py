"""A reply that another router takes over has the tokens that the lost one had of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol.adapter_names import UNNAMED
from engines.protocol.logprob_kind import LogprobKind
from rollout.router.http.head_cache import ReplyHead
from rollout.router.proxy.token_reader import OPEN, Again, TokenReader
from rollout.router.state.state_file import StateFile
from rollout.router.state.stored_replies import StoredReplies
from tests.rollout.router.continuation.replies import generate

BODY = b'{"input_ids": [1, 2], "rid": "r", "sampling_params": {"max_new_tokens": 500}}'
KEY = ("/generate", "r", BODY)
STREAM = ReplyHead(200, [(b"content-type", b"text/event-stream")])

# Of each engine: the tokens of each event, the last of which is an abort, and whether it has more.
ENGINES = st.lists(
    st.tuples(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 5), st.booleans()),
    min_size=1,
    max_size=4,
)


def event(ids: list[int], version: int, finish: dict[str, Any] | None) -> bytes:
    meta = {"completion_tokens": len(ids), "finish_reason": finish, "weight_version": str(version)}
    payload = {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


@given(ENGINES)
def test_it_goes_on_after_the_same_tokens(engines: list[tuple[list[int], int, bool]]) -> None:
    state = StateFile.make(1 << 20)
    state.records()
    reply, restored = generate(BODY, 4), generate(BODY, 4)
    assert reply is not None
    assert restored is not None
    tokens, kept, token = TokenReader(reply), StoredReplies(state).of(KEY, UNNAMED), 100
    tokens.keep = kept.add
    for version, (sizes, more, is_aborted) in enumerate(engines):
        tokens.body(version, "sglang")
        kept.begin(version, "sglang", UNNAMED)
        tokens.begin(STREAM)
        ids: list[int] = []
        for size in sizes:
            ids += range(token, token := token + size)
            assert tokens.take(event(ids, version, None), None) is None
        if is_aborted:
            ids += range(token, token := token + more)
            tokens.take(event(ids, version, {"type": "abort"}), None)
            assert isinstance(tokens.take(b"data: [DONE]\n\n", OPEN), Again)
        tokens.lose_engine()
    other = StateFile(state.path, 1 << 20)
    replies = StoredReplies(other)
    replies.load(other.records(), 0.0)
    found = replies.of(KEY, UNNAMED)
    if found.earlier:
        found.restore(restored)
    assert restored.base == reply.base
    assert restored.num_kept == reply.num_kept == reply.base.num
    other.close()
    state.close()


@pytest.mark.parametrize("second", list(LogprobKind))
def test_it_has_the_kind_of_its_log_probs_and_joins_no_other(second: LogprobKind) -> None:
    """The lost router had an engine of the kind ``full``, then the second one."""
    body = BODY.replace(b'"rid"', b'"return_logprob": true, "rid"')
    key, state = ("/generate", "r", body), StateFile.make(1 << 20)
    state.records()
    reply, restored = generate(body, 4), generate(body, 4)
    assert reply is not None
    assert restored is not None
    tokens, kept = TokenReader(reply), StoredReplies(state).of(key, UNNAMED)
    tokens.keep = kept.add
    for version, kind in enumerate((LogprobKind.FULL, second)):
        reply.follow_with(kind)
        tokens.body(version, "sglang")
        kept.begin(version, "sglang", UNNAMED, kind)
        tokens.begin(STREAM)
        ids = [version]
        meta = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, version, None]]}
        meta |= {"finish_reason": None, "weight_version": "3"}
        payload = {"text": "x", "output_ids": ids, "meta_info": meta}
        assert tokens.take(b"data: " + json.dumps(payload).encode() + b"\n\n", None) is None
        tokens.lose_engine()
    replies = StoredReplies(other := StateFile(state.path, 1 << 20))
    replies.load(other.records(), 0.0)
    replies.of(key, UNNAMED).restore(restored)
    assert restored.base == reply.base
    assert restored.base.ids == ([0, 1] if second is LogprobKind.FULL else [1])
    assert restored.logprob_kind is second
    other.close()
    state.close()
