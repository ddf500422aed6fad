"""Command after command: every state a bounded search reaches is where the next one begins.

A *state* is where everything is between two commands, when nothing is under way.  Runs that end
in the same state go on alike, so each state is gone on from once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.config import WeightUpdate
from rollout.router.gate.gate import GateState
from tests.explore.explorer import Run, Search, following, run
from tests.explore.settings import Settings
from tests.explore.snapshots import freeze, thaw
from tests.explore.world import World

# Whatever a training loop would try until it has been down and up again.
_AND_ON = ("offload", "onload", "serve", "offload", "onload")
_AND_ON_FROZEN = ("offload", "serve", "offload", "serve")
_AND_ON_ALL = ("all offload", "all onload", "all serve", "all offload", "all onload")
# What died comes back; then the command that failed, the push that failed, and another step.
_AND_BACK = ("recover", "again", "recover", "onload same", "offload", "onload same", "recover")
_AND_ON_RECOVERING = (*_AND_BACK, "offload", "onload", "serve", "recover", *_AND_ON, "recover")


def _has_gone_on(outcomes: list[tuple[str, str]]) -> bool:
    """Whether the last two commands were a whole step."""
    how, what = [end for _, end in outcomes[-2:]], [command for command, _ in outcomes[-2:]]
    downs_and_ups = (["offload", "onload"], ["offload", "serve"], ["all offload", "all onload"])
    return how == ["done", "done"] and what in downs_and_ups


def _has_recovered(outcomes: list[tuple[str, str]]) -> bool:
    """Whether there was a whole step, and then some time to bring engines back."""
    return outcomes[-1:] == [("recover", "done")] and _has_gone_on(outcomes[:-1])


@dataclass
class State:
    """A place to go on from, and how it was reached."""

    frozen: bytes
    history: tuple[tuple[Settings, dict[int, int]], ...] = ()
    num_deviations: int = 0


@dataclass
class Found:
    """A violation, with all that is needed to see it again."""

    run: Run
    settings: Settings
    state: State

    def __str__(self) -> str:
        before = "".join(
            f"after {', '.join(settings.commands)} with schedule {schedule}\n"
            for settings, schedule in self.state.history
        )
        return f"{before}in {', '.join(self.settings.commands)}:\n{self.run}"


@dataclass
class Tally:
    """What a search has done.

    Attributes:
        num_schedules: schedules run; all differ in their choices.
        traces: hashes of what happened in them, so that schedules which differ in their choices
            and yet not in what happened are counted once.
    """

    num_schedules: int = 0
    traces: set[int] = field(default_factory=set)
    found: list[Found] = field(default_factory=list)
    states: dict[Any, State] = field(default_factory=dict)

    @property
    def num_distinct(self) -> int:
        return len(self.traces)


class Explorer:
    """Bounded searches that share one tally.

    Args:
        max_found: stops after so many violations.
    """

    def __init__(self, *, max_found: int = 1) -> None:
        self.tally = Tally()
        self._max_found = max_found

    @property
    def is_over(self) -> bool:
        return len(self.tally.found) >= self._max_found

    def explore(
        self,
        state: State,
        settings: Settings,
        *,
        max_deviations: int,
        max_runs: int | None = None,
        by_turns: bool = False,
    ) -> list[State]:
        """All runs from ``state`` within the bound; the states they end in that are new."""
        search = Search(lambda: World(thaw(state.frozen), settings), by_turns=by_turns)
        runs = search.enumerate(max_deviations, max_runs=max_runs)
        return self._take_in(search, runs, state, settings)

    def walk(
        self,
        state: State,
        settings: Settings,
        num_runs: int,
        *,
        seed: int,
        rate: float = 0.1,
        by_turns: bool = False,
    ) -> list[State]:
        """Random runs from ``state``."""
        search = Search(lambda: World(thaw(state.frozen), settings), by_turns=by_turns)
        runs = search.walk(num_runs, seed=seed, rate=rate)
        return self._take_in(search, runs, state, settings)

    def _take_in(
        self, search: Search, runs: Iterator[Run], state: State, settings: Settings
    ) -> list[State]:
        tally = self.tally
        # The same for all plans, so that what two of them have in common is counted once.
        start = hash((World(thaw(state.frozen), settings).state(), settings.commands))
        new = []
        for done in runs:
            tally.num_schedules += 1
            world: World = done.scenario
            tally.traces.add(hash((start, tuple(world.trace), tuple(world.outcomes))))
            if done.violation:
                tally.found.append(Found(search.shrink(done), settings, state))
                if self.is_over:
                    return new
                continue
            key = world.state()
            if key not in tally.states:
                reached = State(
                    freeze(world.detach()),
                    (*state.history, (settings, done.schedule)),
                    state.num_deviations + len(done.schedule),
                )
                tally.states[key] = reached
                new.append(reached)
                self._go_on(reached)
                if self.is_over:
                    return new
            world.dispose()
        return new

    def _go_on(self, state: State) -> None:
        """A next command can go on from every state: the invariant of whole histories."""
        parts = thaw(state.frozen)
        config, is_over = parts.server._config, _has_gone_on
        if len(parts.servers) > 1:
            commands: tuple[str, ...] = _AND_ON_ALL
        elif config.health.recover:
            commands, is_over = _AND_ON_RECOVERING, _has_recovered
        elif config.weights.update is WeightUpdate.FROZEN:
            commands = _AND_ON_FROZEN
        else:
            commands = _AND_ON
        world = World(parts, Settings(commands, num_requests=1, is_over=is_over))
        settings = world.settings
        done = run(world, following({}))
        if not done.violation:
            done = replace(done, violation=_did_go_on(world))
        if done.violation:
            self.tally.found.append(Found(done, settings, state))


def _did_go_on(world: World) -> str:
    """Why the training loop could not go on, although it had engines; empty if it could."""
    parts = world.parts
    if not parts.server._router.url:
        return ""  # stopped
    for group in parts.groups.values():
        left = [one for one in group._engines.unfenced() if not _is_dead(world, one.engine_id)]
        if len(left) < max(1, group._commands.min_engines()):
            return ""
    is_over = world.settings.is_over
    if is_over is None or not is_over(world.outcomes):
        return f"nothing goes on from here: {world.outcomes} {world.reported}"
    for name, router in parts.routers.items():
        if router.gate.state is not GateState.OPEN:
            return f"the gate of {name} stays {router.gate.state}"
    if is_over is _has_recovered:
        for group in parts.groups.values():
            for one in group._engines.members():
                if one.fence_reason or _is_dead(world, one.engine_id):
                    return f"{one.engine_id} is not brought back: {one.fence_reason}"
    return ""


def _is_dead(world: World, engine_id: str) -> bool:
    member = world.parts.member(engine_id)
    return member is None or member.process.engine.is_dead
