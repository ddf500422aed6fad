"""A push that is killed in any of its functions leaves nothing open.  Needs torch.

An error is raised in one function after the other, in whichever thread runs it: the caller's, the
stream's, or that of the event loop with the engines.  Only what frees memory is let run.  Two ranks
are two threads, CUDA is a double.
"""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import rollout
from engines.fake import FakeEngine
from rollout.config import ServerConfig
from rollout.core.errors import RolloutError
from rollout.core.pending import LoopThread, Pending
from rollout.core.types import StepReport
from rollout.runtime.calls.server_pushes import ServerPushes
from rollout.weights.push.push import PushRequest
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.route import EnginePlace
from tests.support.processes import wait_until
from tests.support.still_server import HERE, StillServer
from tests.support.thread_ranks import Messages

torch = pytest.importorskip("torch")
from torch.distributed import distributed_c10d  # noqa: E402

from rollout.runtime.handle.pusher import Pusher  # noqa: E402
from rollout.weights.ranks.link import LocalTexts, RankLink  # noqa: E402
from rollout.weights.tensors import payload  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]
WEIGHTS = str(Path(rollout.__file__).parent / "weights")
ROUTES = ["shared_memory", "tensor", "disk", "distributed", "several"]
# What frees memory, or is called while that is done.
FREEING = {
    "__del__",
    "__exit__",
    "_end",
    "_free",
    "_leave",
    "abort",
    "close",
    "drop",
    "end",
    "ended",
    "free",
    "give",
    "leave",
    "put",
    "release",
    "remove",
    "stay",
    "trim",
}


# Where a thread begins, and a caller's ``with``: nothing can fail there yet.
BEGINS = (
    "Push.__enter__",
    "PushStreamServer._make",
    "PushStreamServer._serve",
    "RankPush.__enter__",
)


class Killed(Exception):
    """The push ends here."""


class Killer:
    """Raises at the first call of one function of ``rollout.weights``.

    Attributes:
        functions: that were called, in their order.
    """

    def __init__(self, victim: str = "") -> None:
        self.functions: dict[str, None] = {}
        self.has_killed = False
        self._victim = victim

    def __enter__(self) -> Killer:
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(WEIGHTS) or code.co_name.startswith("<"):
            return
        # A generator is entered once more when it is dropped, and no caller gets its error.
        if code.co_qualname in BEGINS or code.co_flags & inspect.CO_GENERATOR:
            return
        name = f"{code.co_filename.removeprefix(WEIGHTS)} {code.co_qualname}"
        if name in self.functions or _is_freeing(frame):
            return
        self.functions[name] = None
        if name == self._victim:
            self.has_killed = True
            raise Killed(name)


def _is_freeing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in FREEING and frame.f_code.co_filename.startswith(WEIGHTS):
            return True
        frame = frame.f_back
    return False


class Server(StillServer):
    """Sends each push to engines that do nothing, in an event loop of its own."""

    def __init__(self, loop: LoopThread, config: ServerConfig, places: list[EnginePlace]) -> None:
        super().__init__(engines=places)
        self.config = config
        self.loop = loop
        self.groups: dict[str, str] = {}
        kind = TakesHandles if any(one.gpus for one in places) else FakeEngine
        self.fakes = {one.engine_id: kind(one.engine_id) for one in places}

    def serve_weights(self, push: WeightPush, until: Any = None) -> Pending[StepReport]:
        return self.loop.submit(self._sent(push))

    async def _sent(self, push: WeightPush) -> StepReport:
        # Groups of the trainer alone: these engines have no ranks in them.
        joins = {
            name: bool((one := push.route_of(name)) and one.route.joins) for name in self.fakes
        }
        targets = {
            name: PushTarget(fake, 0 if joins[name] else 1, process=name)
            for name, fake in self.fakes.items()
        }
        replies = await push_weights(push, targets, budget_s=30, groups=self.groups)
        for reply in replies.values():
            if reply.failure is not None:
                raise reply.failure
        return StepReport()

    def shipped(self, push: WeightPush) -> WeightPush:
        return push

    def record_push(self, spans: Any) -> Pending[Any]:
        return self.loop.submit(_nothing())


class TakesHandles(FakeEngine):
    """Opens no handle."""

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **more: Any
    ) -> None:
        assert serialized_named_tensors


async def _nothing() -> None:
    """Nothing is recorded."""


def config_of(route: str, tmp_path: Path, *, streams: bool = True) -> ServerConfig:
    weights: dict[str, Any] = {
        "transport": "auto" if route in ("several", "adapter") else route,
        "shared_memory_path": str(tmp_path),
        "disk_path": str(tmp_path / "disk-{version}"),
        "bucket_bytes": 512,
        "group_timeout_s": 20,
        "stream": streams,
    }
    if route == "adapter":
        weights["update"] = "lora"
    return ServerConfig.model_validate(
        {
            "model_path": str(tmp_path / "model"),
            "groups": {"main": {"engine": {"kind": "embedded"}}},
            "lifecycle": {"update_timeout_s": 20},
            "weights": weights,
        }
    )


