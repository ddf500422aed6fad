"""Transfers of units: with Mooncake where it is installed, else with a fake."""

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.node.assembly import AssembledFolder
from rollout.weights.store.transfer.mooncake import open_mooncake, open_transfer
from rollout.weights.store.transfer.rdma import RdmaTransfer
from tests.support.processes import wait_until
from tests.support.store_worlds import Served, contents, read_folder
from tests.support.transfer_engines import Act, FakeEngine

SHORT_S = 0.05
MIB = 1 << 20


def fetched(rdma: RdmaTransfer, data: bytes, lender: RdmaTransfer | None = None) -> bytes:
    """What a peer reads of ``data``."""
    lender = lender or RdmaTransfer(FakeEngine(), "other")
    into = bytearray(len(data))
    with lender.exported() as piece:
        piece.view[: len(data)] = data
        rdma.fetch(lender.session, piece.address, memoryview(into))
    return bytes(into)


# -- one end --------------------------------------------------------------------------------


def test_a_piece_travels_in_several_transfers_and_arrives_whole() -> None:
    engine = FakeEngine()
    data = os.urandom(9 * MIB + 5)
    assert fetched(RdmaTransfer(engine, "here"), data) == data
    assert engine.lengths == [4 * MIB, 4 * MIB, MIB + 5]


@pytest.mark.parametrize("act", [Act.REFUSE, Act.FAIL])
def test_a_transfer_that_fails_costs_no_memory(act: Act) -> None:
    engine = FakeEngine()
    rdma = RdmaTransfer(engine, "here", piece_bytes=4096, deadline_s=5.0)
    for _ in range(6):  # more often than there are pieces
        engine.act = act
        with pytest.raises(WeightsUnavailable, match=r"the transfer from other:1 failed"):
            fetched(rdma, b"x" * 100)
        engine.act = Act.COPY
        assert fetched(rdma, b"y" * 100) == b"y" * 100


def test_what_comes_late_lands_in_no_memory_that_is_used_by_then() -> None:
    engine = FakeEngine(Act.HANG)
    rdma = RdmaTransfer(engine, "here", piece_bytes=4096, deadline_s=SHORT_S)
    into = bytearray(b"." * 100)
    with RdmaTransfer(FakeEngine(), "other").exported() as piece:
        piece.view[:100] = b"x" * 100
        for _ in range(4):
            with pytest.raises(WeightsUnavailable, match=r"did not come within 0\.05 s"):
                rdma.fetch("other:1", piece.address, memoryview(into))
        # All that others can write to is still theirs.
        with pytest.raises(WeightsUnavailable, match="no memory for a transfer became free"):
            rdma.fetch("other:1", piece.address, memoryview(into))
        engine.act = Act.COPY
        engine.opened.set()
        assert wait_until(lambda: rdma._to_read.qsize() == 4, 10.0)
    assert into == b"." * 100
    assert fetched(rdma, b"y" * 100) == b"y" * 100


def test_memory_is_not_used_again_when_the_library_itself_breaks() -> None:
    engine = FakeEngine()
    rdma = RdmaTransfer(engine, "here", piece_bytes=4096, deadline_s=SHORT_S)
    engine.transfer_check_status = lambda _: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(WeightsUnavailable, match="from other:1: integer division"):
        fetched(rdma, b"x" * 100)
    assert rdma._to_read.qsize() == 3


def test_memory_that_the_engine_does_not_take_is_said() -> None:
    engine = FakeEngine()
    engine.register_memory = lambda *_: -1  # type: ignore[method-assign]
    with pytest.raises(WeightsUnavailable, match="does not take 32768 bytes"):
        RdmaTransfer(engine, "here", piece_bytes=4096)


# -- between agents -------------------------------------------------------------------------


class Fleet:
    """Three agents behind doors, each with an engine; of every unit one of them lacks a copy."""

    def __init__(self, base: Path) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.served = Served(base, shares_files=True, rdma=self._rdma)
        self.served.world.write(1)

    def _rdma(self, node: str) -> RdmaTransfer | None:
        self.engines[node] = FakeEngine()
        # Smaller than a unit, and no divisor of one.
        return RdmaTransfer(self.engines[node], node, piece_bytes=100, deadline_s=2.0)

    @contextmanager
    def assembled(self, node: str) -> Iterator[AssembledFolder]:
        coordinator, manifest = self.served.world.coordinator, self.served.world.manifest
        made = coordinator.assemble(coordinator.record_of(1), [node])
        assert read_folder(Path(made.path), manifest) == contents(manifest, 1)
        yield made.folders[node]
        coordinator.give_back(made)


@pytest.fixture
def fleet(shared_memory: Path) -> Iterator[Fleet]:
    fleet = Fleet(shared_memory)
    yield fleet
    fleet.served.close()


