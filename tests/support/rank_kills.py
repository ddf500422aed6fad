"""Kill ranks and engines at random moments of a push: ``python -m tests.support.rank_kills``.

    python -m tests.support.rank_kills FOLDER NUM_KILLS SEED

A separate program, because it forks the ranks from a process that has imported torch, so that a
rank costs a fraction of a second.  Several lanes, each a server with two fake engines and the ranks
of its trainer, run side by side: most of the time a lane waits for a deadline.

After each kill:

- every rank that lives has ended with the same report or the same error, within its deadline, and
  the error names the rank that was killed;
- an engine that serves holds exactly what was pushed under its version;
- the next push works, and all engines serve it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import write_checkpoint
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, TensorInfo
from engines.tensors.fingerprint import host_fingerprint
from rollout.config import RolloutConfig
from rollout.core.types import EngineStatus
from rollout.runtime.local import launch_local
from tests.support.engine_keys import Keys
from tests.support.processes import wait_until

# clock: kills at random moments.

MOST_LANES = 10
RANK_TIMEOUT_S = 6.0
GATHER_TIMEOUT_S = 8.0
# A rank may take the deadline of a gather, that of rank 0, its own, and what a busy machine adds.
LIMIT_S = GATHER_TIMEOUT_S + 2 * RANK_TIMEOUT_S + 15
ROWS = 32
TENSORS = tuple(TensorInfo(f"layers.{index}.weight", "float32", (ROWS, 64)) for index in range(24))
# An engine may be found dead only after a push has begun; then it takes part in the next.
_MOST_PUSHES = 4
BUCKET_BYTES = ROWS * 64 * 4


def make_engine(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(
        spec.engine_id,
        endpoint=endpoint,
        model_path=spec.model_path,
        weight_version=str(spec.weight_version),
        tensors=TENSORS,
    )


def contents(version: int) -> dict[str, Any]:
    """The tensors of a version, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(version)
    return {one.name: torch.randn(one.shape, generator=generator) for one in TENSORS}


def fingerprints(version: int) -> dict[str, str]:
    return {
        name: host_fingerprint(name, "float32", tuple(one.shape), one.numpy().tobytes())
        for name, one in contents(version).items()
    }


# -- one rank -------------------------------------------------------------------------------