def places_of(route: str) -> list[EnginePlace]:
    near = EnginePlace("near", HERE)
    if route == "cuda_ipc":
        return [EnginePlace("near", HERE, gpus=(GPU,))]
    if route != "several":
        return [near]
    far = EnginePlace("far", "another host")
    return [near, far, EnginePlace("alone", "another host", why_no_groups="it joins none")]


TENSORS = {f"t{number}": torch.randn(64) for number in range(4)}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
ADAPTER = {
    f"{MODULE}.lora_A.weight": torch.randn(4, 64),
    f"{MODULE}.lora_B.weight": torch.randn(64, 4),
}
GPU = "1"
# A rank that is killed is silent; the other one waits so long.
RANK_TIMEOUT_S = 2.0


class Trainer:
    """One process that pushes in one of its ways."""

    def __init__(self, loop: LoopThread, tmp_path: Path, how: str, route: str) -> None:
        self.tmp_path = tmp_path
        self.how = how
        config = config_of(route, tmp_path, streams=how != "copied")
        server: Any = Server(loop, config, places_of(route))
        self.pushes = ServerPushes(config, server)
        self.pushes.server = server
        self.route = route
        self.num_ranks = 2 if how == "two ranks" else 1
        texts = LocalTexts() if self.num_ranks == 1 else Messages()
        timeout_s = 20 if self.num_ranks == 1 else RANK_TIMEOUT_S
        idle = self.pushes.idle_group

        def pusher(rank: int) -> Pusher:
            link = RankLink(rank, self.num_ranks, texts)
            own = idle if rank == 0 else None
            return Pusher(server, link, timeout_s=timeout_s, idle_group=own)

        self.pushers = self._each(pusher)

    def _each(self, do: Callable[[int], Any]) -> list[Any]:
        """What it returns for each rank; a single one is this thread."""
        if self.num_ranks == 1:
            return [do(0)]
        with ThreadPoolExecutor(self.num_ranks) as threads:
            calls = [threads.submit(do, rank) for rank in range(self.num_ranks)]
        return [call.result() for call in calls]

    def push(self) -> None:
        is_adapter = self.route == "adapter"
        config = {"r": 4, "lora_alpha": 8} if is_adapter else None
        tensors: Any = ADAPTER if is_adapter else TENSORS
        if self.how in ("all ranks", "two ranks"):
            self._each(lambda rank: self.pushers[rank].push(tensors, adapter=config))
        elif self.how == "a generator":
            self.pushers[0].push(iter(tensors.items()))
        else:
            request = PushRequest(tensors, adapter=config)
            with self.pushes.make(request, may_stream=self.how == "streamed") as push:
                server: Any = self.pushes.server
                push.send(lambda made: server.serve_weights(server.shipped(made))).result(30)

    def check(self) -> None:
        """Nothing of a push is open, but the memory and the group that the next one takes."""
        assert not [one for one in self.pushes._open if not one.is_closed]
        ranks = (self.pushes._rank, *(one.rank for one in self.pushers))
        pools = [one.pool for one in ranks if one is not None]
        assert not [buffer for pool in pools for buffer in pool._taken]
        assert wait_until(lambda: not stream_threads(), 10), stream_threads()
        assert not [one for one in self.tmp_path.glob(".*") if one.name.endswith(".writing")]
        idle = self.pushes.idle_group.name
        groups = list(distributed_c10d._world.pg_names.values())
        assert groups == ([idle] if idle else []), groups

    def close(self) -> None:
        for pusher in self.pushers:
            pusher.close()
        self.pushes.close()
        assert not list(self.tmp_path.glob("rollout-push-*"))
        assert not distributed_c10d._world.pg_names


def stream_threads() -> list[str]:
    names = [one.name for one in threading.enumerate()]
    return [name for name in names if name.startswith("push-stream")]


def killed_everywhere(made: Callable[[], Trainer]) -> None:
    """Kill the push of a trainer in each of its functions; its next push succeeds."""
    trainer = made()
    with Killer() as none:
        trainer.push()
    trainer.check()
    trainer.close()
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
        trainer.close()
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
SLOW = [
    pytest.param(how, route, marks=pytest.mark.slow)
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["copied", "all ranks"])
def test_an_adapter_that_is_killed_in_any_function_leaves_nothing_open(
    loop: LoopThread, tmp_path: Path, how: str
) -> None:
    killed_everywhere(lambda: Trainer(loop, tmp_path, how, "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize("route", ["shared_memory", "distributed"])
def test_two_ranks_of_which_one_is_killed_in_any_function_leave_nothing_open(
    loop: LoopThread, tmp_path: Path, route: str
) -> None:
    killed_everywhere(lambda: Trainer(loop, tmp_path, "two ranks", route))


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

    def noted(pairs: Any, device: Any) -> Any:
        made = make(pairs, device)
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
    trainer.close()


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
