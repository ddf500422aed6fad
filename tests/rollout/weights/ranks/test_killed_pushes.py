"""A push that is killed in any of its functions leaves nothing open.  Needs torch.

An error is raised in one function after the other, in whichever thread runs it: the caller's, the
stream's, or that of the event loop with the engines.  Two ranks are processes, CUDA is a double.
Trainers that are killed with SIGKILL leave files, which the next one removes.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.core.errors import RolloutError
from rollout.core.pending import LoopThread
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.weight_push import WeightPush
from tests.support.processes import program, wait_until

pytest.importorskip("torch")
import torch
from torch.distributed import distributed_c10d

from rollout.weights.tensors import payload
from rollout.weights.tensors.delta_base import DeltaBase
from tests.support.cuda_double import CudaDouble
from tests.support.killed_push import (
    GPU,
    Killer,
    Trainer,
    stream_threads,
)

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
ROUTES = ["shared_memory", "by_value", "disk", "distributed", "several"]


def close(trainer: Trainer) -> None:
    """Close it; nothing of it is there afterwards."""
    trainer.close()
    assert not list(trainer.folder.glob("rollout-push-*"))
    assert not distributed_c10d._world.pg_names


def killed_everywhere(made: Callable[[], Trainer]) -> None:
    """Kill the push of a trainer in each of its functions; its next push succeeds."""
    trainer = made()
    with Killer() as none:
        trainer.push()
    trainer.check()
    close(trainer)
    num_files = psutil.Process().num_fds()
    assert len(none.functions) > 40
    num_killed = 0
    for name in none.functions:
        trainer = made()
        with Killer(name) as killer:
            try:
                trainer.push()
            except Exception:
                assert killer.has_killed
        num_killed += killer.has_killed
        trainer.check()
        trainer.push()
        trainer.check()
        close(trainer)
        assert wait_until(lambda: psutil.Process().num_fds() <= num_files, 10), name
    assert num_killed > len(none.functions) - 5


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    found = LoopThread("engines")
    yield found
    found.close()


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is killed reports it nowhere."""
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)


QUICK = [("copied", "shared_memory"), ("streamed", "shared_memory")]
# The other pairs are in ``make test-chaos``.
USUAL = [
    ("copied", "disk"),
    ("streamed", "distributed"),
    ("streamed", "by_value"),
    ("all ranks", "several"),
    ("a generator", "shared_memory"),
]
SLOW = [
    pytest.param(
        how,
        route,
        marks=[pytest.mark.slow, *([] if (how, route) in USUAL else [pytest.mark.chaos])],
    )
    for how in ("copied", "streamed", "all ranks", "a generator")
    for route in ROUTES
    # A broadcast sends no copies.
    if (how, route) not in (*QUICK, ("copied", "distributed"))
]


@pytest.mark.parametrize(("how", "route"), [*QUICK, *SLOW])
def test_a_push_that_is_killed_in_any_function_leaves_nothing_open(
    loop: LoopThread, tmp_path: Path, how: str, route: str
) -> None:
    killed_everywhere(lambda: Trainer(loop, tmp_path, how, route))


def copies_of(rank: Any) -> DeltaBase:
    """What it begins a delta from; without a version before the first push."""
    return rank.encodings["delta"].copies or DeltaBase()