def rank_main(asked: Connection, run: str, meet: str, rank: int, num_ranks: int) -> None:
    """A rank of a trainer: pushes the version that it gets, and says how that ended."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import rollout

    torch.set_num_threads(1)
    # A rank of three may wait in a gather for one that has left it with an error, because the
    # third was killed: only the group's own deadline ends that.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=GATHER_TIMEOUT_S),
    )
    mesh = init_device_mesh("cpu", (num_ranks,))
    pusher = rollout.connect(run)["policy"].pusher(rank_timeout_s=RANK_TIMEOUT_S)
    asked.send("ready")

    def generated(shards: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, shard in shards.items():
            yield name, shard.full_tensor()

    while True:
        try:
            version, is_generator = asked.recv()
        except EOFError:
            break
        shards = {
            name: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)
            for name, one in contents(version).items()
        }
        asked.send("begins")
        asked.recv()  # all are there: how busy the machine is must not look like a late rank
        started = time.monotonic()
        try:
            report = pusher.push(generated(shards) if is_generator else shards, version=version)
            said = f"version {report.weight_version}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        asked.send((said, time.monotonic() - started))
    pusher.close()


@dataclass
class Rank:
    process: Any
    asks: Connection

    def heard(self, timeout_s: float) -> Any:
        """Its next word; None if it has died.

        Raises:
            AssertionError: it says nothing.
        """
        try:
            assert self.asks.poll(timeout_s), f"a rank says nothing for {timeout_s:g} s"
            return self.asks.recv()
        except (EOFError, OSError):
            return None


# -- a lane ---------------------------------------------------------------------------------


@dataclass
class Figures:
    """What the kills did; shared by the lanes."""

    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    num_engines_checked: int = 0


class Lane:
    """A server with its engines, and the ranks of its trainer.

    Args:
        num_ranks: of the trainer.
    """

    def __init__(
        self, folder: Path, seed: int, num_ranks: int, forks: Any, figures: Figures
    ) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._num_ranks = num_ranks
        self._forks = forks
        self._figures = figures
        self._version = 0
        self._starts = 0
        self._times_s = [0.2]
        self._ranks: list[Rank] = []
        self.pids: list[int] = []
        folder.mkdir(parents=True)
        self._deployment = launch_local(_config(folder), launcher=HttpFakeLauncher(make_engine))
        self._policy = self._deployment["policy"]

    def run(self, num_kills: int) -> None:
        self._push()
        for number in range(num_kills):
            is_rank = self._chance.random() < 0.5
            victim = self._chance.randrange(self._num_ranks if is_rank else 2)
            moment_s = self._chance.uniform(0.0, 1.2) * statistics.median(self._times_s)
            what = f"{'rank' if is_rank else 'engine'} {victim} after {moment_s * 1e3:.0f} ms"
            try:
                self._kill(is_rank, victim, moment_s)
                self._check_engines()
                self._push()
            except BaseException as error:
                raise AssertionError(
                    f"{self._folder.name}, kill {number}, {what}: {error!r}"
                ) from error

    def close(self) -> None:
        self._end_ranks()
        self._deployment.stop()

    # -- pushes -----------------------------------------------------------------------------

    def _push(self) -> None:
        """Pushes without a fault until all engines serve: every rank reports each."""
        if not self._ranks:
            self._start_ranks()
        for _ in range(_MOST_PUSHES):
            assert wait_until(self._all_are_up, 30), self._engines()
            words = self._asked()
            assert {said for said, _ in words} == {f"version {self._version}"}, words
            self._times_s = [*self._times_s[-6:], max(seconds for _, seconds in words)]
            if self._all_serve():
                break
        assert self._check_engines() == 2, self._engines()

    def _asked(self, kill: Any = None) -> list[Any]:
        """What each rank says of the next version's push; None of one that died."""
        self._version += 1
        is_generator = self._chance.random() < 0.3
        for rank in self._ranks:
            rank.asks.send((self._version, is_generator))
        for rank in self._ranks:
            assert rank.heard(60) == "begins"
        for rank in self._ranks:
            rank.asks.send("go")
        if kill is not None:
            kill()
        return [rank.heard(LIMIT_S) for rank in self._ranks]

    def _kill(self, is_rank: bool, victim: int, moment_s: float) -> None:
        url = self._engines()[victim % 2].endpoint.url

        def kill() -> None:
            time.sleep(moment_s)
            if is_rank:
                self._ranks[victim].process.kill()
            else:
                httpx.post(f"{url}/fake/kill", json={}, timeout=30, trust_env=False)

        words = self._asked(kill)
        lived = [word for word in words if word is not None]
        said = {word[0] for word in lived}
        if is_rank and victim == 0 and words[0] is None and len(said) > 1:
            # It was killed while it sent them that the push is done.
            said.discard(f"version {self._version}")
        assert len(said) == 1, [word and word[0] for word in words]
        outcome = said.pop()
        assert len(lived) == self._num_ranks or words[victim] is None, words
        is_done = outcome == f"version {self._version}"
        if is_rank:
            assert is_done or words[victim] or f"rank {victim} " in outcome, outcome
            self._end_ranks()
        kind = "done" if is_done else outcome.split(":")[0]
        self._figures.outcomes[f"{'rank' if is_rank else 'engine'}: {kind}"] += 1
        slowest_s = max(word[1] for word in lived)
        self._figures.slowest_s = max(self._figures.slowest_s, slowest_s)

    # -- engines ----------------------------------------------------------------------------

    def _engines(self) -> list[EngineStatus]:
        return list(self._policy.status().result(60).groups[0].engines)

    def _all_are_up(self) -> bool:
        """Whether recovery has replaced what was killed: a fenced engine gets no push."""
        return all(one.pid and one.state not in ("dead", "fenced") for one in self._engines())

    def _all_serve(self) -> bool:
        return all(one.state == "serving" for one in self._engines())

    def _check_engines(self) -> int:
        """Check those that serve; returns how many do."""
        num_serving = 0
        for one in self._engines():
            if one.state != "serving" or one.weight_version in (None, 0):
                continue
            try:
                reply = httpx.post(
                    f"{one.endpoint.url}/weights_checker",
                    json={"action": "checksum"},
                    timeout=30,
                    trust_env=False,
                    auth=Keys(one),
                ).json()
            except httpx.TransportError:
                continue  # it was killed a moment ago
            num_serving += 1
            held = reply["ranks"][0]["checksums"]
            assert held == fingerprints(int(one.weight_version or 0)), f"wrong weights in {one}"
        self._figures.num_engines_checked += num_serving
        return num_serving

    # -- ranks ------------------------------------------------------------------------------

    def _start_ranks(self) -> None:
        self._starts += 1
        run = next(self._folder.glob("*/*/journal.json")).parent.parent
        for rank in range(self._num_ranks):
            asks, asked = self._forks.Pipe()
            meet = str(self._folder / f"meet-{self._starts}")
            process = self._forks.Process(
                target=rank_main, args=(asked, str(run), meet, rank, self._num_ranks)
            )
            process.start()
            asked.close()
            self.pids.append(process.pid)
            self._ranks.append(Rank(process, asks))
        for one in self._ranks:
            assert one.heard(60) == "ready"

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.asks.close()
        for rank in self._ranks:
            rank.process.join(30)
            assert rank.process.exitcode is not None, "a rank does not end after its push"
        self._ranks = []


