"""Work beside its caller: what follows its end, and that none is started anywhere else."""

import ast
import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engines.process.background import (
    Then,
    in_own_thread,
    keep_task,
    keep_thread,
    start_task,
    start_timer,
)
from tests.support.processes import program, wait_until
from tests.support.virtual_time import pass_time, virtual_time

ROOT = Path(__file__).parents[1]
STARTERS = "engines/process/background.py"
# Modules that start threads or tasks themselves, and why.
EXCEPT = {
    "rollout/testing/stub_actors.py": "tasks on the loop of another actor, with its context",
}
# Modules with a pool that lives as long as an object, and who takes its results.
POOLS = {
    "rollout/core/pending.py": "the calls that use the default pool of a loop",
    "rollout/driver/math_judge/judges.py": "the reward that waits for its judgement",
    "rollout/router/http/reading_process.py": "the request that is read",
    "rollout/agents/shares.py": "the turn that waits for its template",
    "rollout/agents/turns/store.py": "the turn that is kept; what is removed is logged",
}
_STARTS = {"create_task", "ensure_future", "Thread", "Timer", "start_new_thread"}


class Failure(Exception):
    pass


class Work:
    """Fails so often, and then goes on until it may end."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.num_calls = 0
        self.may_end = threading.Event()

    async def in_task(self) -> None:
        self.num_calls += 1
        if self.failures:
            raise self.failures.pop(0)
        await asyncio.Event().wait()

    def in_thread(self) -> None:
        self.num_calls += 1
        if self.failures:
            raise self.failures.pop(0)
        self.may_end.wait(60)


def names_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("error", [Failure("x"), asyncio.CancelledError()], ids=repr)
def test_a_task_that_fails_starts_again_after_a_pause(error: BaseException, caplog) -> None:
    @virtual_time
    async def main() -> None:
        work = Work(error, error)
        task = keep_task(work.in_task, "the feed", Then.STARTS_AGAIN)
        await pass_time(0.9)
        assert work.num_calls == 1
        await pass_time(0.2)  # after one second, and then after two
        assert work.num_calls == 2
        await pass_time(1.8)
        assert work.num_calls == 2
        await pass_time(0.2)
        assert work.num_calls == 3
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    main()
    assert names_of(caplog) == [f"the feed failed with {error!r}; it starts again"] * 2
    assert all(record.exc_info for record in caplog.records)


def test_pauses_are_at_most_thirty_seconds_and_short_again_after_a_good_time() -> None:
    @virtual_time
    async def main() -> None:
        clock, starts_s = asyncio.get_running_loop().time, list[float]()

        async def fail() -> None:
            starts_s.append(clock())
            if len(starts_s) == 9:
                await pass_time(61)
            raise Failure

        task = keep_task(fail, "the feed", Then.STARTS_AGAIN)
        await pass_time(400)
        task.cancel()
        pauses = [late - early for early, late in itertools.pairwise(starts_s)]
        assert pauses[:8] == pytest.approx([1, 2, 4, 8, 16, 30, 30, 30])
        assert pauses[8:10] == pytest.approx([62, 2])

    main()


async def test_a_task_that_fails_once_is_logged_and_raises_nothing(caplog) -> None:
    work = Work(Failure("x"))
    task = keep_task(work.in_task, "a report", Then.IS_OVER)
    await task
    assert work.num_calls == 1
    assert names_of(caplog) == ["a report failed with Failure('x'); it is not started again"]


async def test_a_task_without_another_reference_is_not_collected() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        own = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.05, lambda: gc.collect())
        asyncio.get_running_loop().call_later(0.1, ended.set)
        await asyncio.wait([own], timeout=0.05)
        await ended.wait()

    keep_task(work, "alone", Then.IS_OVER)
    gc.collect()
    await asyncio.wait_for(ended.wait(), 20)


async def test_the_result_of_a_task_is_of_the_one_that_takes_it(caplog) -> None:
    async def fail() -> None:
        raise Failure

    task = start_task(fail(), "work")
    with pytest.raises(Failure):
        await task
    assert task.get_name() == "work"
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(3)
    assert await start_task(future, "a future") == 3
    assert caplog.records == []


@pytest.mark.parametrize("error", [Failure("x"), SystemExit(1)], ids=repr)
def test_a_thread_that_fails_is_logged(error: BaseException, caplog) -> None:
    work = Work(error)
    keep_thread(work.in_thread, "a sender", Then.IS_OVER).join(20)
    assert work.num_calls == 1
    assert names_of(caplog) == [f"a sender failed with {error!r}; it is not started again"]


def test_a_thread_that_fails_starts_again(caplog, monkeypatch) -> None:
    monkeypatch.setattr("engines.process.background._FIRST_PAUSE_S", 0.01)
    work = Work(Failure("x"), Failure("y"))
    thread = keep_thread(work.in_thread, "a sender", Then.STARTS_AGAIN)
    assert wait_until(lambda: work.num_calls == 3, 20)
    assert thread.is_alive()
    work.may_end.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(caplog.records) == 2


PROGRAM = """
import asyncio, logging, sys, threading
from engines.process.background import Then, keep_task, keep_thread

