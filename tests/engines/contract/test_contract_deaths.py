"""What kills or wedges SGLang, tried on every kind of engine.

The fake crashes on the same calls; the embedded engine rejects them.  Each row ends one real
engine, so the next one starts while a row is tried; real SGLang has the other rows in ``make
test-chaos PYTEST_ARGS=tests/engines/contract/test_contract_deaths.py``.
"""

from __future__ import annotations

import asyncio
import base64
import io
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from engines.process.tcp_ports import reserve_port
from engines.protocol import MemoryTag, PauseMode, SamplingParams
from engines.protocol.errors import EngineError, EngineHung, EngineRejected, EngineUnreachable
from tests.engines.conftest import KINDS, VLLM
from tests.support.contract import ENDLESS, PROMPT, VOCABULARY, Bench, Pool, client, payload
from tests.support.kinds import chaos_for, not_for
from tests.support.processes import shared_memory_of

# That the embedded engine is on a logical GPU makes no difference here.
pytestmark = [pytest.mark.clock, pytest.mark.timeout(400), chaos_for("embedded-gpu")]

W, KV, GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
Act = Callable[[Bench], Awaitable[Any]]


async def release_while_a_request_runs(bench: Bench) -> None:
    async with bench.in_flight():
        await bench.release(KV)


async def release_while_requests_are_frozen(bench: Bench) -> None:
    async with bench.in_flight():
        await bench.engine.pause_generation(PauseMode.IN_PLACE)
        await bench.release(KV)


async def resume_what_is_not_released(bench: Bench) -> None:
    await bench.engine.pause_generation()
    await bench.resume(KV)


async def resume_everything_when_some_is_released(bench: Bench) -> None:
    await bench.engine.pause_generation()
    await bench.release(KV)
    await bench.engine.resume_memory_occupation([])


async def release_twice(bench: Bench) -> None:
    await bench.engine.pause_generation()
    await bench.release(W)
    await bench.release(W)


async def generate_while_the_cache_is_released(bench: Bench) -> None:
    await bench.release(KV)
    await bench.greedy()


async def update_while_the_weights_are_released(bench: Bench) -> None:
    await bench.engine.pause_generation()
    await bench.engine.begin_weight_update()
    await bench.release(W)
    await bench.send(bench.tensors("second"), "1")


async def check_while_the_weights_are_released(bench: Bench) -> None:
    await bench.engine.pause_generation()
    await bench.release(W)
    await bench.engine.weights_checker()


async def update_with_a_wrong_shape(bench: Bench) -> None:
    tensors = bench.tensors("second")
    name, *_ = sorted(name for name, tensor in tensors.items() if len(tensor.shape) == 2)
    wrong = [one for one in tensors.values() if one.shape != tensors[name].shape]
    await bench.engine.begin_weight_update()
    await bench.send({name: wrong[0]}, "1")


async def update_with_a_payload_of_nothing(bench: Bench) -> None:
    await bench.engine.begin_weight_update()
    await bench.engine.update_weights_from_tensor(payload(bench.kind, {}))


async def update_without_a_payload(bench: Bench) -> None:
    await bench.engine.begin_weight_update()
    await bench.engine.update_weights_from_tensor([])


async def update_with_what_cannot_be_read(bench: Bench) -> None:
    await bench.engine.begin_weight_update()
    await bench.engine.update_weights_from_tensor(["bm90IGEgcGlja2xl"])


async def update_with_tensors_of_another_process(bench: Bench) -> None:
    """On the CPU torch sends a handle that only a child of the sender can open."""
    from multiprocessing import reduction, resource_sharer

    packed = io.BytesIO()
    reduction.ForkingPickler(packed).dump(list(bench.tensors("second").items()))
    await bench.engine.begin_weight_update()
    try:
        await bench.engine.update_weights_from_tensor(
            [base64.b64encode(packed.getvalue()).decode()]
        )
    finally:
        resource_sharer.stop(5)


def write_broken_file(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"no tensors")


async def update_from_a_broken_file(bench: Bench) -> None:
    with TemporaryDirectory() as folder:
        write_broken_file(Path(folder))
        await bench.engine.update_weights_from_disk(folder, weight_version="9")


async def generate_outside_the_vocabulary(bench: Bench) -> None:
    one = SamplingParams(max_new_tokens=1)
    await bench.engine.generate(input_ids=[VOCABULARY + 1000], sampling_params=one)


async def join_a_group_that_nobody_else_joins(bench: Bench) -> None:
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    await bench.engine.init_weights_update_group(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=2,
        group_name="lonely",
        backend="gloo",
    )


