"""Two launches at once, on ports that both want, and with strangers that take them: no run ever
hears the other's engines, nor a stranger."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines import launch as engine_launch
from engines.process import tcp_ports
from engines.process.tcp_ports import PortReservation, reserve_port
from rollout.core.errors import ConfigError
from rollout.runtime.handle import DeploymentHandle
from tests.support.any_answer import any_answer_at
from tests.support.builders import push, write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLING = rollout.SamplingParams(max_new_tokens=4)
NUM_ROUNDS = 20
NUM_PORTS = 8  # for four engines: two of each launch
GROUPS = {"main": {"num_engines": 2, "engine": {"kind": "fake", "gpus": 0}}}


class Strangers:
    """Take the first ports that are released, in that moment."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.left = 0
        self._servers: list[ThreadingHTTPServer] = []

    def take(self, port: int) -> None:
        if self.left:
            self.left -= 1
            self._servers.append(any_answer_at("127.0.0.1", port, self.heard))

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        self.left = 0


def config(folder: Path, run: str, router_port: int) -> rollout.RolloutConfig:
    server = {
        "model_path": write_checkpoint(folder / run),
        "groups": GROUPS,
        "router": {"port": router_port},
    }
    return rollout.RolloutConfig.from_dict(
        {"log_dir": str(folder), "run_id": run, "servers": {"policy": server}}
    )


def launch(config: rollout.RolloutConfig) -> DeploymentHandle | ConfigError:
    try:
        return rollout.launch(config, backend="local")
    except ConfigError as error:
        return error


def heard(run: DeploymentHandle, version: int) -> set[str]:
    """The versions in the replies to requests of one run, after a push of its own."""
    run["policy"].push(push(version)).result(60)
    replies = run["policy"].generate([[1, 2, 3]] * 8, SAMPLING).result(60)
    return {span.version for reply in replies for span in reply.weight_versions}


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Strangers()
    release = PortReservation.release

    def release_and_lose(reservation: PortReservation) -> None:
        release(reservation)
        found.take(reservation.port)

    monkeypatch.setattr(PortReservation, "release", release_and_lose)
    yield found
    found.close()


def in_few_ports(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The launches choose from so few ports that each wants what another has just released.

    Returns:
        Ends that.
    """
    with reserve_port() as first:
        low = first.port

    def reserve(host: str = "127.0.0.1", port: int | None = None) -> PortReservation:
        return tcp_ports.reserve_port(host, port, low, low + NUM_PORTS - 1)

    monkeypatch.setattr(engine_launch, "reserve_port", reserve)
    return lambda: monkeypatch.setattr(engine_launch, "reserve_port", reserve_port)


def test_no_run_hears_another_runs_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strangers: Strangers
) -> None:
    for number in range(NUM_ROUNDS):
        equal_routers, with_strangers, few_ports = (number % 4 == kind for kind in (1, 2, 3))
        with reserve_port() as router:
            port = router.port if equal_routers else 0
        strangers.left = 2 if with_strangers else 0
        undo = in_few_ports(monkeypatch) if few_ports else lambda: None
        configs = [config(tmp_path, f"{name}-{number}", port) for name in ("a", "b")]
        with ThreadPoolExecutor(2) as both:
            runs = list(both.map(launch, configs))
        undo()
        live = [run for run in runs if isinstance(run, DeploymentHandle)]
        try:
            refused = [str(run) for run in runs if isinstance(run, ConfigError)]
            assert len(refused) == equal_routers, refused
            assert all("set router.port of this server to a free port" in why for why in refused)
            assert not strangers.left
            versions = [100 + 2 * number + place for place in range(len(live))]
            with ThreadPoolExecutor(2) as both:
                marks = list(both.map(heard, live, versions))
            assert marks == [{str(version)} for version in versions]
            assert strangers.heard == []
        finally:
            for run in live:
                run.stop()
            strangers.close()
