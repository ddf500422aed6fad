"""Kills a push in one of its functions, and checks that nothing is open afterwards.  Needs torch.

An error is raised at the first call of a function, in whichever thread runs it.  Only what frees
memory is let run.
"""

from __future__ import annotations

import glob
import inspect
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import distributed_c10d

import rollout
from engines.embedded.weights.model_weights import ModelWeights
from engines.embedded.weights.payload_tensors import read_payload
from engines.fake import FakeEngine
from rollout.config import ServerConfig
from rollout.core.pending import LoopThread, Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.runtime.calls.server_pushes import ServerPushes
from rollout.runtime.handle.pusher import Pusher
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.ranks.link import RankLink
from rollout.weights.routes.adapter import AsAdapter
from rollout.weights.routes.route import EnginePlace
from tests.support.kept_groups import kept_group
from tests.support.processes import wait_until
from tests.support.still_server import HERE, StillServer

WEIGHTS = str(Path(rollout.__file__).parent / "weights")
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
    "release_memory_occupation",
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
        self._is_over = False
        self._before: tuple[Any, Any] = None, None

    def __enter__(self) -> Killer:
        self._before = sys.gettrace(), threading.gettrace()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        # Another one measures coverage.
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])  # type: ignore[arg-type]
        # A thread that a pool begins meanwhile is traced until it ends.
        self._is_over = True

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self._is_over or not code.co_filename.startswith(WEIGHTS):
            return
        if code.co_name.startswith("<"):
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
        if config.weights.encoding != "full":
            is_disk = config.weights.transport == "disk"
            kind = KnowsItsVersion if is_disk else AppliesDeltas
        self.fakes = {one.engine_id: kind(one.engine_id) for one in places}

    def push(self, push: WeightPush, until: Any = None) -> Pending[StepReport]:
        return self.loop.submit(self._sent(push))

    async def _sent(self, push: WeightPush) -> StepReport:
        # Groups of the trainer alone: these engines have no ranks in them.
        joins = {
            name: bool((one := push.route_of(name)) and one.route.joins) for name in self.fakes
        }
        targets = {
            name: PushTarget(
                fake,
                0 if joins[name] else 1,
                process=name,
                is_compared=isinstance(fake, KnowsItsVersion),
            )
            for name, fake in self.fakes.items()
        }
        if isinstance(push.route, AsAdapter):
            (payload,) = push.buckets
            assert isinstance(payload, bytes)
            for target in targets.values():
                await push.route.load(target, push.route.pack(payload), push.version)
            return StepReport()
        replies = await push_weights(push, targets, budget_s=30, groups=self.groups)
        for reply in replies.values():
            if reply.failure is not None:
                raise reply.failure
        return StepReport()

    def places(self, status: ServerStatus) -> list[EnginePlace]:
        return [
            replace(place, weight_version=getattr(self.fakes[place.engine_id], "holds", None))
            for place in self.engines
        ]

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


class AppliesDeltas(FakeEngine):
    """Has tensors.

    Attributes:
        holds: the version of its tensors; None if a push has not come to its end.
    """

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id)
        self.holds: int | None = None
        self.weights = ModelWeights(torch.nn.Module())
        own = {name: torch.zeros_like(one) for name, one in TENSORS.items()}
        self.weights._tensors = self.weights._by_name = own
        self.weights.version = lambda: str(self._last)
        self._last = 0

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **more: Any
    ) -> None:
        self.holds = None
        named = read_payload(serialized_named_tensors[0], more.get("load_format"))
        for change in self.weights.changes(named):
            change()
        if (version := more["weight_version"]) is not None:
            self.holds = self._last = int(version)


class KnowsItsVersion(FakeEngine):
    """Gets deltas by path.

    Attributes:
        holds: the version of the last push; None before.
    """

    holds: int | None = None

    async def update_weights_from_disk(
        self, model_path: str, *, weight_version: str | None = None, **more: Any
    ) -> None:
        assert glob.glob(f"{model_path}/*.safetensors")
        if weight_version is not None:
            self.holds = int(weight_version)


