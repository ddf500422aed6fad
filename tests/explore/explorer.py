"""A deterministic explorer: runs real asyncio code under every order of events within a bound.

It explores a *scenario*, an object that starts tasks on a given loop.  Whenever no code can run,
the scenario reports how many events can happen next (a reply, an error, a death, a cancelled
command, a deadline ...) and lets one of them happen.  Option 0 is the usual event.  A *schedule*
lists the decisions at which another event happened; it is short, printable, and repeats the run
exactly.

    search = Search(make_scenario)
    for failure in search.enumerate(max_deviations=2): print(failure)
    replay(make_scenario, failure.schedule)

Always true: a run depends only on its schedule (no real clock, socket, thread or random number).
``enumerate`` runs every schedule with at most ``max_deviations`` entries exactly once, except
extensions of a schedule that failed.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, Protocol, cast

Schedule = Mapping[int, int]
"""Decision number -> the option taken there; option 0 at all other decisions."""

_MAX_STEPS = 100_000
_MOST_AWAITS = 50


class Violation(AssertionError):
    """An invariant is broken."""


class Scenario(Protocol):
    """What is explored; a new object for each run."""

    def start(self, loop: ExploredLoop) -> None:
        """Start the tasks."""

    def num_options(self) -> int:
        """How many events can happen, now that no code can run; 0 ends the run."""

    def take(self, option: int) -> str:
        """Let one event happen; returns its description."""

    def check(self) -> None:
        """Raise ``Violation`` if an invariant is broken; called after an event's code has run."""

    def finish(self) -> None:
        """Raise ``Violation`` if something is broken that must hold at the end of a run."""


class ExploredProcess:
    """Tasks that are lost together, with all that they have begun: none of them runs after that.

    Attributes:
        is_lost: it was killed.
        ended: done when it is lost.
    """

    def __init__(self, loop: ExploredLoop) -> None:
        self.is_lost = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._context = copy_context()
        self._context.run(PROCESS.set, self)
        loop.processes.append(self)

    def create_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task in it; the tasks that it creates are in it too."""
        task: asyncio.Task[Any] = self._loop.create_task(work, context=self._context.copy())
        return task

    def kill(self) -> None:
        self.is_lost = True
        self.ended.set_result(None)

    def bury(self) -> None:
        """Close its tasks, if it is lost, and those that they begin when they are closed."""
        while self.is_lost and self.tasks:
            task = self.tasks.pop()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            for _ in range(_MOST_AWAITS):  # each ``finally`` may wait once more
                with suppress(BaseException):
                    self._context.copy().run(task.get_coro().close)  # type: ignore[union-attr]
                    break


PROCESS: ContextVar[ExploredProcess | None] = ContextVar("process", default=None)
"""Where the code runs that asks; None outside of all."""


class ExploredLoop:
    """An event loop without a selector and a clock; time passes only in ``pass_time``.

    It has only the methods that asyncio's tasks, futures, locks and timeouts use.
    """

    def __init__(self) -> None:
        self._ready: list[_Handle] = []
        self._timers: list[tuple[float, int, _Handle]] = []
        self._num_timers = 0
        self._now = 0.0
        self.lost_errors: list[str] = []
        self.processes: list[ExploredProcess] = []
        self.call_soon_threadsafe = self.call_soon  # there is one thread

    def __reduce__(self) -> tuple[Any, ...]:
        return ExploredLoop, ()  # locks remember theirs

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args, copy_context() if context is None else context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args, copy_context() if context is None else context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._now + delay, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        # Unnamed tasks would be numbered by a counter that outlives the run.
        task = asyncio.Task(coro, loop=cast(Any, self), name=name or "task", context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Runs ``func`` now, in this thread; another thread would make runs differ."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.lost_errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def start_at(self, now_s: float) -> None:
        """Set the clock."""
        self._now = now_s

    # -- how it is driven -------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def run_ready(self, index: int = 0) -> None:
        """Run one callback that is ready: the oldest, or another one before its turn."""
        self._ready.pop(index).run()

    def run_all(self, *, until_choice: bool) -> None:
        """Run all callbacks that are ready, in order.

        Args:
            until_choice: stop as soon as more than one is ready.

        Raises:
            Violation: the callbacks do not end.
        """
        for _ in range(_MAX_STEPS):
            if not self._ready or (until_choice and len(self._ready) > 1):
                return
            self.run_ready()
        raise Violation("the code runs for ever without waiting for anything")

    def next_timer_s(self) -> float | None:
        """The time of the next timer; None if there is none."""
        while self._timers and self._timers[0][2].is_idle():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pass_time(self) -> float:
        """Advance the clock to the next timer and make all timers of that time ready.

        Returns:
            The new time.
        """
        when = self.next_timer_s()
        if when is None:
            raise Violation("time cannot pass: there is no timer")
        self._now = max(self._now, when)
        while (when := self.next_timer_s()) is not None and when <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        return self._now

    def bury(self) -> None:
        """Close what lost processes had begun, when the run is over: no callback follows."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        events._set_running_loop(cast(Any, self))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is never awaited
                for process in self.processes:
                    process.bury()
                # What these refer to has to be freed here, too.
                self.clear()
        finally:
            events._set_running_loop(None)
            sys.unraisablehook = hook

    def abandon(self) -> None:
        """Cancel all tasks."""
        for _ in range(100):
            alive = [task for task in asyncio.all_tasks(cast(Any, self)) if not task.done()]
            if not alive:
                break
            for task in alive:
                task.cancel()
            while self._ready:
                self.run_ready()

    def clear(self) -> None:
        """Drop all callbacks and timers, so that a finished run has no reference cycles."""
        self._ready.clear()
        self._timers.clear()