def _config(folder: Path) -> RolloutConfig:
    lifecycle = {"update_timeout_s": 20, "command_timeout_s": 20}
    health = {"probe_interval_s": 0.2, "backoff_s": 0.05, "max_restarts": 10_000}
    server = {
        "model_path": str(write_checkpoint(folder / "model", TENSORS)),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
        "weights": {"bucket_bytes": BUCKET_BYTES},
        "lifecycle": lifecycle,
        "health": health,
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})


def kill_often(folder: Path, num_kills: int, seed: int) -> None:
    print(f"seed {seed}", flush=True)
    logging.disable(logging.ERROR)  # of engines that are killed
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    forks = multiprocessing.get_context("forkserver")
    # Each rank imports this module again, and its first distribute_tensor imports torch._dynamo.
    forks.set_forkserver_preload(
        [
            *("engines.fake.http_fake", "rollout.runtime.local", "tests.support.processes"),
            *("rollout.runtime.handle.pusher", "torch.distributed.tensor", "torch._dynamo"),
        ]
    )
    figures = Figures()
    started = time.monotonic()
    num_lanes = min(MOST_LANES, max(1, num_kills // 3))
    lanes = [
        Lane(folder / f"lane-{number}", seed * 1000 + number, 2 + number % 2, forks, figures)
        for number in range(num_lanes)
    ]
    failed: list[BaseException] = []

    def run(lane: Lane) -> None:
        try:
            lane.run(num_kills // num_lanes)
        except BaseException as error:
            failed.append(error)
        finally:
            try:
                lane.close()
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = {pid for lane in lanes for pid in lane.pids}
    left = [path.name for path in Path("/dev/shm").glob("rollout-*") if _owner_of(path) in pids]
    seconds = time.monotonic() - started
    print(
        f"{sum(figures.outcomes.values())} kills in {seconds:.0f} s: {dict(figures.outcomes)}; "
        f"slowest rank {figures.slowest_s:.1f} s, {figures.num_engines_checked} engines checked, "
        f"{len(pids)} ranks started",
        flush=True,
    )
    for error in failed:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    assert not failed
    assert not left, left


def _owner_of(path: Path) -> int:
    number = path.name.split("-")
    return next((int(part) for part in number if part.isdecimal()), 0)


if __name__ == "__main__":
    kill_often(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
