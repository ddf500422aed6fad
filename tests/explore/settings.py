"""What may happen in a scenario, and the deadlines that hold in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.fake import faults

# Shorter than the real ones, all alike: a call that is cut before this was cut too early.
BUDGET_S = 60.0
# Of one command that waits for another: ``rollout.rules.deadlines.lock_timeout_s``.
LOCK_S = 5 * BUDGET_S

# What may become of a call of an engine; the first is the ordinary course.
OUTCOMES: tuple[tuple[str, faults.Fault | None], ...] = (
    ("answers", None),
    ("answers 502", faults.reject()),
    ("breaks before it is done", faults.lose()),
    ("breaks after it is done", faults.lose(executed=True)),
    ("ends the engine", faults.die()),
    ("hangs", faults.hang()),
    ("hangs after it is done", faults.hang(executed=True)),
)
FEW_OUTCOMES = tuple(OUTCOMES[index] for index in (0, 3, 4, 5))
ORDER_ONLY = OUTCOMES[:1]


@dataclass(frozen=True)
class Settings:
    """What may happen in a scenario.

    Attributes:
        commands: what the training loop does, one after the other.
        injections: what may happen once each while it does: ``cancel``, ``request``, a command,
            ``kill <engine>``, or ``crash`` of the driver, the router, the server or a group.
        num_requests: requests that are on their way when it begins.
        num_prompts: that a driver with a journal samples beside the commands; 0 for no driver.
        router_outcomes: of a router call: 1 answers, 2 or lost before, 3 or lost after.
        kill_outcomes: of a kill: 1 works, 2 or fails.
        launch_outcomes: of a start: 1 works, 2 or fails, 3 or is slower than all other calls.
        has_actors: calls of groups may be held up, and go on when their caller has given up.
        has_processes: the server and its groups run in processes, which can be lost.
        is_over: says after each command whether the loop has done what it wanted.
    """

    commands: tuple[str, ...]
    injections: tuple[str, ...] = ()
    outcomes: tuple[tuple[str, faults.Fault | None], ...] = OUTCOMES
    num_requests: int = 1
    num_prompts: int = 0
    router_outcomes: int = 1
    kill_outcomes: int = 1
    launch_outcomes: int = 1
    has_actors: bool = False
    has_processes: bool = False
    is_over: Callable[[list[tuple[str, str]]], bool] | None = None
