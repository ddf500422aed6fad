"""Sessions of agents through a handle: what the page shows, over fake engines; misuse."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.core.errors import ConfigError, GenerationFailed, VersionUnavailable
from rollout.driver.client import http_client
from rollout.rules.routing import worker_of
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support import builders
from tests.support.chat_models import write_chat_model
from tests.support.served_fakes import TIMEOUT_S, config

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

PAGE = Path(__file__).parents[3] / "docs/how-to/agents.md"


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    model = write_chat_model(tmp_path / "chat", vocabulary_size=1000)
    router = {"tokenizer_path": str(model), "client_key": "c", "control_key": "k"}
    server = {"router": router, "agents": {"workers": 2}}
    settings = config(tmp_path, {"main": {"num_engines": 2}}, server=server)
    handle = launch_local(settings, launcher=HttpFakeLauncher())
    try:
        yield handle["policy"]
    finally:
        handle.stop()


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_runs(
    policy: ServerHandle, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(blocks()[0], str(PAGE), "exec"), {"policy": policy})
    told, sample = capsys.readouterr().out.splitlines()
    assert "'turn': 1, 'parent': 0" in told
    assert sample.endswith("[0, 0]")


def test_the_code_of_the_page_for_the_agents_sdk_runs(policy: ServerHandle) -> None:
    pytest.importorskip("agents")
    names: dict[str, Any] = {"policy": policy}
    exec(compile(blocks()[1], str(PAGE), "exec"), names)
    assert names["sample"].output_ids
    assert names["sample"].mask == [1] * len(names["sample"].output_ids)


async def test_a_coroutine_awaits_the_samples_of_the_same_session(policy: ServerHandle) -> None:
    async with policy.session("mine") as session:
        urls = (await policy.status()).agents_urls
        assert repr(session) == f"AgentSession('{urls[worker_of('mine', 2)]}/sessions/mine/v1')"
        assert await session.samples() == []
        client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        async with client:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "a"}], max_tokens=3
            )
        (sample,) = await policy.session("mine").samples()
        assert isinstance(sample, rollout.Sample)
        assert sample.mask == [1, 1, 1]
        assert sample.metadata == {"session_id": "mine", "turns": [0], "drift": ["clean"]}
    assert await policy.session("mine").turns() == []


def test_the_turns_of_a_session_have_its_versions_if_the_client_sends_its_headers(
    policy: ServerHandle,
) -> None:
    served = policy.weight_version
    ask: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 3,
    }
    with policy.session(min_weight_version=served, max_version_lag=0) as session:
        client = openai.OpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            default_headers=session.default_headers,
        )
        client.chat.completions.create(**ask)
        (turn,) = session.turns().result(TIMEOUT_S)
        assert [span["version"] for span in turn["weight_versions"]] == [str(served)]
    policy.push(builders.push(served + 1)).result(TIMEOUT_S)
    with policy.session(weight_version=served) as session:
        client = openai.OpenAI(
            base_url=session.base_url,
            api_key=session.api_key,
            default_headers=session.default_headers,
            max_retries=0,
        )
        with pytest.raises(openai.ConflictError) as refused:
            client.chat.completions.create(**ask)
        assert refused.value.body == {
            "type": "weight_version",
            "message": f"weight_version {served} is past: weight version {served + 1} is served",
            "weight_version": served + 1,
        }
        assert session.turns().result(TIMEOUT_S) == []
    with pytest.raises(VersionUnavailable) as past:
        policy.generate([1], weight_version=served).result(TIMEOUT_S)
    assert past.value.weight_version == served + 1


def test_two_sessions_have_ids_of_their_own_and_a_wrong_id_is_refused(
    policy: ServerHandle,
) -> None:
    assert policy.session().session_id != policy.session().session_id
    for wrong in ("a/b", "x" * 257):
        with pytest.raises(ValueError, match="session_id"):
            policy.session(wrong)
    policy.session("unused").close().result(TIMEOUT_S)


def test_sessions_are_spread_over_the_workers(policy: ServerHandle) -> None:
    urls = policy.status().result(TIMEOUT_S).agents_urls
    begun = Counter(policy.session().base_url.partition("/sessions/")[0] for _ in range(400))
    assert set(begun) == set(urls)
    assert min(begun.values()) > 120


def test_a_server_without_workers_says_how_to_have_some(tmp_path: Path) -> None:
    handle = launch_local(config(tmp_path, {"main": {}}), launcher=HttpFakeLauncher())
    try:
        with pytest.raises(ConfigError, match=r"no workers for sessions: set its agents\.workers"):
            handle["policy"].session()
    finally:
        handle.stop()


def test_a_worker_that_is_gone_is_named(
    policy: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.1)
    session = policy.session("s")
    session._url = "http://127.0.0.1:9/sessions/s"
    with pytest.raises(GenerationFailed, match=r"127\.0\.0\.1:9"):
        session.samples().result(TIMEOUT_S)
