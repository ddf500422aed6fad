"""Adapters are pushed while sessions run: nothing is paused, and no session mixes versions.

``ADAPTERS_RUN=8x200x256`` is the number of adapters, updates of each, and sessions at any time.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

import rollout
from rollout.config.run_dir import JOURNAL_FILE
from rollout.control.server.journal import read
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.agent_workers import worker_processes
from tests.support.chat_models import THINKS_FIRST
from tests.support.engine_keys import Keys
from tests.support.lora import make_adapter
from tests.support.models import make_plain_model
from tests.support.processes import kill_listener, wait_until

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(180)]
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
SHORT = rollout.SamplingParams(max_new_tokens=2)
_NUM_TURNS, _NUM_TOKENS = 2, 4
_CLOSE = 2e-3


@contextmanager
def serving(
    folder: Path, adapters: list[str], backend: Literal["local", "ray"] = "local", **server: Any
) -> Iterator[ServerHandle]:
    model = make_plain_model(folder / "base", seed=1)
    (model / "chat_template.jinja").write_text(THINKS_FIRST)
    options = {"enable-lora": True, "max-lora-rank": 4, "max-total-tokens": 1 << 17}
    policy = {
        "model_path": str(model),
        "weights": {"update": "lora", "adapters": adapters},
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded", "options": options}}},
        **server,
    }
    config = {"log_dir": str(folder / "logs"), "servers": {"policy": policy}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config), backend=backend) as deployment:
        yield deployment["policy"]


def push(policy: ServerHandle, version: int, adapter: str) -> rollout.StepReport:
    named = make_adapter(4, version)
    made = policy.phases.make_push(named, version, adapter=CONFIG, adapter_name=adapter)
    return policy.push(made).result(120)


@dataclass
class Sessions:
    """Sessions that begin one after the other, so many at any time.

    Attributes:
        turns: adapter and turns of each session that has ended.
    """

    url: str
    adapters: list[str]
    num: int
    turns: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=120, limits=limits, trust_env=False
        ) as client:
            await asyncio.gather(*(self._one_after_another(client, i) for i in range(self.num)))

    async def _one_after_another(self, client: httpx.AsyncClient, index: int) -> None:
        adapter, number = self.adapters[index % len(self.adapters)], 0
        while not self.is_over.is_set():
            number += 1
            self.turns.append((adapter, await self._session(client, adapter, f"{index}-{number}")))

    async def _session(
        self, client: httpx.AsyncClient, adapter: str, name: str
    ) -> list[dict[str, Any]]:
        history: list[Any] = []
        more = {"lora_path": adapter, "stays_with_version": True, "ignore_eos": True}
        for _ in range(_NUM_TURNS):
            history.append({"role": "user", "content": "What is it?"})
            body = {"model": "any", "messages": history, "temperature": 0, **more}
            reply = await client.post(
                f"/sessions/{name}/v1/chat/completions", json=body | {"max_tokens": _NUM_TOKENS}
            )
            assert reply.status_code == 200, reply.text
            history.append(reply.json()["choices"][0]["message"])
        turns: list[dict[str, Any]] = (await client.get(f"/sessions/{name}")).json()["turns"]
        await client.delete(f"/sessions/{name}")
        return turns


def seconds_not_open(url: str) -> float:
    """How long the router's gate was not open so far."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    found = re.findall(r'^router_gate_seconds_total\{state="(\w+)"\} (\S+)$', text, re.M)
    assert {state for state, _ in found} == {"open", "holding", "closed"}, text[:2000]
    return sum(float(seconds) for state, seconds in found if state != "open")


def check_sessions(
    sessions: list[tuple[str, list[dict[str, Any]]]], owners: dict[int, str]
) -> set[int]:
    """Each session has one version, of its adapter, and answers as all of this version do.

    Returns:
        The versions that answered.
    """
    of_version: defaultdict[int, list[list[float]]] = defaultdict(list)
    for adapter, turns in sessions:
        assert len(turns) == _NUM_TURNS
        versions = {int(span["version"]) for turn in turns for span in turn["weight_versions"]}
        (version,) = versions
        assert owners[version] == adapter
        of_version[version].append([one for turn in turns for one in turn["output_logprobs"]])
    first = {version: found[0] for version, found in of_version.items()}
    for version, found in of_version.items():
        for logprobs in found:
            assert logprobs == pytest.approx(first[version], abs=_CLOSE), version
    for version, logprobs in first.items():  # so a mixed one would have been seen
        before = first.get(max((one for one in first if one < version), default=-1))
        assert before is None or logprobs != pytest.approx(before, abs=_CLOSE), version
    return set(of_version)


