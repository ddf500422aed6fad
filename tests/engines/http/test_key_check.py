"""Which call is carried out with which key, for which process; and that nothing shows a key."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
import pytest

from engines.http import key_check
from engines.http.key_check import KeyCheck, Refusal, access_of, check, key_variables, new_access
from engines.process.guard import TOKEN_VARIABLE
from engines.protocol import NO_ACCESS, PROCESS_HEADER, EngineAccess
from engines.protocol.spec import EngineSpec, Invocation
from engines.sglang import start
from engines.vllm import routes

BOTH = EngineAccess("sample", "steer", process="this-one")
OPEN, SAMPLING, CONTROL = "open", "sampling", "control"
LEVELS = {
    OPEN: ["/health", "/ready", "/ping"],
    SAMPLING: [
        *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/loads"),
        *("/model_info", "/server_info", "/openapi.json", "/metrics", "/health_generate"),
        *(routes.GENERATE, routes.WEIGHT_INFO, routes.IS_PAUSED, routes.TOKENIZE, routes.VERSION),
    ],
    CONTROL: [
        *("/pause_generation", "/flush_cache", "/abort_request", "/update_weights_from_tensor"),
        *("/load_lora_adapter", "/weights_checker", "/docs", "/", "", "/nobody/knows/this"),
        *("/generate/", "/pause/", "//generate", "/V1/models", "/v1"),
        *(routes.PAUSE, routes.SLEEP, routes.RPC, routes.UPDATE, routes.ABORT, routes.CHECKER),
        *(routes.LOAD_LORA, routes.UNLOAD_LORA, routes.SET_VERSION, routes.RELEASE_KV),
    ],
}
GIVEN = {
    "none": "",
    "empty": "Bearer ",
    "another": "Bearer sampl",
    "longer": "Bearer samplee",
    "no bearer": "sample",
    "basic": "Basic sample",
    "not ASCII": "Bearer s\xe4mple",
    SAMPLING: "Bearer sample",
    CONTROL: "bearer steer",
}
ENOUGH = {OPEN: set(GIVEN), SAMPLING: {SAMPLING, CONTROL}, CONTROL: {CONTROL}}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(("level", "path"), [(k, path) for k in LEVELS for path in LEVELS[k]])
def test_each_path_is_carried_out_with_its_key_alone(level: str, path: str, given: str) -> None:
    if given in ENOUGH[level]:
        return check(BOTH, path, GIVEN[given], "")
    with pytest.raises(Refusal, match="needs the engine's") as refused:
        check(BOTH, path, GIVEN[given], "")
    assert refused.value.status == 401
    body = json.loads(refused.value.body)
    assert body["error"]["code"] == 401
    assert not any(key in str(body) for key in ("sample", "steer"))
    return None


@pytest.mark.parametrize("path", ["/generate", "/pause_generation"])
def test_one_key_is_for_all_and_none_is_for_none(path: str) -> None:
    check(NO_ACCESS, path, "", "")
    check(EngineAccess("one"), path, "Bearer one", "")
    check(EngineAccess(control="one"), path, "Bearer one", "")
    for one in (EngineAccess("one"), EngineAccess(control="one")):
        with pytest.raises(Refusal):
            check(one, path, "", "")


@pytest.mark.parametrize("meant", ["", "run-1/this-one", "/this-one", "run-1/a start", "nothing"])
def test_a_call_for_this_process_or_for_none_is_carried_out(meant: str) -> None:
    check(BOTH, "/pause_generation", "Bearer steer", meant, ["a start"])


def test_a_call_for_another_process_is_refused_with_both_names() -> None:
    why = "of run run-1 is for process that-one, and this is a start or this-one"
    with pytest.raises(Refusal, match=why) as refused:
        check(BOTH, "/pause_generation", "Bearer steer", "run-1/that-one", ["a start"])
    assert refused.value.status == 409
    # A query shows which process it is, and what is sampled has its own version.
    check(BOTH, "/server_info", "Bearer steer", "run-1/that-one")
    check(BOTH, "/generate", "Bearer sample", "run-1/that-one")


async def answer_of(
    app: KeyCheck, path: str = "/pause", kind: str = "http", **headers: str | list[str]
) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of its answer; 204 is the engine's."""
    sent: list[Mapping[str, Any]] = []
    pairs = [
        (name.replace("_", "-").encode(), value.encode())
        for name, values in headers.items()
        for value in ([values] if isinstance(values, str) else values)
    ]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a refused body is not read")

    await app({"type": kind, "path": path, "headers": pairs}, receive, send)
    return sent[0].get("status", sent[0].get("code")), dict(sent[0].get("headers", ()))


