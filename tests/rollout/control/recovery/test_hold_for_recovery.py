"""All engines are killed under load: requests wait for recovery, within the bounds of the gate."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout import RolloutConfig, launch
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.builders import write_checkpoint
from tests.support.processes import wait_until

NUM_CLIENTS = 8
BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
HEALTH = {"probe_interval_s": 0.2, "probe_timeout_s": 2.0}
GROUPS = {
    "main": {
        "num_engines": 2,
        "engine": {"kind": "fake", "options": {"token-s": 0.02}, "cpus": 0.1},
    }
}


@contextmanager
def served(folder: Path, **server: Any) -> Iterator[DeploymentHandle]:
    """Two fake engines in processes of their own, behind a real router."""
    policy = {"model_path": write_checkpoint(folder), "groups": GROUPS, "health": HEALTH}
    config = RolloutConfig.from_dict(
        {"log_dir": str(folder / "logs"), "servers": {"policy": policy | server}}
    )
    with launch(config, backend="local") as deployment:
        yield deployment


def pids(policy: ServerHandle) -> dict[str, int]:
    (group,) = policy.status().result(30).groups
    return {engine.engine_id: engine.pid for engine in group.engines if engine.pid is not None}


def kill_both(policy: ServerHandle) -> None:
    for pid in pids(policy).values():
        os.kill(pid, signal.SIGKILL)


class Load:
    """Clients that ask one request after the other; every second one with token failover."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.replies: list[tuple[int, str, bool]] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(number % 2 == 0,))
            for number in range(NUM_CLIENTS)
        ]

    def _ask(self, keeps_tokens: bool) -> None:
        headers = {"X-Token-Failover": "on"} if keeps_tokens else {}
        with httpx.Client(trust_env=False, timeout=90, headers=headers) as client:
            while not self._is_over.is_set():
                reply = client.post(f"{self._url}/generate", json=BODY)
                self.replies.append((reply.status_code, reply.text, keeps_tokens))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            assert wait_until(lambda: len(self.replies) > 2 * NUM_CLIENTS, 30)
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()


def test_requests_wait_when_both_engines_are_killed(tmp_path: Path) -> None:
    with served(tmp_path) as deployment:
        policy = deployment["policy"]
        before, load = pids(policy), Load(policy.url)
        with load.running():
            kill_both(policy)
            assert wait_until(lambda: policy.status().result(30).gate == "holding", 30)
            assert policy.status().result(30).phase == "serving"
            ready = httpx.get(f"{policy.url}/ready", trust_env=False)
            assert (ready.status_code, ready.json()["state"]) == (503, "holding")
            assert "recovery" in ready.json()["reason"]
            assert wait_until(lambda: policy.status().result(30).gate == "open", 60)
            num = len(load.replies)
            assert wait_until(lambda: len(load.replies) > num + 2 * NUM_CLIENTS, 30)
        assert wait_until(lambda: set(pids(policy).values()).isdisjoint(before.values()), 60)
        # A request that lost both engines is not sent again: it may be what breaks them.
        failed = [text for status, text, _ in load.replies if status != 200]
        assert len(failed) <= NUM_CLIENTS, failed
        assert all("sent no reply" in text or "broke off" in text for text in failed), failed


WITHOUT_HOPE = {"no recovery": {"recover": False}, "no restart left": {"max_restarts": 0}}


@pytest.mark.parametrize("why", WITHOUT_HOPE)
def test_requests_are_refused_at_once_when_no_engine_can_come_back(
    tmp_path: Path, why: str
) -> None:
    with served(tmp_path, health=HEALTH | WITHOUT_HOPE[why]) as deployment:
        policy = deployment["policy"]
        kill_both(policy)

        def refused() -> bool:
            reply = httpx.post(f"{policy.url}/generate", json=BODY, trust_env=False, timeout=30)
            return reply.status_code == 503

        assert wait_until(refused, 30)
        assert refused()
        assert policy.status().result(30).gate == "open"


def test_the_gate_bounds_how_many_are_held_and_how_long(tmp_path: Path) -> None:
    router = {"max_held_requests": 1, "hold_timeout_s": 2.0}
    groups = {"main": GROUPS["main"] | {"num_engines": 1}}
    health = HEALTH | {"backoff_s": 300.0, "max_backoff_s": 300.0}
    with served(tmp_path, router=router, groups=groups, health=health) as deployment:
        policy = deployment["policy"]
        (first,) = pids(policy).values()
        kill_both(policy)
        assert wait_until(lambda: pids(policy).get("main-0") not in (first, None), 60)
        assert wait_until(lambda: policy.status().result(30).gate == "open", 60)
        kill_both(policy)  # the second restart waits for its backoff
        assert wait_until(lambda: policy.status().result(30).gate == "holding", 30)
        replies: list[httpx.Response] = []

        def ask() -> None:
            replies.append(
                httpx.post(f"{policy.url}/generate", json=BODY, trust_env=False, timeout=30)
            )

        clients = [threading.Thread(target=ask) for _ in range(2)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert [reply.status_code for reply in replies] == [503, 503]
        text = " ".join(reply.text for reply in replies)
        assert "already held" in text
        assert "not released" in text