@pytest.mark.parametrize(
    "how",
    [
        "copied",
        pytest.param("streamed", marks=pytest.mark.chaos),
        pytest.param("all ranks", marks=pytest.mark.slow),
    ],
)
def test_a_delta_that_is_killed_in_any_function_is_followed_by_whole_tensors_in_every_bit(
    loop: LoopThread, tmp_path: Path, how: str
) -> None:
    routes: list[str] = []

    class Deltas(Trainer):
        """Begins with a push of whole tensors; of a delta, it looks at what the engine has."""

        def __init__(self) -> None:
            super().__init__(loop, tmp_path, how, "delta")
            self.push()

        def push(self) -> None:
            rank = self.pusher.rank if self.how == "all ranks" else self.pushes._rank
            before = None if rank is None else copies_of(rank).version
            server: Any = self.pushes.server
            super().push()
            rank = self.pusher.rank if self.how == "all ranks" else self.pushes._rank
            assert rank is not None
            (fake,) = server.fakes.values()
            for name, tensor in self.tensors.items():
                assert torch.equal(fake.weights.find(name), tensor)
            routes.append("whole" if before is None or copies_of(rank).density is None else "delta")
            assert copies_of(rank).version == fake.holds

    killed_everywhere(Deltas)
    assert routes[:2] == ["whole", "delta"]
    # After a push that was killed.
    assert routes.count("whole") > 40


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("copied", marks=pytest.mark.chaos), "all ranks"])
def test_an_adapter_that_is_killed_in_any_function_leaves_nothing_open(
    loop: LoopThread, tmp_path: Path, how: str
) -> None:
    killed_everywhere(lambda: Trainer(loop, tmp_path, how, "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "route", [pytest.param("shared_memory", marks=pytest.mark.chaos), "distributed"]
)
def test_two_processes_of_which_one_is_killed_in_any_function_leave_nothing_open(
    tmp_path: Path, route: str
) -> None:
    with program("-m", "tests.support.killed_ranks", tmp_path, route) as running:
        running.wait_for("killed in", 300)
        assert running.process.wait(30) == 0, running.output
    num_killed, num_functions = map(int, re.findall(r"killed in (\d+) of (\d+)", running.output)[0])
    assert num_functions > 80
    assert num_killed > num_functions - 10
    assert not list(tmp_path.glob("*/rollout-push-*"))


@pytest.mark.parametrize(
    ("how", "route"),
    [
        ("two ranks", "shared_memory"),
        ("copied", "disk"),
        *(
            pytest.param(how, route, marks=pytest.mark.slow)
            for how, route in (
                ("copied", "delta on disk"),
                ("copied", "shared_memory"),
                ("streamed", "shared_memory"),
                ("all ranks", "shared_memory"),
                ("a generator", "shared_memory"),
            )
        ),
    ],
)
def test_what_a_trainer_leaves_that_is_killed_at_any_line_the_next_one_removes(
    tmp_path: Path, how: str, route: str
) -> None:
    with program("-m", "tests.support.killed_trainers", tmp_path, how, route) as running:
        assert running.finish(300) == 0, running.output
    num_killed, num_left = map(int, re.findall(r"killed at (\d+) lines; (\d+)", running.output)[0])
    assert num_killed > 50
    assert num_left > 30, "what was killed had written nothing"


@pytest.mark.slow
def test_handles_that_are_killed_in_any_function_leave_no_memory(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = CudaDouble(["0", GPU])
    cuda.install(monkeypatch.setattr)
    cuda.use(1)
    flat: list[weakref.ref[Any]] = []
    all_handles: list[str] = []
    make = payload.ipc_handle

    def noted(pairs: Any, *where: Any) -> Any:
        made = make(pairs, *where)
        flat.append(weakref.ref(made.flat))
        all_handles.append(pairs[0][0])
        return made

    monkeypatch.setattr(payload, "ipc_handle", noted)

    class OnGpu(Trainer):
        def check(self) -> None:
            super().check()
            if any(one() is not None for one in flat):
                gc.collect()  # an error may have a reference to itself
            assert not [one for one in flat if one() is not None]
            flat.clear()

    killed_everywhere(lambda: OnGpu(loop, tmp_path, "a generator", "cuda_ipc"))
    assert len(all_handles) > 40
    assert cuda.num_collects


def test_a_push_whose_call_cannot_begin_is_freed(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(loop, tmp_path, "streamed", "shared_memory")

    def closed(push: WeightPush) -> WeightPush:
        raise RolloutError("the deployment is closed")

    monkeypatch.setattr(trainer.pushes.server, "shipped", closed)
    with pytest.raises(RolloutError, match="the deployment is closed"):
        trainer.push()
    trainer.check()
    close(trainer)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_stream_without_its_threads_has_no_socket(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    begin, num_begun = threading.Thread.start, 0

    def some(thread: threading.Thread) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun > num_threads:
            raise RuntimeError("can't start new thread")
        begin(thread)

    num_files = psutil.Process().num_fds()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", some)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            PushStreamServer([])
    assert psutil.Process().num_fds() == num_files
    assert not stream_threads()
