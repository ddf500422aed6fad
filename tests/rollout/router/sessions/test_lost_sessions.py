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