def run(folder: Path, num_adapters: int, num_updates: int, num_sessions: int) -> str:
    """Push while sessions run; returns the figures."""
    adapters = [f"a{index}" for index in range(num_adapters)]
    # Sessions that end late on a busy machine make pushes wait, and none of them fail.
    server: dict[str, Any] = {"health": {"recover": False}, "lifecycle": {"drain_timeout_s": 900.0}}
    with serving(folder, adapters, **server) as policy:
        owners = {index + 1: name for index, name in enumerate(adapters * num_updates)}
        for version in range(1, num_adapters + 1):
            push(policy, version, owners[version])
        (agents_url,) = policy.status().result(30).agents_urls
        sessions = Sessions(agents_url, adapters, num_sessions)
        before_s = seconds_not_open(policy.url)
        clients = threading.Thread(target=lambda: asyncio.run(sessions.run()), name="sessions")
        clients.start()
        began_s, push_s, paused_s = time.monotonic(), [], 0.0
        try:
            for version in range(num_adapters + 1, num_adapters * num_updates + 1):
                started = time.monotonic()
                paused_s += push(policy, version, owners[version]).paused_s
                push_s.append(time.monotonic() - started)
        finally:
            took_s = time.monotonic() - began_s
            sessions.is_over.set()
            clients.join(150)
        assert not clients.is_alive()
        assert paused_s == 0.0
        assert seconds_not_open(policy.url) == before_s
        stats = httpx.get(f"{policy.url}/engines", trust_env=False).json()
        assert (stats["num_refused"], stats["gate"]["pinned"]) == (0, {})
        versions = check_sessions(sessions.turns, owners)
        engines = policy.status().result(30).groups[0].engines
        first = num_adapters * (num_updates - 1) + 1
        newest = {f"{name}@{version}" for version, name in enumerate(adapters, first)}
        assert wait_until(lambda: all(loaded(one) == newest for one in engines), 30)
    push_s.sort()
    return (
        f"{num_adapters} adapters x {num_updates} updates, {num_sessions} sessions at any time: "
        f"{len(push_s)} pushes in {took_s:.1f} s (median {push_s[len(push_s) // 2]:.3f} s, longest "
        f"{push_s[-1]:.3f} s), paused {paused_s} s; {len(sessions.turns)} sessions of "
        f"{len(versions)} versions, none mixed"
    )


def loaded(engine: EngineStatus) -> set[str]:
    """The versions of adapters that an engine has."""
    url = f"{engine.endpoint.url}/weights_checker"
    reply = httpx.post(url, json={"action": "checksum"}, trust_env=False, auth=Keys(engine))
    names = reply.json()["ranks"][0]["checksums"]
    return {name.split(":")[1] for name in names if name.startswith("lora:")}


@pytest.mark.slow
def test_sessions_stay_with_their_version_while_adapters_are_pushed(tmp_path: Path) -> None:
    run(tmp_path, 2, 6, 8)


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_many_adapters_many_updates_many_sessions(tmp_path: Path) -> None:
    sizes = os.environ.get("ADAPTERS_RUN", "8x6x64").split("x")
    print(run(tmp_path, *map(int, sizes)))


