"""Engines of every kind, ready for the contract suite.

A test gets an engine that serves version 0 of the first model, and hands back one that does too,
or one that is dead; an engine with wrong replies afterwards is ended and started again.  Where
starting takes long, the next one is started while this one is tried to death.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from engines.fake import FakeLauncher
from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, FakeTensor, pack_tensors
from engines.fake.http_fake import HttpFakeLauncher
from engines.http.call import Deadlines
from engines.http.client import EngineClient
from engines.kinds import KINDS, kind_of
from engines.launch import EngineSpec, LocalLauncher, RunningEngine
from engines.protocol import Endpoint, Engine, GenerateReply, MemoryTag, SamplingParams
from engines.protocol.errors import EngineError, EngineRejected
from engines.protocol.features import Features, read_features
from engines.vllm.client import VllmClient
from rollout.config import RouterConfig
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.router import Backend, RouterHost
from tests.support.engine_keys import Keys
from tests.support.vllm_stub.wire import ServedStubs, make_stub

T = TypeVar("T")

PROMPT = tuple(b"Once upon a time")
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_new_tokens=4000, temperature=0.0, ignore_eos=True)
VOCABULARY = 259
"""Tokens of the tiny models: bytes and three special ones."""
CONTEXT_LENGTH = 4096
"""Of the tiny models."""
EOS = 256
"""Of the tiny models; it ends an output."""
VLLM_STUB = "vllm-stub"
CPU_OPTIONS: dict[str, dict[str, Any]] = {
    "embedded": {"dtype": "float32", "max-total-tokens": 32768, "log-level": "warning"},
    "sglang": {"dtype": "float32", "max-total-tokens": 20000},
    "vllm": {"max-model-len": 4096, "block-size": 32},
}


@dataclass(frozen=True)
class Models:
    """Two checkpoints of one shape."""

    first: Path
    second: Path


class Background:
    """An event loop in a thread, so that an engine can start while a test runs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Pool:
    """Engine processes of one kind: one in use and, while ``has_spare``, one that starts."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.has_spare = False
        self.num_launched = 0
        self._background = Background()
        self._current: RunningEngine | None = None
        self._next: Any = None

    async def take(self) -> RunningEngine:
        """The one in use; the next one where that was ended."""
        if self._current is None:
            starting = self._next or self._launch()
            self._next = None
            self._current = await asyncio.wrap_future(starting)
        if self.has_spare and self._next is None:
            self._next = self._launch()
        return self._current

    async def discard(self) -> None:
        """End the one in use, whatever state it is in."""
        ended, self._current = self._current, None
        if ended is not None:
            await ended.kill()

    def close(self) -> None:
        for one in (self._current, self._next):
            with suppress(EngineError):
                if one is not None:
                    running = one if one is self._current else one.result(300)
                    self._background.run(running.stop(10.0), 60)
        self._background.close()

    def _launch(self) -> Any:
        from dataclasses import replace

        self.num_launched += 1
        spec = replace(self.spec, engine_id=f"{self.spec.kind}-{self.num_launched}")
        spec = replace(spec, log_path=spec.log_path.replace("0.log", f"{self.num_launched}.log"))
        launch = LocalLauncher().launch(spec)
        return asyncio.run_coroutine_threadsafe(launch, self._background.loop)


@dataclass
class InFlight:
    """A request that has given its first token and goes on."""

    last: GenerateReply | None = None
    came: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[GenerateReply] | None = None

    async def follow(self, engine: Engine, sampling: SamplingParams, rid: str | None) -> Any:
        return await self.read(
            engine.stream_generate(input_ids=PROMPT, sampling_params=sampling, rid=rid)
        )

    async def read(self, stream: AsyncIterator[GenerateReply]) -> GenerateReply:
        """The last reply of ``stream``."""
        async with aclosing(stream) as replies:  # type: ignore[type-var]
            async for reply in replies:
                self.last = reply
                async with self.came:
                    self.came.notify_all()
                # The tokens of a fast engine may all be here; other tasks run between them.
                await asyncio.sleep(0)
        assert self.last is not None
        return self.last

    async def reaches(self, num_tokens: int) -> None:
        """Returns when it has given this many tokens."""
        async with self.came:
            await self.came.wait_for(
                lambda: self.last is not None and len(self.last.output_ids) >= num_tokens
            )

    async def end(self) -> GenerateReply:
        """Its last reply."""
        assert self.task is not None
        return await asyncio.wait_for(self.task, 60)


@dataclass
class Routed:
    """A router over the engine under test."""

    url: str
    client: HttpGenerationClient

    @asynccontextmanager
    async def in_flight(self, *rids: str) -> AsyncIterator[dict[str, InFlight]]:
        """Streams through it that have begun, by the ids of their client."""
        requests = {rid: InFlight() for rid in rids}
        for rid, request in requests.items():
            asked = GenerationRequest(rid, PROMPT, ENDLESS, fails_over=True)
            request.task = asyncio.create_task(request.read(self.client.stream(asked)))
        try:
            for request in requests.values():
                await asyncio.wait_for(request.reaches(1), 60)
            yield requests
        finally:
            tasks = [request.task for request in requests.values() if request.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self, **order: Any) -> dict[str, Any]:
        """The router's answer."""
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            reply = await http.post(f"{self.url}/abort_request", json=order)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found


