"""Contracts of requests over HTTP: what clients send and get, and what engines get."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from engines.fake import faults
from tests.rollout.router.conftest import MakeBench, router_config
from tests.rollout.router.served_vllm import PROMPT, events_of, served
from tests.rollout.router.stub_engine import Connection, Hold, Seen, reply, stream
from tests.support import waits

pytestmark = pytest.mark.timeout(60)
CUT = {"top_p": 0.5}
JSON = ("Content-Type: application/json",)
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
}
"""At version 3."""


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("in_body", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_each_route_keeps_a_contract(path: str, in_body: bool, kind: str) -> None:
    if kind == "sglang" and path != "/generate":
        pytest.skip("the fake engine has no such route")
    async with served(kind) as whole:
        for version, status in ((3, 200), (2, 409)):
            more = {"weight_version": version} if in_body else {}
            headers = {} if in_body else {"X-Weight-Version": str(version)}
            for stream in (False, True):
                got, names, content = await whole.post(
                    {**BODIES[path], **more, "stream": stream}, path, **headers
                )
                assert got == status, content
                if status == 200:
                    assert names["x-weight-version"] == "3"
                    if not (stream and "chat" in path):  # it begins before its first token
                        assert names["x-first-weight-version"] == "3"
                else:
                    error = json.loads(content)["error"]
                    assert (error["type"], error["weight_version"]) == ("weight_version", 3)
        counts = await whole.host.stats()
        assert counts["num_contracts_refused"] == {"past": 2}


@pytest.mark.parametrize("path", ["/generate", "/v1/embeddings", "/v1/rerank"])
async def test_no_engine_gets_a_field_of_a_contract(make_bench: MakeBench, path: str) -> None:
    bench = await make_bench(reply(b'{"text": "ok"}', headers=JSON))
    body = {"a": 1, "sampling_params": {"n": 2}}
    headers = {"X-Min-Weight-Version": "7", "X-Max-Version-Lag": "1", "X-Other": "1"}
    got = await bench.ask(path, json={**body, "min_weight_version": 7}, headers=headers)
    assert (got.status, got.json) == (200, {"text": "ok"})
    (seen,) = bench.engines[0].seen
    assert {name: seen.json.get(name) for name in body} == body
    assert "min_weight_version" not in seen.json
    assert seen.header("x-other") == ["1"]
    assert not [name for name, _ in seen.headers if "version" in name.lower()]


@pytest.mark.parametrize(
    ("path", "more", "headers", "words"),
    [
        ("/generate", {}, {"X-Weight-Version": "x"}, "weight_version is 'x'"),
        ("/generate", {"max_version_lag": -1}, {}, "max_version_lag is -1"),
        ("/generate", {"weight_version": 3}, {"X-Weight-Version": "4"}, "weight_version is 4 in"),
        ("/generate", {"min_weight_version": 4, "weight_version": 3}, {}, "weight_version is 3"),
        ("/generate", {}, {"X-Logprob-Kind": "best"}, "logprob_kind is 'best'"),
        ("/v1/embeddings", {}, {"X-Logprob-Kind": "full"}, "logprob_kind: the router does not"),
        ("/tokenize", {"weight_version": 3}, {}, "weight_version 3: no weights answer /tokenize"),
        ("/v1/responses", {"stream": True, "weight_version": 7}, {}, "leave stream out"),
        ("/v1/audio/translations", {"weight_version": 7}, {}, "cannot check replies of"),
    ],
)
async def test_what_is_no_contract_is_a_400_and_reaches_no_engine(
    make_bench: MakeBench, path: str, more: dict[str, Any], headers: dict[str, str], words: str
) -> None:
    bench = await make_bench(reply())
    got = await bench.ask(path, json={"input_ids": [1], **more}, headers=headers)
    assert got.status == 400
    assert words in got.json["error"]["message"]
    assert not bench.engines[0].seen


async def test_a_push_releases_a_held_request(make_bench: MakeBench) -> None:
    bench = await make_bench(reply(b'{"text": "ok"}', headers=JSON))
    body = {"a": 1, "n": 2, "max_version_lag": 0}
    pending = bench.begin("/v1/completions", json=body, headers={"X-Min-Weight-Version": "8"})
    await bench.wait_until_held(1)
    assert (await bench.ask("/v1/completions", json={"a": 1})).status == 200
    await bench.host.set_gate("open", weight_version=8)
    got = await pending
    assert (got.status, got.headers["x-weight-version"]) == (200, "8")


ADAPTERS = {"": "policy@8", "policy": "policy@8", "judge": "judge@5"}


@pytest.mark.parametrize(
    ("name", "wish", "version"),
    [
        (None, {"X-Weight-Version": "3"}, "3"),
        ("policy", {"X-Weight-Version": "8", "X-Max-Version-Lag": "0"}, "8"),
        ("judge", {"X-Weight-Version": "5", "X-Max-Version-Lag": "0"}, "5"),
        ("judge", {"X-Weight-Version": "4"}, ""),
        ("policy", {"X-Weight-Version": "5"}, ""),
    ],
)
@pytest.mark.parametrize("several", [False, True])
async def test_an_adapter_counts_with_its_own_version(
    make_bench: MakeBench, name: str | None, wish: dict[str, str], version: str, several: bool
) -> None:
    spans = [{"version": "3", "start": 0, "end": 2}]  # an engine reports the version of its base
    meta = {"weight_version": "3", "weight_versions": spans, "completion_tokens": 2}
    meta |= {"id": "r", "finish_reason": {"type": "length", "length": 2}}
    one = {"text": "ab", "output_ids": [1, 2], "meta_info": meta}
    if several:
        engine = reply(json.dumps([one, one]).encode(), headers=JSON)
    else:
        engine = stream(b"data: %s\n\n" % json.dumps(one).encode(), b"data: [DONE]\n\n")
    bench = await make_bench(engine)
    await bench.host.set_gate("open", weight_version=8, base_version=3, adapters=ADAPTERS)
    sampling = {"max_new_tokens": 2, "n": 2 if several else 1}
    body = {"input_ids": [1], "lora_path": name, "sampling_params": sampling}
    got = await bench.ask(json=body, headers=wish)
    assert got.status == (200 if version else 409)
    if version:
        first = got.json[0] if several else got.json
        assert first["meta_info"]["weight_version"] == version


async def test_a_held_request_ends_with_409_or_with_its_client(make_bench: MakeBench) -> None:
    bench = await make_bench(reply(), config=router_config(hold_timeout_s=0.2))
    got = await bench.ask(json={"input_ids": [1]}, headers={"X-Min-Weight-Version": "8"})
    assert got.status == 409
    expected = "min_weight_version 8 was not served within 0 s: weight version 7 is served"
    assert got.json["error"] == {
        "type": "weight_version",
        "message": expected,
        "weight_version": 7,
    }
    text = await (await bench.client.get("/metrics")).text()
    assert 'router_contracts_refused_total{why="late"} 1.0' in text


async def test_an_exact_version_that_is_past_at_the_end_is_no_reply(make_bench: MakeBench) -> None:
    hold = Hold()

    async def script(connection: Connection, seen: Seen) -> None:
        await hold()
        await reply(b"[1]", headers=JSON)(connection, seen)

    bench = await make_bench(script)
    pending = bench.begin("/v1/classify", json={"a": 1}, headers={"X-Weight-Version": "7"})
    await hold.entered.wait()
    await bench.host.set_gate("open", weight_version=8)
    hold.opened.set()
    got = await pending
    assert got.status == 409


async def test_a_reply_that_cannot_be_checked_is_passed_on_to_no_client(
    make_bench: MakeBench,
) -> None:
    bench = await make_bench(reply(b"not JSON"))
    got = await bench.ask("/v1/classify", json={"a": 1}, headers={"X-Min-Weight-Version": "7"})
    assert got.status == 502
    assert "whose versions are unknown" in got.json["error"]["message"]


@pytest.mark.parametrize("failover", ["on", "off"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_no_engine_of_another_kind_of_log_probs_is_chosen(path: str, failover: str) -> None:
    async with served("vllm", token_failover=failover) as whole:
        body = BODIES[path] | ({"logprobs": True} if path != "/generate" else {})
        if path == "/generate":
            sampling = {**body["sampling_params"], **CUT}
            cut = {**body, "return_logprob": True, "sampling_params": sampling}
        else:
            cut = {**body, **CUT}
        for asked, wanted, status in (
            (cut, "full", 400),
            (cut, "cut", 200),
            (body, "full", 200),
            (body, "raw", 400),
        ):
            got, headers, content = await whole.post(asked, path, **{"X-Logprob-Kind": wanted})
            assert got == status, content
            if status == 200:
                assert headers["x-logprob-kind"] == wanted
            else:
                error = json.loads(content)["error"]
                assert error["type"] == "logprob_kind"
                other = "cut" if wanted == "full" else "full"
                assert f"logprob_kind is {wanted}, and" in error["message"]
                assert f"would be {other} on main-0" in error["message"]
                assert f"send logprob_kind {other}" in error["message"]
        assert not whole.engines[0].in_flight
        assert (await whole.host.stats())["num_contracts_refused"] == {"logprob_kind": 2}


async def test_of_two_kinds_of_engines_the_one_that_gives_it_is_chosen() -> None:
    async with served("vllm", "sglang", "vllm", token_failover="on") as whole:
        body = {"input_ids": PROMPT, "return_logprob": True, "logprob_kind": "full"}
        body["sampling_params"] = {"max_new_tokens": 8, **CUT}
        for _ in range(4):
            status, headers, content = await whole.post(body)
            assert (status, headers["x-engine-id"]) == (200, "main-1")
            assert json.loads(content)["meta_info"]["logprob_kind"] == "full"


@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_failover_no_engine_of_another_kind_goes_on(stream: bool) -> None:
    async with served("vllm", "sglang", token_failover="on") as whole:
        whole.engines[1].faults.strike("generate", faults.die(tokens=9))
        body = {"input_ids": PROMPT, "return_logprob": True, "stream": stream}
        body["sampling_params"] = {"max_new_tokens": 20, **CUT}
        status, _, content = await whole.post(body, **{"X-Logprob-Kind": "full"})
        assert status == (200 if stream else 400)
        error = events_of(content)[-1]["error"] if stream else json.loads(content)["error"]
        assert error["type"] == "logprob_kind"
        assert "would be cut on main-0" in error["message"]


async def test_a_long_body_is_read_elsewhere_and_keeps_its_contract(make_bench: MakeBench) -> None:
    bench = await make_bench(reply())
    ids = ",".join(["1000"] * 400_000)

    def options(version: int) -> dict[str, Any]:
        body = f'{{"input_ids":[{ids}],"weight_version":{version}}}'.encode()
        return {"data": io.BytesIO(body), "headers": {"content-type": "application/json"}}

    assert (await bench.ask(**options(6))).status == 409
    pending = bench.begin(**options(8))
    await waits.until(lambda: bench.host._gate.num_held == 1)
    pending.cancel()
    await waits.until(lambda: bench.host._gate.num_held == 0)
