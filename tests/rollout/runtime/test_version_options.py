"""Weight versions that a caller wants: its arguments, and the router's refusals as errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

import rollout
from rollout.config import RouterConfig
from rollout.core.errors import GenerationFailed, VersionUnavailable
from rollout.driver.client.sample_requests import make_requests, version_contract
from rollout.rules.contract import NO_CONTRACT, Contract
from rollout.runtime.calls.sample_client import SampleClient

SHORT = rollout.SamplingParams(max_new_tokens=1)
SERVED = 5


@pytest.mark.parametrize(
    ("options", "name", "kind", "why"),
    [
        ({"weight_version": -1}, "weight_version", ValueError, "= -1: must be at least 0"),
        ({"weight_version": "3"}, "weight_version", TypeError, "= '3': must be a whole number"),
        (
            {"min_weight_version": True},
            "min_weight_version",
            TypeError,
            "= True: must be a whole",
        ),
        ({"min_weight_version": 1 << 53}, "min_weight_version", ValueError, "must be less than"),
        ({"max_version_lag": 0.5}, "max_version_lag", TypeError, "= 0.5: must be a whole number"),
        (
            {"weight_version": 2, "min_weight_version": 3},
            "weight_version",
            ValueError,
            "weight_version is 2, and min_weight_version 3 excludes it",
        ),
        (
            {"version": 3},
            "version",
            TypeError,
            "known: weight_version, min_weight_version, max",
        ),
    ],
)
def test_a_wrong_version_is_named_before_anything_is_sent(
    options: dict[str, Any], name: str, kind: type[Exception], why: str
) -> None:
    for call in (
        lambda: make_requests([1], None, "", **options),
        lambda: version_contract(**options),
    ):
        with pytest.raises(kind, match=f"^{name}.*{why.removeprefix(name)}"):
            call()


def test_a_wrong_kind_of_log_probs_is_named() -> None:
    with pytest.raises(ValueError, match=r"^logprob_kind = 'nope': must be 'full', "):
        make_requests([1], None, "", logprob_kind="nope")  # type: ignore[arg-type]


def test_each_request_of_a_call_has_the_contract() -> None:
    options = {"weight_version": 4, "min_weight_version": 2, "max_version_lag": None}
    requests = make_requests([[1], [2]], rollout.SamplingParams(n=2), "", **options)
    assert [one.contract for one in requests] == [
        Contract(weight_version=4, min_weight_version=2)
    ] * 4
    assert make_requests([1], None, "")[0].contract == NO_CONTRACT == version_contract()


# -- as the router answers ------------------------------------------------------------------------


async def answer(request: web.Request) -> web.Response:
    """A router whose engines serve version 5."""
    wanted = request.headers.get("x-weight-version", str(SERVED))
    if (await request.json())["input_ids"] == [9]:
        return web.json_response({"error": "no room"}, status=400)
    if wanted != str(SERVED):
        error = {
            "type": "weight_version",
            "message": f"weight_version {wanted} is past: {SERVED} is served",
            "weight_version": SERVED,
        }
        return web.json_response({"error": error}, status=409)
    meta = {"id": "r", "finish_reason": {"type": "length"}, "weight_version": str(SERVED)}
    meta |= {"output_token_logprobs": [[-1.0, 1, None]], "completion_tokens": 1}
    return web.json_response({"text": "x", "output_ids": [1], "meta_info": meta})


@asynccontextmanager
async def answering() -> AsyncIterator[SampleClient]:
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    async def find_url() -> str:
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    try:
        yield SampleClient(find_url, RouterConfig())
    finally:
        await runner.cleanup()


async def test_a_version_that_is_not_served_is_an_error_of_its_own() -> None:
    async with answering() as client:
        (wrong,) = make_requests([1], SHORT, "", weight_version=4)
        with pytest.raises(
            VersionUnavailable, match="the request failed: weight_version 4 is past"
        ) as caught:
            await client.generate_one(wrong, "")
        assert caught.value.weight_version == SERVED
        assert caught.value.failures == {0: "weight_version 4 is past: 5 is served"}
        (right,) = make_requests([1], SHORT, "", weight_version=caught.value.weight_version)
        assert (await client.generate_one(right, "")).weight_version == str(SERVED)


async def test_a_stream_has_the_same_error() -> None:
    async with answering() as client:
        (wrong,) = make_requests([1], SHORT, "", weight_version=4)
        with pytest.raises(VersionUnavailable) as caught:
            await anext(aiter(client.stream(wrong, "")))
        assert caught.value.weight_version == SERVED


async def test_of_several_prompts_each_has_its_reason() -> None:
    async with answering() as client:
        wrong = make_requests([[1], [2]], SHORT, "", weight_version=4)
        with pytest.raises(VersionUnavailable, match="2 of 2 requests failed; request 0: weight_"):
            await client.generate(wrong, "")
        mixed = [*make_requests([[1], [9]], SHORT, "", weight_version=SERVED), *wrong]
        with pytest.raises(GenerationFailed) as caught:
            await client.generate(mixed, "")
        assert type(caught.value) is GenerationFailed
        assert list(caught.value.failures) == [1, 2, 3]
        assert "version 4 is past" in caught.value.failures[2]
        assert [reply is not None for reply in caught.value.replies] == [True, False, False, False]


async def test_the_turns_of_a_session_have_its_versions_as_headers() -> None:
    async with answering() as client:
        plain = client.session("http://nowhere", "s")
        bound = client.session("http://nowhere", "s", version_contract(min_weight_version=2))
        assert plain.default_headers == {}
        assert bound.default_headers == {"x-min-weight-version": "2"}