logging.basicConfig(stream=sys.stdout)

def fail():
    raise ValueError("no disk")

async def fail_in_task():
    fail()

async def main():
    keep_task(fail_in_task, "the writer", Then.PROCESS_ENDS)
    await asyncio.Event().wait()

if sys.argv[1] == "task":
    asyncio.run(main())
keep_thread(fail, "the writer", Then.PROCESS_ENDS)
threading.Event().wait()
"""


@pytest.mark.parametrize("kind", ["task", "thread"])
def test_work_that_the_process_needs_ends_it(kind: str) -> None:
    with program("-c", PROGRAM, kind) as process:
        assert process.finish(60) == 1
    assert "the writer failed with ValueError('no disk'); this process ends" in process.output


def test_a_result_that_is_not_taken_is_logged(caplog) -> None:
    def fail() -> None:
        raise Failure("x")

    future = in_own_thread(fail, "a call")
    assert wait_until(future.done, 20)
    del future
    gc.collect()
    assert names_of(caplog) == ["a call failed, and its result is not taken"]
    caplog.clear()
    taken = in_own_thread(fail, "a call")
    with pytest.raises(Failure):
        taken.result(20)
    del taken
    gc.collect()
    assert caplog.records == []


async def test_an_end_of_an_iterator_ends_the_call(caplog) -> None:
    future = in_own_thread(partial(next, iter(())), "a call")
    with pytest.raises(RuntimeError, match="a call: StopIteration"):
        await asyncio.wait_for(asyncio.wrap_future(future), 20)
    assert caplog.records == []


def test_a_timer_acts_once_or_never(caplog) -> None:
    acted = threading.Event()
    start_timer(0.01, acted.set, "now")
    assert acted.wait(20)

    def fail() -> None:
        raise Failure("x")

    start_timer(0.01, fail, "bad").join(20)
    assert names_of(caplog) == ["bad failed with Failure('x'); it is not started again"]
    never = start_timer(3600, fail, "never")
    never.cancel()
    never.join(20)
    assert not never.is_alive()


# -- the source -------------------------------------------------------------------------------


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in ("rollout", "engines"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def starts(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls that start a thread or a task, except those of a ``TaskGroup``."""
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name)
        and isinstance(item.context_expr, ast.Call)
        and ast.unparse(item.context_expr.func).endswith("TaskGroup")
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _STARTS:
            if not (isinstance(function.value, ast.Name) and function.value.id in groups):
                yield node
        elif isinstance(function, ast.Name) and function.id in _STARTS:
            yield node


def pools(tree: ast.Module) -> Iterator[ast.Call]:
    """Pools of threads or processes that no ``with`` ends."""
    in_blocks = {
        id(item.context_expr)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
    }
    for node in ast.walk(tree):
        is_pool = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("PoolExecutor")
        if is_pool and id(node) not in in_blocks:
            yield node


def test_threads_and_tasks_are_started_in_one_place() -> None:
    found = {name for name, tree in sources() if any(starts(tree))}
    assert found == {STARTERS, *EXCEPT}


def test_pools_are_ended_by_a_block_or_have_an_owner() -> None:
    assert {name for name, tree in sources() if any(pools(tree))} == set(POOLS)


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.create_task(work())",
        "loop.create_task(work())",
        "asyncio.ensure_future(work())",
        "threading.Thread(target=work).start()",
        "Thread(target=work).start()",
        "async def f():\n async with asyncio.TaskGroup() as tasks:\n  asyncio.create_task(w())",
    ],
)
def test_the_rule_finds_what_is_started(code: str) -> None:
    assert list(starts(ast.parse(code)))


def test_the_rule_allows_tasks_of_a_group() -> None:
    code = "async def f():\n async with asyncio.TaskGroup() as tasks:\n  tasks.create_task(w())"
    assert not list(starts(ast.parse(code)))
    assert not list(pools(ast.parse("with ThreadPoolExecutor(2) as pool: pass")))
    assert list(pools(ast.parse("pool = ThreadPoolExecutor(2)")))