async def abort_what_is_frozen(bench: Bench) -> None:
    """The pause does not end, and nothing gets past it, until the frozen one's client leaves."""
    async with bench.in_flight():
        await bench.engine.pause_generation(PauseMode.IN_PLACE)
        pausing = asyncio.create_task(bench.engine.pause_generation(PauseMode.ABORT))
        try:
            await asyncio.wait({pausing}, timeout=1.5)
            if pausing.done():
                await pausing
            await bench.engine.continue_generation()
        finally:
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)


@dataclass(frozen=True)
class Row:
    """One way to lose an engine.

    Attributes:
        sglang: what becomes of SGLang: it ``dies``, ``hangs``, ``wedges`` (answers nothing more
            until it is killed), or after all ``takes it``.
        embedded: the status the embedded engine refuses it with; 0 where it is not tried.
        fake: what happens to the fake; None where it does not simulate that: it has neither
            peers nor tensors.
        is_usual: whether the usual run tries it on SGLang too.
    """

    act: Act
    embedded: int
    sglang: str = "dies"
    fake: str | None = "dies"
    is_usual: bool = False


ROWS = [
    Row(release_while_a_request_runs, 409, is_usual=True),
    Row(release_while_requests_are_frozen, 409),
    Row(resume_what_is_not_released, 409),
    Row(resume_everything_when_some_is_released, 409),
    Row(release_twice, 409),
    Row(generate_while_the_cache_is_released, 409),
    Row(update_while_the_weights_are_released, 409),
    Row(check_while_the_weights_are_released, 409),
    Row(update_with_a_wrong_shape, 400, is_usual=True),
    # A list without payloads kills it; a payload without tensors does not.
    Row(update_with_a_payload_of_nothing, 400, sglang="takes it", fake="takes it", is_usual=True),
    Row(update_without_a_payload, 400),
    Row(update_with_what_cannot_be_read, 400),
    Row(update_with_tensors_of_another_process, 400, fake=None),
    Row(update_from_a_broken_file, 400),
    Row(generate_outside_the_vocabulary, 400),
    # The embedded engine waits for the peer too, and says so when the time is over.
    Row(join_a_group_that_nobody_else_joins, 0, sglang="wedges", fake=None, is_usual=True),
    Row(abort_what_is_frozen, 409, sglang="hangs", fake="hangs", is_usual=True),
]


@pytest.fixture(autouse=True)
def spare(kind: str, request: pytest.FixtureRequest) -> None:
    """Where a row ends the engine, the next one starts meanwhile; none after the last row."""
    if kind.startswith("sglang"):
        left: list[Any] = [item for item in request.session.items if "deaths" in item.nodeid]
        mine = [item for item in left if item.callspec.params.get("kind") == kind]
        pool: Pool = request.getfixturevalue("pools")[kind]
        pool.has_spare = bool(mine) and request.node is not mine[-1]


def without(row: Row) -> list[pytest.MarkDecorator]:
    """The kinds of engine that the row is not for, or not usually."""
    marks = [not_for("fake", "fake-http")] if row.fake is None else []
    marks += [] if row.is_usual else [chaos_for("sglang")]
    # Waits as long as the real one; the difference is in its own tests.
    return marks + ([not_for("embedded", "embedded-gpu")] if row.embedded == 0 else [])


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=without(row), id=row.act.__name__) for row in ROWS]
)
async def test_what_kills_sglang(bench: Bench, row: Row) -> None:
    expected = row.embedded if bench.kind == "embedded" else getattr(row, bench.kind)
    impatient(bench, expected)
    if expected == "takes it":
        await row.act(bench)
        return
    with pytest.raises(EngineError) as failed:
        await row.act(bench)
    if expected == "dies":
        assert isinstance(failed.value, EngineUnreachable)
        assert await ends(bench, 30)
    elif expected == "hangs":
        assert isinstance(failed.value, EngineHung)
        if bench.kind == "sglang":  # that client has left meanwhile, and everything goes on
            await go_on(bench)
    elif expected == "wedges":
        assert isinstance(failed.value, EngineHung)
        with pytest.raises(EngineError):
            await go_on(bench)
        assert await bench.running.is_alive()
        await bench.running.kill()  # or the fixture waits for it to serve again
    else:
        assert isinstance(failed.value, EngineRejected)
        assert failed.value.status == expected
        assert await bench.running.is_alive()