def ask(policy: ServerHandle, name: str = "policy") -> int:
    """The version that answers."""
    body = {"input_ids": [1, 2, 3], "lora_path": name, "sampling_params": {"max_new_tokens": 2}}
    reply = httpx.post(f"{policy.url}/generate", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["meta_info"]["weight_version"])


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_the_version_before_and_comes_back_with_all(
    tmp_path: Path,
) -> None:
    health = {"probe_interval_s": 5.0, "backoff_s": 0.1}
    with serving(tmp_path, ["policy", "judge"], health=health) as policy:
        push(policy, 1, "policy")
        push(policy, 2, "judge")
        killed = policy.status().result(30).groups[0].engines[1]
        assert killed.pid is not None
        os.killpg(killed.pid, signal.SIGKILL)
        with pytest.raises(rollout.PhaseFailed, match="adapter policy@3 serves nowhere"):
            push(policy, 3, "policy")
        assert policy.status().result(30).gate == "open"
        assert [ask(policy) for _ in range(4)] == [1] * 4

        def others() -> list[EngineStatus]:
            engines = policy.status().result(30).groups[0].engines
            serving = [one for one in engines if not (one.fence_reason or one.is_stale)]
            return [one for one in serving if one.pid != killed.pid]

        assert wait_until(lambda: len(others()) == 2, 90), policy.status().result()
        assert [loaded(one) for one in others()] == [{"policy@1", "judge@2"}] * 2
        push(policy, 3, "policy")
        assert [ask(policy) for _ in range(4)] == [3] * 4
        assert [ask(policy, "judge") for _ in range(4)] == [2] * 4
        page = read(next((tmp_path / "logs").rglob(JOURNAL_FILE))).page
        metrics = httpx.get(f"{page}/metrics", trust_env=False).text
        exported = re.findall(r'^rollout_adapter_version{adapter="(\w+)".*} (\S+)$', metrics, re.M)
        assert exported == [("policy", "3.0"), ("judge", "2.0")]


def kill_the_worker(policy: ServerHandle) -> None:
    """Without Ray, where the program that launched it listens at its address, too."""
    (worker,) = worker_processes()
    worker.kill()


def kill_the_worker_over_ray(policy: ServerHandle) -> None:
    (url,) = policy.status().result(30).agents_urls
    kill_listener(url)


def kill_the_router(policy: ServerHandle) -> None:
    kill_listener(policy.url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "kill"),
    [
        ("local", kill_the_worker),
        pytest.param("ray", kill_the_worker_over_ray, marks=pytest.mark.ray),
        pytest.param("ray", kill_the_router, marks=pytest.mark.ray),
    ],
)
def test_a_session_stays_with_its_version_over_lost_processes(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    backend: Literal["local", "ray"],
    kill: Callable[[ServerHandle], None],
) -> None:
    """A version that is superseded, and that no request has while they are away."""
    if backend == "ray":
        request.getfixturevalue("ray_cluster")
    stays = {"lora_path": "policy", "stays_with_version": True, "ignore_eos": True}
    sampling = {"model": "any", "temperature": 0, "max_tokens": _NUM_TOKENS}
    asked = [{"role": "user", "content": "What is it?"}]
    with serving(tmp_path, ["policy"], backend) as policy:
        push(policy, 1, "policy")
        with policy.session() as session, httpx.Client(timeout=60, trust_env=False) as client:

            def turn() -> list[dict[str, Any]]:
                """The same question again: a branch."""
                body = {**sampling, **stays, "messages": asked}
                reply = client.post(f"{session.base_url}/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
                return session.turns().result(60)

            before = turn()
            for version in (2, 3):
                push(policy, version, "policy")
                check_serves(policy, version)
                kill(policy)
                assert session.turns().result(60) == before  # it serves again
                check_serves(policy, version)
                *others, last = turn()
                assert others == before
                assert {span["version"] for span in last["weight_versions"]} == {"1"}
                assert last["output_ids"] == before[0]["output_ids"]
                close = pytest.approx(before[0]["output_logprobs"], abs=_CLOSE)
                assert last["output_logprobs"] == close
                before = [*others, last]
        push(policy, 4, "policy")
        engines = policy.status().result(30).groups[0].engines
        # What lost processes had pinned ends half a minute after them.
        assert wait_until(lambda: all(loaded(one) == {"policy@4"} for one in engines), 120)


def check_serves(policy: ServerHandle, version: int) -> None:
    """For those that stay with none, also behind a lost router."""
    reply = policy.generate([1, 2, 3], SHORT).result(60)
    assert {span.version for span in reply.weight_versions} == {str(version)}