async def _nothing() -> None:
    """Nothing is recorded."""


def config_of(route: str, tmp_path: Path, *, streams: bool = True) -> ServerConfig:
    weights: dict[str, Any] = {
        "transport": "auto" if route in MIXED else route,
        "shared_memory_path": str(tmp_path),
        "disk_path": str(tmp_path / "disk-{version}"),
        "bucket_bytes": 512,
        "group_timeout_s": 20,
        "stream": streams,
    }
    if route == "adapter":
        weights["update"] = "lora"
    if route == "delta":
        weights |= {"transport": "by_value", "encoding": "delta"}
    if route == "delta on disk":
        weights |= {"transport": "disk", "encoding": "delta"}
    return ServerConfig.model_validate(
        {
            "model_path": str(tmp_path / "model"),
            "groups": {"main": {"engine": {"kind": "embedded"}}},
            "lifecycle": {"update_timeout_s": 20},
            "weights": weights,
        }
    )


def places_of(route: str) -> list[EnginePlace]:
    near = EnginePlace("near", HERE, encodings=("delta",))
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
# Settings that are no name of a transport.
MIXED = ("several", "adapter", "delta", "delta on disk")
# Of all ranks of a trainer.
DEFAULT_GROUP = "0"
TIMEOUT_S = 20.0


class Trainer:
    """One process that pushes in one of its ways, alone or as one of several ranks."""

    def __init__(
        self,
        loop: LoopThread,
        folder: Path,
        how: str,
        route: str,
        link: RankLink | None = None,
    ) -> None:
        self.folder = folder
        self.how = how
        self.tensors = TENSORS
        self.route = route
        config = config_of(route, folder, streams=how != "copied")
        server: Any = Server(loop, config, places_of(route))
        self.pushes = ServerPushes(config, server)
        self.pushes.server = server
        self.pusher = Pusher(
            server,
            link or RankLink(),
            timeout_s=TIMEOUT_S,
            idle_group=self.pushes.idle_group,
        )

    def push(self, version: int | None = None) -> None:
        is_adapter = self.route == "adapter"
        config = {"r": 4, "lora_alpha": 8} if is_adapter else None
        tensors: Any = ADAPTER if is_adapter else TENSORS
        if self.route.startswith("delta"):
            self.tensors = {name: one.clone() for name, one in self.tensors.items()}
            for one in self.tensors.values():
                one[3] += 1
            tensors = self.tensors
        if self.how == "all ranks":
            self.pusher.push(tensors, adapter=config, version=version)
        elif self.how == "a generator":
            self.pusher.push(iter(tensors.items()), version=version)
        else:
            request = PushRequest(tensors, version, adapter=config)
            with self.pushes.make(request, may_stream=self.how == "streamed") as push:
                server: Any = self.pushes.server
                push.send(lambda made: server.push(server.shipped(made))).result(30)

    def check(self) -> None:
        """Nothing of a push is open, but the memory and the group that the next one takes."""
        assert not [one for one in self.pushes._open if not one.is_closed]
        ranks = (self.pushes._rank, self.pusher.rank)
        pools = [one.pool for one in ranks if one is not None]
        assert not [buffer for pool in pools for buffer in pool._taken]
        assert wait_until(lambda: not stream_threads(), 10), stream_threads()
        assert not list(self.folder.glob(".*"))
        idle = kept_group(self.pushes.idle_group)
        groups = list(distributed_c10d._world.pg_names.values())
        groups = [name for name in groups if name != DEFAULT_GROUP]
        assert groups == ([idle] if idle else []), groups

    def close(self) -> None:
        self.pusher.close()
        self.pushes.close()


def stream_threads() -> list[str]:
    names = [one.name for one in threading.enumerate()]
    return [name for name in names if name.startswith("push-stream")]