@dataclass
class Bench:
    """One engine under test.

    Attributes:
        label: its kind; of a double, which kind of double.
    """

    kind: str
    engine: Engine
    running: RunningEngine
    models: Models
    label: str = ""

    def __post_init__(self) -> None:
        self.label = self.label or self.kind

    @property
    def is_in_memory(self) -> bool:
        """There is no wire between the test and the engine."""
        return not isinstance(self.engine, EngineClient | VllmClient)

    async def held_bytes(self) -> int:
        """Memory that a release gives back: of its GPUs, or of the host if it has none."""
        gpus = await self.running.gpu_memory()
        if gpus:
            return sum(gpu.used_bytes for gpu in gpus)
        resident = await self.running.resident_bytes()
        assert resident is not None
        return resident

    @property
    def url(self) -> str:
        return self.running.endpoint.url

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(
            base_url=self.url, timeout=60, trust_env=False, auth=Keys(self.running)
        ) as client:
            yield client

    async def greedy(self, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
        return (await self.engine.generate(input_ids=prompt, sampling_params=GREEDY)).output_ids

    @asynccontextmanager
    async def in_flight(
        self, sampling: SamplingParams = ENDLESS, rid: str | None = None
    ) -> AsyncIterator[InFlight]:
        request = InFlight()
        request.task = asyncio.create_task(request.follow(self.engine, sampling, rid))
        started = asyncio.create_task(request.reaches(1))
        try:
            await asyncio.wait({request.task, started}, return_when="FIRST_COMPLETED")
            assert started.done(), await request.task
            yield request
        finally:
            request.task.cancel()
            started.cancel()
            await asyncio.gather(request.task, started, return_exceptions=True)

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Routed]:
        """A router with this engine alone."""
        host = RouterHost(RouterConfig())
        url = (await host.start()).url
        kind = "sglang" if self.kind == "fake" else self.kind
        member = Backend("only", self.running.endpoint, kind=kind, access=self.running.access)
        client = HttpGenerationClient(url, timeout_s=60)
        try:
            await host.set_members(1, [member])
            await host.set_gate("open", weight_version=0)
            yield Routed(url, client)
        finally:
            await client.close()
            await host.stop(1.0)

    def tensors(self, which: str) -> dict[str, Any]:
        """All weights of the ``first`` or ``second`` model, as tensors of this kind of engine."""
        if self.kind == "fake":
            return {one.name: FakeTensor(one.shape, len(which)) for one in DEFAULT_TENSORS}
        from safetensors.torch import load_file

        return dict(load_file(getattr(self.models, which) / "model.safetensors"))

    async def push(self, which: str, version: str, *, num_buckets: int = 1) -> None:
        """The weights of a model in a session of their own; the last bucket flushes."""
        await self.engine.begin_weight_update()
        await self.send(self.tensors(which), version, num_buckets=num_buckets)
        await self.engine.end_weight_update()

    async def send(self, tensors: dict[str, Any], version: str, *, num_buckets: int = 1) -> None:
        names = list(tensors)
        for part in range(num_buckets):
            is_last = part == num_buckets - 1
            bucket = {name: tensors[name] for name in names[part::num_buckets]}
            await self.engine.update_weights_from_tensor(
                payload(self.kind, bucket),
                flush_cache=is_last,
                weight_version=version if is_last else None,
            )

    async def release(self, *tags: MemoryTag) -> None:
        await self.engine.release_memory_occupation(tags)

    async def resume(self, *tags: MemoryTag) -> None:
        await self.engine.resume_memory_occupation(tags)

    async def is_serving(self) -> bool:
        """Whether it is as a test found it, made so where that is legal."""
        try:
            with suppress(EngineRejected):
                await self.engine.end_weight_update()
            # SGLang does not say, and does not live after a wrong order.
            if released := (await self.engine.server_info()).released:
                await self.engine.resume_memory_occupation(list(released))
            await self.engine.continue_generation()
            await self.engine.abort_request()
            await self.engine.flush_cache(timeout_s=10.0)
            await self.engine.update_weights_from_disk(str(self.models.first), weight_version="0")
            return len(await self.greedy()) == GREEDY.max_new_tokens
        except EngineError:
            return False


