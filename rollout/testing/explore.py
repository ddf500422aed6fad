"""A deterministic explorer: real asyncio code under every order of events within a bound.

Give it a *scenario*: something that starts tasks on the loop it is handed and, whenever all code
has run as far as it can, says how many things could happen next (an answer, an error, a death, a
cancelled command, a deadline ...) and lets one of them happen.  Number 0 is the ordinary course.
A *schedule* is the list of moments at which something else happened: short, printable, and
enough to repeat the run exactly.

    search = Search(make_scenario)
    for failure in search.enumerate(max_deviations=2): print(failure)
    replay(make_scenario, failure.schedule)

Always true: a run is a function of its schedule alone (no real clock, socket, thread or random
number); ``enumerate`` runs every schedule with at most ``max_deviations`` entries exactly once,
save those that only prolong a failure.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import events
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, Protocol, cast

Schedule = Mapping[int, int]
"""Decision number -> the option taken there; 0 everywhere else."""

_MAX_STEPS = 100_000


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Scenario(Protocol):
    """What is explored.  One object per run."""

    def start(self, loop: ExploredLoop) -> None:
        """Start the tasks."""
        ...

    def num_options(self) -> int:
        """How many things could happen now that no code can run; 0: the run is over."""
        ...

    def take(self, option: int) -> str:
        """Let one of them happen, and say in words what it was."""
        ...

    def check(self) -> None:
        """Called after each event has been digested.

        Raises:
            Violation: an invariant is broken.
        """
        ...

    def finish(self) -> None:
        """Called at the end of the run, to check what must hold then.

        Raises:
            Violation: as above.
        """
        ...


class ExploredLoop:
    """An event loop without selector and clock; ``pass_time`` is an event like any other.

    What asyncio's tasks, futures, locks and timeouts ask of their loop, and nothing else.
    """

    def __init__(self) -> None:
        self._ready: list[_Handle] = []
        self._timers: list[tuple[float, int, _Handle]] = []
        self._num_timers = 0
        self._now = 0.0
        self.lost_errors: list[str] = []

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        handle = _Handle(callback, args)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._now + delay, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        # Unnamed tasks would be numbered by a counter that outlives the run.
        return asyncio.Task(coro, loop=cast(Any, self), name=name or "task")

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """At once, in this thread: a thread of its own would make runs differ."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.lost_errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def start_at(self, now_s: float) -> None:
        """Let the clock begin at this time."""
        self._now = now_s

    # -- how it is driven -------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def run_ready(self, index: int = 0) -> None:
        """Run one thing that is ready: the oldest, or another one before its turn."""
        handle = self._ready.pop(index)
        if handle.callback is not None:
            handle.callback(*handle.args)

    def run_all(self, *, until_choice: bool) -> None:
        """Run whatever is ready, in order; ``until_choice``: while only one thing is.

        Raises:
            Violation: it does not come to an end.
        """
        ready = self._ready
        for _ in range(_MAX_STEPS):
            if not ready or (until_choice and len(ready) > 1):
                return
            handle = ready.pop(0)
            if handle.callback is not None:
                handle.callback(*handle.args)
        raise Violation("the code runs for ever without waiting for anything")

    def next_timer_s(self) -> float | None:
        """When the next timer is due; None if there is none."""
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pass_time(self) -> float:
        """Advance to the next timer and make all that are due then ready; the time."""
        when = self.next_timer_s()
        if when is None:
            raise Violation("time cannot pass: nothing waits for it")
        self._now = max(self._now, when)
        while (when := self.next_timer_s()) is not None and when <= self._now:
            self._ready.append(heapq.heappop(self._timers)[2])
        return self._now

    def abandon(self) -> None:
        """Drop everything that was under way."""
        for _ in range(100):
            alive = [task for task in asyncio.all_tasks(cast(Any, self)) if not task.done()]
            if not alive:
                break
            for task in alive:
                task.cancel()
            while self._ready:
                self.run_ready()

    def clear(self) -> None:
        """Forget what is left, so that a finished run holds no cycles."""
        self._ready.clear()
        self._timers.clear()


class _Handle:
    __slots__ = ("args", "callback")

    def __init__(self, callback: Any, args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args

    def cancel(self) -> None:
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        return self.callback is None


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        num_options: at each decision, how many options there were.
        story: the events that were not the ordinary course, in words.
        violation: what was broken; empty if nothing was.
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
        by_turns: whether the order of what is ready, and events that come before it has run, are
            choices too.
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
                    story.append(f"{decision}: what was ready as number {option} ran first")
                loop.run_ready(option)
            else:
                told = scenario.take(option - num_ready)
                if option:
                    story.append(f"{decision}: {told}")
        else:
            raise Violation("the run does not end")
        scenario.finish()
        if loop.lost_errors:
            raise Violation(f"an error nobody looked at: {loop.lost_errors[0]}")
    except Violation as error:
        violation = str(error)
        loop.abandon()
    finally:
        loop.clear()
        events._set_running_loop(None)
    return Run(taken, counts, story, violation, scenario)


def following(schedule: Schedule) -> Choose:
    """The choices of a schedule; an option that is not there is the ordinary course."""

    def choose(decision: int, count: int) -> int:
        option = schedule.get(decision, 0)
        return option if option < count else 0

    return choose


def replay(make: Callable[[], Scenario], schedule: Schedule, *, by_turns: bool = False) -> Run:
    """Run a schedule again."""
    return run(make(), following(schedule), by_turns=by_turns)


class Search:
    """Runs of one scenario.

    Args:
        make: makes the scenario of each run.
        by_turns: as for ``run``.

    Attributes:
        num_runs: schedules run so far, all distinct.
    """

    def __init__(self, make: Callable[[], Scenario], *, by_turns: bool = False) -> None:
        self._make = make
        self._by_turns = by_turns
        self.num_runs = 0

    def enumerate(self, max_deviations: int, *, max_runs: int | None = None) -> Iterator[Run]:
        """Every run with at most ``max_deviations`` departures from the ordinary course.

        Runs with fewer departures come first, so the first failure is a short one; what follows
        a failure in the same run is not looked at.
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
        """Random runs: at each decision something unusual happens with probability ``rate``."""
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
        """The same failure with as few departures as can be left."""
        smallest = failed
        is_smaller = True
        while is_smaller:
            is_smaller = False
            for decision in list(smallest.schedule):
                fewer = {at: to for at, to in smallest.schedule.items() if at != decision}
                again = run(self._make(), following(fewer), by_turns=self._by_turns)
                if again.violation:
                    smallest, is_smaller = again, True
                    break
        return smallest

    def _run(self, choose: Choose) -> Run:
        self.num_runs += 1
        return run(self._make(), choose, by_turns=self._by_turns)


def _one_more(schedule: Schedule, num_options: list[int]) -> Generator[dict[int, int], None, None]:
    """The schedules with one departure more, after the last there is."""
    first = max(schedule, default=-1) + 1
    for decision in range(first, len(num_options)):
        for option in range(1, num_options[decision]):
            yield {**schedule, decision: option}