async def engine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})


async def test_the_middleware_refuses_before_the_engine_hears_of_it() -> None:
    app = KeyCheck(engine, BOTH)
    status, headers = await answer_of(app)
    assert (status, headers[b"www-authenticate"]) == (401, b"Bearer")
    assert headers[b"connection"] == b"close"
    assert (await answer_of(app, authorization="Bearer steer"))[0] == 204
    assert (await answer_of(app, authorization=["Bearer steer"] * 2))[0] == 401
    named = {"authorization": "Bearer steer", "x_rollout_engine": "run/other"}
    assert (await answer_of(app, **named))[0] == 409
    assert (await answer_of(app, "/health"))[0] == 204
    assert (await answer_of(app, "", "lifespan"))[0] == 204


async def test_a_websocket_without_a_key_is_closed() -> None:
    app = KeyCheck(engine, BOTH)
    assert (await answer_of(app, "/v1/realtime", "websocket"))[0] == 1008
    opened = await answer_of(app, "/v1/realtime", "websocket", authorization="Bearer sample")
    assert opened[0] == 204


async def test_by_default_its_keys_are_those_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in key_variables(BOTH).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(TOKEN_VARIABLE, "token-1")
    app = KeyCheck(engine)
    assert (await answer_of(app))[0] == 401
    named = {"authorization": "Bearer steer", "x_rollout_engine": "run/token-1"}
    assert (await answer_of(app, **named))[0] == 204


def test_the_names_that_are_written_out_are_equal() -> None:
    assert key_check.GUARD_TOKEN == TOKEN_VARIABLE
    assert set(start.KEYS) == {key_check.SAMPLING_KEY, key_check.CONTROL_KEY}
    assert access_of(key_variables(BOTH)) == EngineAccess("sample", "steer")


def test_each_launch_has_keys_of_its_own() -> None:
    made = [new_access() for _ in range(100)]
    keys = {key for access in made for key in (access.sampling, access.control)}
    assert len(keys) == 200
    assert min(map(len, keys)) >= 40


def test_nothing_shows_a_key() -> None:
    spec = EngineSpec("e", "fake", "/m", "", access=BOTH)
    shown = [repr(BOTH), str(BOTH), f"{BOTH}", repr(spec), repr(asdict(spec)), repr([BOTH])]
    shown += [repr(Invocation(["engine"], key_variables(BOTH))), repr(Refusal(401, "a", "b"))]
    assert not [text for text in shown if "steer" in text or "sample" in text]
    for dumps in (json.dumps, orjson.dumps):
        with pytest.raises(TypeError):
            dumps({"access": BOTH})  # type: ignore[operator]
    assert pickle.loads(pickle.dumps(BOTH)) == BOTH


def test_a_call_names_its_process_only_where_it_changes_the_engine() -> None:
    named = BOTH.of(run="run-1")
    assert named.headers(is_control=False) == {"Authorization": "Bearer sample"}
    assert named.headers(is_control=True) == {
        "Authorization": "Bearer steer",
        PROCESS_HEADER: "run-1/this-one",
    }
    assert NO_ACCESS.headers(is_control=True) == {}


def test_what_is_logged_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    make = logging.getLogRecordFactory()
    try:
        start.hide(("secret",))
        logging.getLogger("server").warning("server_args=%s", {"api_key": "secret"})
        logging.getLogger("server").warning("%d of %s", 1, "nothing")
    finally:
        logging.setLogRecordFactory(make)
    assert caplog.messages == ["server_args={'api_key': '(a key)'}", "1 of nothing"]
