"""A launch never talks to another program that has the port it wanted."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from engines import launch
from engines.kinds import kind_of
from engines.launch import EngineSpec, LocalLauncher
from engines.process.tcp_ports import PortReservation
from engines.protocol import Endpoint
from engines.protocol.errors import EngineError, PortTaken
from engines.protocol.spec import Invocation
from tests.support.any_answer import any_answer_at
from tests.support.engine_keys import client_of

HOST = "127.0.0.1"


class Strangers:
    """Programs that take ports in the moment in which they are released.

    Attributes:
        taken: the ports.
        requests: that were sent to them.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.requests: list[str] = []
        self._servers: list[ThreadingHTTPServer] = []
        self._bound: list[socket.socket] = []

    def listen(self, port: int, host: str = HOST) -> None:
        self._servers.append(any_answer_at(host, port, self.requests))
        self.taken.append(port)

    def bind(self, port: int) -> None:
        """Take it, and listen never."""
        bound = socket.socket()
        bound.bind((HOST, port))
        self._bound.append(bound)
        self.taken.append(port)

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for bound in self._bound:
            bound.close()


@contextmanager
def taking(
    monkeypatch: pytest.MonkeyPatch, take: Callable[[Strangers, int], None], times: int
) -> Iterator[Strangers]:
    """The first ports are taken when they are released."""
    strangers = Strangers()
    release = PortReservation.release

    def release_and_lose(reservation: PortReservation) -> None:
        release(reservation)
        if len(strangers.taken) < times and reservation.port not in strangers.taken:
            take(strangers, reservation.port)

    monkeypatch.setattr(PortReservation, "release", release_and_lose)
    try:
        yield strangers
    finally:
        strangers.close()


def spec(folder: Path, engine_id: str = "main-0", **fields: object) -> EngineSpec:
    return EngineSpec(
        engine_id=engine_id,
        kind="fake",
        model_path=f"/models/{engine_id}",
        log_path=str(folder / f"{engine_id}.log"),
        start_timeout_s=30.0,
        **fields,  # type: ignore[arg-type]
    )


def listen_everywhere(strangers: Strangers, port: int) -> None:
    strangers.listen(port, "0.0.0.0")


@pytest.mark.parametrize("take", [Strangers.listen, listen_everywhere, Strangers.bind])
async def test_a_stranger_on_the_port_gets_no_request_and_the_engine_another_port(
    take: Callable[[Strangers, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with taking(monkeypatch, take, times=2) as strangers:
        engine = await LocalLauncher().launch(spec(tmp_path))
        try:
            client = client_of(engine, kind_of("fake").client, engine_id="main-0")
            assert (await client.model_info()).model_path == "/models/main-0"
            await client.aclose()
        finally:
            await engine.stop(5.0)
        assert strangers.requests == []
    assert len(strangers.taken) == 2
    assert engine.endpoint.port not in strangers.taken
    for port in strangers.taken:
        assert f"port {port} on 127.0.0.1" in caplog.text


async def test_after_three_taken_ports_the_launch_fails_and_names_who_has_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taking(monkeypatch, Strangers.listen, times=10) as strangers:
        with pytest.raises(PortTaken, match=r"main-0: process \d+ \(.+\) has taken port") as failed:
            await LocalLauncher().launch(spec(tmp_path))
        assert strangers.requests == []
    assert len(strangers.taken) == 3
    assert failed.value.port == strangers.taken[-1]


@pytest.mark.parametrize(
    ("is_meeting", "why"), [(False, "has taken port"), (True, "address already in use")]
)
async def test_an_engine_over_several_nodes_fails_at_the_first_taken_port(
    is_meeting: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = LocalLauncher()
    address = launcher.hold_address(HOST)

    def take(strangers: Strangers, port: int) -> None:
        if address.endswith(f":{port}") == is_meeting:
            strangers.listen(port)

    with taking(monkeypatch, take, times=1) as strangers:
        with pytest.raises(EngineError, match=why):
            await launcher.launch(spec(tmp_path, num_nodes=2, dist_init_addr=address))
        assert len(strangers.taken) == 1
        assert strangers.requests == []


@pytest.mark.parametrize("is_bound", [False, True])
async def test_a_further_port_that_a_stranger_has_is_no_port_of_the_engine(
    is_bound: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken before the launch, or when it is released; decode engines would find the stranger."""
    invocation, further = launch.invocation, list[int]()

    def with_port(spec: EngineSpec, endpoint: Endpoint, inherited: object) -> Invocation:
        further.append(endpoint.port - 10_000)
        if is_bound and len(further) == 1:
            strangers.listen(further[0])
        return replace(invocation(spec, endpoint, inherited), ports=further[-1:])  # type: ignore[arg-type]

    def take(strangers: Strangers, port: int) -> None:
        if not is_bound and port in further:
            strangers.listen(port)

    monkeypatch.setattr(launch, "invocation", with_port)
    with taking(monkeypatch, take, times=1) as strangers:
        engine = await LocalLauncher().launch(spec(tmp_path))
        await engine.stop(5.0)
        assert strangers.requests == []
    assert strangers.taken == further[:1]
    assert engine.endpoint.port == further[1] + 10_000


async def test_an_engine_that_ends_by_itself_is_started_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    invocation = launch.invocation

    def note(*arguments: object) -> object:
        started.append("")
        return invocation(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(launch, "invocation", note)
    with pytest.raises(launch.EngineNotReady, match="exited with status 2"):
        await LocalLauncher().launch(spec(tmp_path, options={"fault": "no_such:hang"}))
    assert len(started) == 1