def test_all_that_a_node_lacks_comes_by_the_engine(fleet: Fleet) -> None:
    with fleet.assembled("node-0") as assembled:
        assert assembled.by == {"mooncake": assembled.fetched_bytes}
        assert not assembled.troubles
        assert sum(fleet.engines["node-0"].lengths) == assembled.fetched_bytes > 0


@pytest.mark.parametrize("act", [Act.REFUSE, Act.FAIL])
def test_where_the_engine_fails_the_streams_bring_it(fleet: Fleet, act: Act) -> None:
    fleet.engines["node-0"].act = act
    with fleet.assembled("node-0") as assembled:
        assert assembled.by == {"tcp": assembled.fetched_bytes}
        assert any("by mooncake: the transfer from" in one for one in assembled.troubles)
        # One failure per peer and stream under way is enough.
        assert len(assembled.troubles) <= 8


def test_bytes_that_the_engine_spoils_are_found_and_asked_for_again(fleet: Fleet) -> None:
    fleet.engines["node-0"].act = Act.SPOIL
    with fleet.assembled("node-0") as assembled:
        assert assembled.by == {"tcp": assembled.fetched_bytes}
        assert any("by mooncake: damaged" in one for one in assembled.troubles)


def test_a_node_that_has_no_engine_is_read_as_a_stream(fleet: Fleet) -> None:
    for node in ("node-1", "node-2"):
        fleet.served.servers[node]._rdma = None
        fleet.served.servers[node].close()
        agent = fleet.served.servers[node].agent
        fleet.served._rdma = lambda _: None
        fleet.served.open(agent)
    with fleet.assembled("node-0") as assembled:
        assert assembled.by == {"tcp": assembled.fetched_bytes}
        assert any("exports no memory" in one for one in assembled.troubles)
    # And one without reads from those with.
    with fleet.assembled("node-1") as assembled:
        assert assembled.by == {"tcp": assembled.fetched_bytes}


def test_two_nodes_read_from_each_other_at_the_same_time(fleet: Fleet) -> None:
    def restore(node: str) -> int:
        with fleet.assembled(node) as assembled:
            return assembled.by["mooncake"]

    with ThreadPoolExecutor() as pool:
        assert all(pool.map(restore, fleet.served.servers))


# -- opening it -----------------------------------------------------------------------------


def test_tcp_needs_nothing() -> None:
    assert open_transfer("tcp", "127.0.0.1") is None


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "on every node pip install mooncake-transfer-engine-non-cuda"),
        (types.ModuleType("mooncake.engine"), "apt-get install libibverbs1"),
    ],
    ids=["no-package", "no-library"],
)
def test_what_is_missing_is_named_and_streams_are_used(
    module: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    assert open_transfer("mooncake", "127.0.0.1") is None
    assert said in caplog.text


def test_an_engine_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeEngine):
        def initialize(self, *_: str) -> int:
            return -3

    module: Any = types.ModuleType("mooncake.engine")
    module.TransferEngine = Broken
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    with pytest.raises(WeightsUnavailable, match=r"does not start at h \(status -3\)"):
        open_mooncake("h")


# -- Mooncake's own -------------------------------------------------------------------------


@pytest.fixture
def real() -> None:
    pytest.importorskip("mooncake")
    pytest.importorskip(
        "mooncake.engine",
        reason="needs libibverbs1, libnuma1 and libcurl4 of the system (make system)",
        exc_type=ImportError,
    )


@pytest.mark.usefixtures("real")
def test_mooncake_brings_what_a_node_lacks(shared_memory: Path) -> None:
    served = Served(shared_memory, shares_files=True, rdma=lambda _: open_mooncake("127.0.0.1"))
    served.world.write(1)
    coordinator, manifest = served.world.coordinator, served.world.manifest
    made = coordinator.assemble(coordinator.record_of(1), ["node-0"])
    assert read_folder(Path(made.path), manifest) == contents(manifest, 1)
    assembled = made.folders["node-0"]
    assert assembled.by == {"mooncake": assembled.fetched_bytes}
    coordinator.give_back(made)
    served.close()


LENDER = """
import sys
from rollout.weights.store.transfer.mooncake import open_mooncake
rdma = open_mooncake("127.0.0.1")
with rdma.exported() as piece:
    piece.view[:] = bytes(range(256)) * (len(piece.view) // 256)
    print("LENT", rdma.session, piece.address, flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures("real")
def test_mooncake_reads_from_another_process_until_that_is_killed() -> None:
    lender = subprocess.Popen(
        [sys.executable, "-c", LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert lender.stdout is not None
    with lender:
        while not (line := lender.stdout.readline()).startswith("LENT"):
            assert line, "it ended early"
        _, session, address = line.split()
        rdma = open_mooncake("127.0.0.1")
        into = bytearray(rdma.piece_bytes)
        rdma.fetch(session, int(address), memoryview(into))
        assert into == bytes(range(256)) * (len(into) // 256)
        lender.kill()
        lender.wait()
        with pytest.raises(WeightsUnavailable, match=session):
            rdma.fetch(session, int(address), memoryview(into))