@not_for("fake", "fake-http")  # it has no process
async def test_sigterm_does_not_end_what_is_paused_with_requests(
    bench: Bench, request: pytest.FixtureRequest
) -> None:
    """And the kill that is left takes every process and every file with it."""
    main = psutil.Process(bench.running.pid)
    everything = [main, *main.children(recursive=True)]
    async with bench.in_flight(ENDLESS):
        await bench.engine.pause_generation(PauseMode.RETRACT)
        main.send_signal(signal.SIGTERM)
        if bench.kind == "embedded":
            assert await ends(bench, 10)
            return
        assert not await ends(bench, 6)
        files = shared_memory_of(main.pid)
        assert any("sglang_loads" in file.name for file in files)
        await bench.running.kill()
    assert not [file for file in files if file.exists()]
    assert not any(process.is_running() for process in everything)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[list[Awaitable[Any]]]:
    """Streams and whole replies that have tokens, and many prompts behind them: some are read, and
    some wait."""
    whole = asyncio.create_task(bench.engine.generate(input_ids=PROMPT, sampling_params=ENDLESS))
    async with bench.in_flight() as one, bench.in_flight() as other:
        await one.reaches(20)
        few = SamplingParams(max_new_tokens=50, temperature=0.0, ignore_eos=True)
        long = [
            asyncio.create_task(
                bench.engine.generate(input_ids=[65 + num] * 2000, sampling_params=few)
            )
            for num in range(24)
        ]
        await asyncio.wait(long, timeout=0.05)
        assert one.task is not None
        assert other.task is not None
        yield [one.task, other.task, whole, *(task for task in long if not task.done())]


@asynccontextmanager
async def paused(bench: Bench) -> AsyncIterator[list[Awaitable[Any]]]:
    """A request that was frozen, and one that came later."""
    async with bench.in_flight() as frozen:
        await bench.engine.pause_generation(PauseMode.RETRACT)
        held = asyncio.create_task(bench.greedy())
        await asyncio.wait({held}, timeout=0.3)
        assert frozen.task is not None
        yield [frozen.task, held]


@asynccontextmanager
async def released(bench: Bench) -> AsyncIterator[list[Awaitable[Any]]]:
    await bench.engine.pause_generation(PauseMode.ABORT)
    await bench.engine.flush_cache(timeout_s=10.0)
    await bench.release(KV, W, GRAPH)
    held = asyncio.create_task(bench.greedy())
    await asyncio.wait({held}, timeout=0.3)
    yield [held]


@asynccontextmanager
async def updating(bench: Bench) -> AsyncIterator[list[Awaitable[Any]]]:
    """Half of a push is there."""
    await bench.engine.pause_generation(PauseMode.ABORT)
    await bench.engine.begin_weight_update()
    tensors = bench.tensors("second")
    half = dict(list(tensors.items())[: len(tensors) // 2])
    await bench.engine.update_weights_from_tensor(payload(bench.kind, half), flush_cache=False)
    held = asyncio.create_task(bench.greedy())
    await asyncio.wait({held}, timeout=0.3)
    yield [held]


STATES = {one.__name__: one for one in (running, paused, released, updating)}
REAL = ("embedded", "sglang", "vllm")
"""Each death is another start: the usual run has one of each kind."""


@pytest.mark.parametrize(
    "state",
    [pytest.param(name, marks=[] if name == "running" else chaos_for(*REAL)) for name in STATES],
)
@pytest.mark.parametrize("kind", [*KINDS, VLLM], indirect=True)
async def test_a_killed_engine_breaks_every_call_at_once(bench: Bench, state: str) -> None:
    async with STATES[state](bench) as calls:
        begin_s = time.monotonic()
        await bench.running.kill()
        ends_of = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - begin_s < 15
    assert ends_of
    for end in ends_of:
        assert isinstance(end, EngineUnreachable), end
    for call in (bench.greedy, bench.engine.loads, bench.engine.end_weight_update):
        with pytest.raises(EngineUnreachable):
            await call()
    assert not await bench.running.is_alive()


async def go_on(bench: Bench) -> None:
    await bench.engine.continue_generation()
    await bench.engine.generate(input_ids=PROMPT)


async def ends(bench: Bench, timeout_s: float) -> bool:
    """Whether its process is gone in time."""
    deadline = time.monotonic() + timeout_s
    while await bench.running.is_alive():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def impatient(bench: Bench, expected: str | int) -> None:
    """Waits less long for an answer that will not come."""
    if not bench.is_in_memory:
        from dataclasses import replace

        asked: Any = bench.engine
        asked.calls.deadlines = replace(
            client(bench.running, "").deadlines,
            group_s=8,
            control_s=6 if bench.kind == "sglang" else 0.5,
            # What is frozen has to outlast the other calls.
            generate_s=15 if expected == "wedges" else 60,
        )
    elif expected == "hangs":
        wedge_ends(bench)


def wedge_ends(bench: Bench) -> None:
    """The fake in memory has no deadlines; what hangs there is given one."""
    asked: Any = bench.engine
    whole = asked.pause_generation

    async def pause_generation(mode: PauseMode = PauseMode.ABORT) -> None:
        try:
            async with asyncio.timeout(0.3):
                await whole(mode)
        except TimeoutError as error:
            raise EngineHung("no answer", budget_s=0.3) from error

    asked.pause_generation = pause_generation
    asked.continue_generation = _hangs


async def _hangs() -> None:
    raise EngineHung("no answer")
