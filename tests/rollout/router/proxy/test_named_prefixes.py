"""An engine with a store of prefixes that no push clears gets only requests that it can name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rollout.router.conftest import MakeBench
from tests.rollout.router.stub_engine import reply


async def with_store(make_bench: MakeBench) -> Any:
    bench = await make_bench(reply(b"{}"))
    await bench.host.set_members(2, [bench.member(0, needs_names=True)])
    return bench


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/embeddings", "/v1/score", "/v1/chat/completions/batch"]
)
async def test_a_path_without_a_key_is_refused(make_bench: MakeBench, path: str) -> None:
    bench = await with_store(make_bench)
    got = await bench.ask(path)
    assert got.status == 400
    assert (
        f"{path}: a request there has no name of its weight version" in got.json["error"]["message"]
    )
    assert not bench.engines[0].seen


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_a_path_with_a_key_has_run_and_version_in_it(
    make_bench: MakeBench, path: str
) -> None:
    bench = await with_store(make_bench)
    await bench.host.set_gate("open", weight_version=3)
    keys = []
    for own in ({}, {"extra_key": "mine"}, {"extra_key": ["a"]}, {"extra_key": 7}):
        got = await bench.ask(path, json={"text": "a", **own})
        assert got.status == 200
        keys.append(bench.engines[0].seen[-1].json["extra_key"])
    run = keys[0].removesuffix(":v3")
    assert run
    assert keys[1:] == [f"{run}:v3:mine", [f"{run}:v3:a"], f"{run}:v3:7"]


async def test_no_weights_are_asked_for_tokens(make_bench: MakeBench) -> None:
    bench = await with_store(make_bench)
    assert (await bench.ask("/tokenize")).status == 200


async def test_what_is_not_json_is_refused_too(make_bench: MakeBench) -> None:
    bench = await with_store(make_bench)
    got = await bench.ask("/generate", data=json.dumps([1]).encode())
    assert got.status == 400


async def test_other_engines_answer_every_path(make_bench: MakeBench) -> None:
    bench = await make_bench(reply(b"{}"))
    assert (await bench.ask("/v1/messages")).status == 200