def payload(kind: str, tensors: dict[str, Any]) -> list[str]:
    """What ``update_weights_from_tensor`` takes: SGLang's form of tensors, by value."""
    packed = pack_tensors(tensors) if kind == "fake" else pickle.dumps(list(tensors.items()))
    return [base64.b64encode(packed).decode()]


def client(running: RunningEngine, engine_id: str, kind: str = "") -> EngineClient | VllmClient:
    """A client with its keys, whose patience is a test's."""
    deadlines = Deadlines(
        control_s=20, pause_s=20, memory_s=20, update_s=20, group_s=20, check_s=20, generate_s=60
    )
    made = kind_of(kind or "sglang").client(
        running.endpoint, engine_id=engine_id, deadlines=deadlines
    )
    made.authorize(running.access)
    assert isinstance(made, EngineClient | VllmClient)
    return made


@asynccontextmanager
async def pooled(pool: Pool, models: Models, like: str = "") -> AsyncIterator[Bench]:
    """An engine of the pool, serving at the start; at the end too, or ended.

    Args:
        like: the kind that it does all things like, if that is another.
    """
    running = await pool.take()
    engine = client(running, pool.spec.engine_id, pool.spec.kind)
    bench = Bench(like or pool.spec.kind, engine, running, models)
    try:
        yield bench
    except BaseException:
        await pool.discard()
        raise
    else:
        if not await running.is_alive() or not await bench.is_serving():
            await pool.discard()
    finally:
        await engine.aclose()


_LIKE_THE_MODELS: dict[str, Any] = {
    "token_s": 0.001,  # its tokens take a moment each
    "vocab_size": VOCABULARY,
    "context_length": CONTEXT_LENGTH,
    "eos_token_id": EOS,
}


def _slow_fake(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    path = spec.model_path
    return FakeEngine(spec.engine_id, endpoint=endpoint, model_path=path, **_LIKE_THE_MODELS)


@asynccontextmanager
async def faked(models: Models, *, is_served: bool) -> AsyncIterator[Bench]:
    """A fake engine, in memory or behind a port."""
    spec = EngineSpec("fake-0", "fake", str(models.first), "")
    if not is_served:
        launcher = FakeLauncher(_slow_fake)
        inside = await launcher.launch(spec)
        yield Bench("fake", launcher.connect(inside.endpoint, "fake-0"), inside, models)
        return
    running = await HttpFakeLauncher(_slow_fake).launch(spec)
    engine = client(running, spec.engine_id)
    try:
        yield Bench("fake", engine, running, models)
    finally:
        await engine.aclose()
        await running.kill()


@asynccontextmanager
async def stubbed(models: Models) -> AsyncIterator[Bench]:
    """A stub of vLLM behind a port."""
    spec = EngineSpec("stub-0", "vllm", str(models.first), "")
    running = await ServedStubs(partial(make_stub, **_LIKE_THE_MODELS)).launch(spec)
    engine = client(running, spec.engine_id, "vllm")
    try:
        yield Bench("vllm", engine, running, models, label=VLLM_STUB)
    finally:
        await engine.aclose()
        await running.kill()


async def features_of(engine: Engine) -> Features:
    """What a running engine has."""
    info = await engine.server_info()
    return read_features(info, await engine.endpoints(), KINDS.get(info.engine))