class _Handle:
    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Context) -> None:
        self.callback = callback
        self.args = args
        self.context = context

    def is_idle(self) -> bool:
        """It was cancelled, or its process is lost."""
        process = self.context.get(PROCESS)
        return self.callback is None or (process is not None and process.is_lost)

    def run(self) -> None:
        if not self.is_idle():
            self.context.run(self.callback, *self.args)
        # Since 3.12 a failed task's traceback keeps this frame.  With ``self`` in it the task would
        # keep itself alive, and an error that is never retrieved would not be reported.
        del self

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


@dataclass(frozen=True, slots=True)
class Run:
    """The record of one run.

    Attributes:
        num_options: the number of options at each decision.
        story: descriptions of the events other than option 0.
        violation: the broken invariant; empty if none was.
    """

    schedule: dict[int, int]
    num_options: list[int]
    story: list[str]
    violation: str
    scenario: Any

    def __str__(self) -> str:
        lines = [f"violated: {self.violation}", f"schedule: {self.schedule}"]
        return "\n".join(lines + [f"  {line}" for line in self.story])


Choose = Callable[[int, int], int]
"""(decision, number of options) -> the option."""


def run(scenario: Scenario, choose: Choose, *, by_turns: bool = False) -> Run:
    """One run under ``choose``.

    Args:
        by_turns: the order of ready callbacks, and events before they have run, are decisions
            too.
    """
    loop = ExploredLoop()
    taken: dict[int, int] = {}
    counts: list[int] = []
    story: list[str] = []
    violation = ""
    events._set_running_loop(cast(Any, loop))
    try:
        scenario.start(loop)
        for _ in range(_MAX_STEPS):
            loop.run_all(until_choice=by_turns)
            num_ready = loop.num_ready
            if not num_ready:
                scenario.check()
            num_events = scenario.num_options()
            count = num_ready + num_events
            if not count:
                break
            decision = len(counts)
            option = choose(decision, count) if count > 1 else 0
            counts.append(count)
            if option:
                taken[decision] = option
            if option < num_ready:
                if option:
                    story.append(f"{decision}: ready callback number {option} ran first")
                loop.run_ready(option)
            else:
                event = scenario.take(option - num_ready)
                if option:
                    story.append(f"{decision}: {event}")
        else:
            raise Violation("the run does not end")
        scenario.finish()
        if loop.lost_errors:
            raise Violation(f"an error was never retrieved: {loop.lost_errors[0]}")
    except Violation as error:
        violation = str(error)
        loop.abandon()
    finally:
        loop.clear()
        events._set_running_loop(None)
    if violation:
        loop.bury()
    return Run(taken, counts, story, violation, scenario)


def following(schedule: Schedule) -> Choose:
    """The decisions of a schedule; an option that does not exist is replaced by 0."""

    def choose(decision: int, count: int) -> int:
        option = schedule.get(decision, 0)
        return option if option < count else 0

    return choose


def replay(make: Callable[[], Scenario], schedule: Schedule) -> Run:
    """Run a schedule again."""
    return run(make(), following(schedule))


class Search:
    """Runs a scenario under many schedules.

    Attributes:
        num_runs: number of distinct schedules that were run.
    """

    def __init__(self, make: Callable[[], Scenario], *, by_turns: bool = False) -> None:
        self._make = make
        self._by_turns = by_turns
        self.num_runs = 0

    def enumerate(self, max_deviations: int, *, max_runs: int | None = None) -> Iterator[Run]:
        """Every run with at most ``max_deviations`` decisions other than option 0.

        Runs with fewer deviations come first, so the first failure has a short schedule.  A
        schedule that failed is not extended.
        """
        layer: Iterable[dict[int, int]] = [{}]
        for depth in range(max_deviations + 1):
            parents: list[tuple[dict[int, int], list[int]]] = []
            for schedule in layer:
                if max_runs is not None and self.num_runs >= max_runs:
                    return
                done = self._run(following(schedule))
                yield done
                if depth < max_deviations and not done.violation:
                    parents.append((schedule, done.num_options))
            layer = chain.from_iterable(starmap(_one_more, parents))

    def walk(self, num_runs: int, *, seed: int, rate: float = 0.1) -> Iterator[Run]:
        """Random runs: each decision is other than option 0 with probability ``rate``."""
        seen: set[tuple[tuple[int, int], ...]] = set()
        for number in range(num_runs):
            source = random.Random(f"{seed}/{number}")

            def choose(decision: int, count: int, source: random.Random = source) -> int:
                return source.randrange(1, count) if source.random() < rate else 0

            done = self._run(choose)
            key = tuple(done.schedule.items())
            if key in seen:
                self.num_runs -= 1
                continue
            seen.add(key)
            yield done

    def shrink(self, failed: Run) -> Run:
        """A failing run with as few deviations as possible, made by removing some of ``failed``."""
        smallest: Run | None = failed
        while smallest:
            failed, smallest = smallest, None
            for decision in failed.schedule:
                fewer = {at: to for at, to in failed.schedule.items() if at != decision}
                again = run(self._make(), following(fewer), by_turns=self._by_turns)
                if again.violation:
                    smallest = again
                    break
        return failed

    def _run(self, choose: Choose) -> Run:
        self.num_runs += 1
        return run(self._make(), choose, by_turns=self._by_turns)


def _one_more(schedule: Schedule, num_options: list[int]) -> Iterator[dict[int, int]]:
    """The schedules with one deviation more, after the last one."""
    first = max(schedule, default=-1) + 1
    for decision in range(first, len(num_options)):
        for option in range(1, num_options[decision]):
            yield {**schedule, decision: option}
