"""A router that was started again has no sessions of before, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rollout.router.conftest import Bench, MakeBench, router_config
from tests.support.chat_models import speaking, write_chat_model

FIRST = [{"role": "user", "content": "one"}]
LATER = [*FIRST, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]


async def chat(bench: Bench, messages: list[Any], session: str = "s") -> Any:
    return await bench.ask(f"/sessions/{session}/v1/chat/completions", json={"messages": messages})


@pytest.mark.parametrize("is_successor", [False, True])
async def test_a_chat_that_has_begun_is_no_first_turn_behind_a_lost_router(
    make_bench: MakeBench, tmp_path: Path, is_successor: bool
) -> None:
    model = write_chat_model(tmp_path)
    config = router_config(tokenizer_path=str(model))
    speaks = speaking(model, lambda text: "an answer")
    bench = await make_bench(speaks, config=config, is_successor=is_successor)
    response = await chat(bench, LATER)
    async with bench.client.get("/sessions/s") as asked:
        status = asked.status
    if not is_successor:  # its first messages are an example
        assert (response.status, status) == (200, 200)
        return
    assert (response.status, response.json["error"]["type"]) == (410, "session_lost")
    assert "lost with the router" in response.json["error"]["message"]
    assert status == 410
    assert (await chat(bench, FIRST, "other")).status == 200
    assert (await chat(bench, LATER, "other")).status == 200


@pytest.mark.parametrize("is_closed", [False, True], ids=["lost", "closed"])
async def test_no_turn_goes_on_with_a_session_of_a_lost_router(
    make_bench: MakeBench, tmp_path: Path, is_closed: bool
) -> None:
    """A first turn has nothing in front of it: it is a new session, also under an id of before."""
    model = write_chat_model(tmp_path)
    config = router_config(tokenizer_path=str(model))
    speaks = speaking(model, lambda text: "an answer")
    before = await make_bench(speaks, config=config)
    assert (await chat(before, FIRST)).status == 200
    if is_closed:
        async with before.client.delete("/sessions/s") as deleted:
            assert deleted.status == 200
        refused = await chat(before, LATER)
        assert (refused.status, refused.json["error"]["type"]) == (410, "session_closed")
        refused = await chat(before, FIRST)
        assert (refused.status, refused.json["error"]["type"]) == (410, "session_closed")
    again = await make_bench(speaks, config=config, is_successor=True)
    refused = await chat(again, LATER)
    assert (refused.status, refused.json["error"]["type"]) == (410, "session_lost")
    async with again.client.get("/sessions/s") as asked:
        assert asked.status == 410
    async with again.client.delete("/sessions/s") as deleted:
        assert deleted.status in (404, 410)
    assert (await chat(again, FIRST)).status == 200
    async with again.client.get("/sessions/s") as asked:
        assert len((await asked.json())["turns"]) == 1
