"""What is explored by default, and within which bound."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from tests.explore.search import Explorer, State
from tests.explore.settings import FEW_OUTCOMES, ORDER_ONLY, OUTCOMES, Settings
from tests.explore.snapshots import after, serving

PHASES = (
    "pause_generation",
    "flush_cache",
    "release_memory_occupation",
    "onload_weights",
    "update_weights",
    "verify",
    "onload_kv",
    "continue_generation",
)
_DEATHS = ("kill shared-0", "kill apart-0")
_OTHERS = ("cancel", "request", "offload", "onload", "update", "serve", "stop", *_DEATHS)
_THREE_BY_THREE: dict[str, dict[str, Any]] = {
    "shared": {"num_engines": 3},
    "apart": {"num_engines": 3, "needs_offload": False},
    "more": {"num_engines": 3, "min_engines": 2},
}


@dataclass(frozen=True)
class Plan:
    """One search.

    Attributes:
        bound: what is complete, in words.
    """

    name: str
    bound: str
    search: Callable[[Explorer], None]


def _step(explorer: Explorer, settings: Settings, budget: int, protocol: str = "sglang") -> None:
    """A whole step, phase by phase, with at most ``budget`` departures over all phases."""
    frontier = [State(serving(protocol=protocol))]
    for phase in PHASES:
        one = Settings((phase,), settings.injections, settings.outcomes)
        reached: list[State] = []
        for state in frontier:
            left = budget - state.num_deviations
            reached += explorer.explore(state, one, max_deviations=left)
            if explorer.is_over:
                return
        frontier = reached


def _each_phase(
    explorer: Explorer, settings: Settings, deviations: int, phases: Collection[str] = PHASES
) -> None:
    """Each phase by itself, from the ordinary state before it."""
    start = serving()
    for number, phase in enumerate(PHASES):
        if phase not in phases:
            continue
        one = Settings((phase,), settings.injections, settings.outcomes, num_requests=0)
        state = State(after(start, *PHASES[:number]) if number else start)
        explorer.explore(state, one, max_deviations=deviations)
        if explorer.is_over:
            return


def _all_die(
    groups: dict[str, dict[str, Any]] | None,
    settings: Settings,
    deviations: int,
    then: tuple[str, ...] = (),
    **start_as: Any,
) -> Any:
    """All engines die at some point of a command, and come back without weights.

    Args:
        then: commands that follow it.
    """

    def search(explorer: Explorer) -> None:
        start = after(serving(groups, recover=True, **start_as), "update")
        places = [("update", start), ("offload", start), ("onload", after(start, "offload"))]
        for number, phase in enumerate(PHASES):
            places.append((phase, after(start, *PHASES[:number]) if number else start))
        for command, frozen in places:
            commands = (command, *then, "recover", "again", "recover")
            one = replace(settings, commands=commands, num_requests=0)
            explorer.explore(State(frozen), one, max_deviations=deviations)
            if explorer.is_over:
                return

    return search


def _command(
    *commands: str,
    begin: tuple[str, ...] = (),
    deviations: int = 1,
    by_turns: bool = False,
    num_walks: int = 0,
    groups: dict[str, dict[str, Any]] | None = None,
    lifecycle: dict[str, Any] | None = None,
    verify: dict[str, Any] | None = None,
    update: str = "full",
    recover: bool = False,
    frozen: dict[str, dict[str, Any]] | None = None,
    reports_released: bool = False,
    protocol: str = "sglang",
    expect_version: int = 0,
    has_source: bool = False,
    **settings: Any,
) -> Callable[[Explorer], None]:
    def search(explorer: Explorer) -> None:
        start = serving(
            groups,
            lifecycle=lifecycle,
            verify=verify,
            update=update,
            recover=recover,
            frozen=frozen,
            reports_released=reports_released,
            protocol=protocol,
            expect_version=expect_version,
            has_source=has_source,
        )
        state = State(after(start, *begin) if begin else start)
        chosen = Settings(commands, **({"injections": _OTHERS} | settings))
        if num_walks:
            explorer.walk(state, chosen, num_walks, seed=1, by_turns=by_turns)
        else:
            explorer.explore(state, chosen, max_deviations=deviations, by_turns=by_turns)

    return search


def _recovering_cycle(protocol: str = "sglang") -> Callable[[Explorer], None]:
    return _command(
        "recover",
        "offload",
        "recover",
        "onload",
        "recover",
        recover=True,
        launch_outcomes=2,
        injections=("cancel", "recover", "stop", *_DEATHS),
        protocol=protocol,
    )


def _under_a_lost_router(deviations: int) -> Callable[[Explorer], None]:
    return _command(
        "offload",
        "onload",
        deviations=deviations,
        groups={"shared": {"num_engines": 2}},
        outcomes=ORDER_ONLY,
        injections=("crash router", "request", "cancel", "kill shared-0", "remove shared-1"),
    )


def _under_a_lost_driver(deviations: int, *injections: str) -> Callable[[Explorer], None]:
    return _command(
        "offload",
        "onload",
        deviations=deviations,
        groups={"shared": {"num_engines": 2}},
        outcomes=ORDER_ONLY,
        num_requests=0,
        num_prompts=3,
        injections=("crash driver", *injections),
    )


_RAISE = {"on_failure": "raise"}
# So long that garbage, which differs in each run, does not have the weights' log-probs by chance.
BY_CANARY = {"by": "canary", "canary_prompts": (tuple(range(1, 10)),)}
# The sentinel repeats them.
SENTINEL = {"canary_prompts": (tuple(range(1, 10)),)}
REMEMBERED = ("remember shared-0", "offload", "onload", "offload", *PHASES[3:7])
_FEW = {"outcomes": FEW_OUTCOMES}
# Each round of recovery boots one standby; then version 1 is served.
WITH_STANDBYS = ("recover", "recover", "update")
STANDBYS: dict[str, Any] = {
    "recover": True,
    "groups": {"shared": {"num_engines": 2, "standby": 1}},
    "launch_outcomes": 3,
    "injections": ("cancel", "stop", "kill shared-0", "kill standby-shared-0"),
}
_WITH_ANOTHER: dict[str, dict[str, Any]] = {
    "shared": {"num_engines": 2},
    "apart": {"needs_offload": False},
}
_STOPPABLE = Settings((), ("cancel", "stop"), FEW_OUTCOMES)
_KILLABLE = Settings((), ("cancel", "stop", *_DEATHS), FEW_OUTCOMES)


def _crash(which: str, *others: str) -> Settings:
    return Settings((), (f"crash {which}", *others), ORDER_ONLY, has_processes=True)


DEFAULT: tuple[Plan, ...] = (
    Plan(
        "a step by phases",
        "all seven outcomes of every call and six events from outside, any 2 in a whole step",
        lambda explorer: _step(
            explorer, Settings((), ("cancel", "request", "offload", "stop", *_DEATHS)), 2
        ),
    ),
    Plan(
        "a step by phases over vLLM",
        "four outcomes of every call, cancel and two kill -9: any 1 in a whole step",
        lambda explorer: _step(
            explorer, Settings((), ("cancel", *_DEATHS), FEW_OUTCOMES), 1, protocol="vllm"
        ),
    ),
    Plan(
        "short phases",
        "four outcomes of every call, cancel and stop: any 3 in pause and in continue",
        lambda explorer: _each_phase(
            explorer, _STOPPABLE, 3, ("pause_generation", "continue_generation")
        ),
    ),
    Plan(
        "flush_cache",
        "four outcomes of every call, cancel, stop and two kill -9: any 3",
        lambda explorer: _each_phase(explorer, _KILLABLE, 3, ("flush_cache",)),
    ),
    Plan(
        "long phases",
        "four outcomes of every call, cancel and stop: any 2 in each other phase",
        lambda explorer: _each_phase(explorer, _STOPPABLE, 2, PHASES[2:-1]),
    ),
    Plan("onload", "everything, any 1", _command("onload", begin=("offload",))),
    Plan("update", "everything, any 1", _command("update")),
    Plan(
        "expect",
        "four outcomes of every call, cancel, stop, a push and two kills: any 1, where the launch "
        "expects the first push",
        _command(
            "serve",
            "offload",
            "serve",
            "onload",
            expect_version=1,
            recover=True,
            injections=("cancel", "stop", "update", *_DEATHS),
            groups={"shared": {"num_engines": 2}, "apart": {"needs_offload": False}},
            **_FEW,
        ),
    ),
    Plan(
        "prove",
        "everything, any 1, of a push of what the engines have loaded",
        _command("prove", begin=("alike",), groups={"shared": {"num_engines": 2}}),
    ),
    Plan(
        "prove, other weights",
        "four outcomes of every call, cancel, stop, two kills: any 1, of a push of other weights; "
        "the engines come back with their checkpoint",
        _command(
            "prove",
            "recover",
            recover=True,
            groups={"shared": {"num_engines": 2}},
            injections=("cancel", "stop", "kill shared-0", "kill shared-1"),
            **_FEW,
        ),
    ),
    Plan("cycle", "everything, any 1", _command("offload", "onload")),
    Plan(
        "cycle over vLLM",
        "everything, any 1",
        _command("offload", "onload", protocol="vllm"),
    ),
    Plan(
        "cycle, raising",
        "everything, any 1, where one failure stops a step",
        _command("offload", "onload", lifecycle=_RAISE),
    ),
    Plan(
        "cycle, frozen",
        "everything, any 1, of a model that is never updated",
        _command("offload", "serve", update="frozen", injections=("cancel", "stop", *_DEATHS)),
    ),
    Plan(
        "cycle, restored",
        "everything, any 1, where a source gives back what was pushed",
        _command(
            "offload",
            "serve",
            begin=("update",),
            has_source=True,
            injections=("cancel", "stop", "request", "update", *_DEATHS),
        ),
    ),
    Plan(
        "serve, restored",
        "four outcomes of every call, cancel, stop: any 2, where a source gives back what was "
        "pushed",
        _command(
            "serve",
            begin=("update", "offload"),
            deviations=2,
            has_source=True,
            groups={"shared": {"num_engines": 2}},
            injections=("cancel", "stop"),
            **_FEW,
        ),
    ),
    Plan(
        "cycle, restored, recovering",
        "four outcomes of every call, a start that fails, cancel, a death of one or of all: any 1, "
        "where a source gives back what was pushed, also to engines that come back",
        _command(
            "offload",
            "recover",
            "serve",
            "recover",
            begin=("update",),
            recover=True,
            has_source=True,
            groups={"shared": {"num_engines": 2}},
            launch_outcomes=2,
            injections=("cancel", "stop", "kill shared-0", "kill all"),
            **_FEW,
        ),
    ),
    Plan(
        "a group is lost while it is restored",
        "the loss of a group at any time of the command that gives back what was pushed: any 1",
        _command(
            "serve",
            "recover",
            "again",
            "recover",
            begin=("update", "offload"),
            recover=True,
            has_source=True,
            groups={"shared": {"num_engines": 2}},
            injections=("crash shared",),
            outcomes=ORDER_ONLY,
            has_processes=True,
        ),
    ),
    Plan(
        "continue, lost weights",
        "four outcomes of every call, cancel, stop: any 2, where only a canary tells garbage",
        _command(
            "continue_generation",
            begin=("offload", "onload_weights", "lose shared-0", "verify", "onload_kv"),
            deviations=2,
            update="frozen",
            verify=BY_CANARY,
            injections=("cancel", "stop"),
            **_FEW,
        ),
    ),
    Plan(
        "continue, old prefixes",
        "four outcomes of every call, cancel, stop: any 1, where only the sentinel tells",
        _command(
            "continue_generation",
            begin=REMEMBERED,
            verify=SENTINEL,
            injections=("cancel", "stop"),
            **_FEW,
        ),
    ),
    Plan(
        "cycle, settled",
        "everything, any 1, of engines that say what they hold when an answer was lost",
        _command(
            "offload",
            "onload",
            reports_released=True,
            injections=("cancel", "stop", *_DEATHS),
        ),
    ),
    Plan(
        "release, settled",
        "all outcomes of every call, cancel: any 2, of engines that say what they hold",
        _command(
            "release_memory_occupation",
            begin=("pause_generation", "flush_cache"),
            deviations=2,
            reports_released=True,
            injections=("cancel", "kill shared-0"),
        ),
    ),
    Plan(
        "cycle, lost router",
        "everything, any 1; calls of the router fail before or after they are done",
        _command("offload", "onload", router_outcomes=3),
    ),
    Plan(
        "offload, lost router",
        "four outcomes of every call, cancel, calls of the router fail: any 2",
        _command("offload", deviations=2, router_outcomes=3, injections=("cancel",), **_FEW),
    ),
    Plan(
        "offload, lost kills",
        "four outcomes of every call, cancel, kills fail: any 2",
        _command("offload", deviations=2, kill_outcomes=2, injections=("cancel",), **_FEW),
    ),
    Plan(
        "onload and offload, actors",
        "calls of groups arrive late and out of order, cancel: any 1",
        _command(
            "onload",
            "offload",
            begin=("offload",),
            deviations=1,
            has_actors=True,
            outcomes=ORDER_ONLY,
            injections=("cancel",),
            num_requests=0,
        ),
    ),
    Plan(
        "recover",
        "four outcomes of every call, starts and kills that fail, cancel, a command: any 2",
        _command(
            "recover",
            begin=("kill shared-0",),
            deviations=2,
            recover=True,
            launch_outcomes=2,
            kill_outcomes=2,
            injections=("cancel", "offload", "stop", "kill shared-1"),
            **_FEW,
        ),
    ),
    Plan(
        "a step beside a boot",
        "everything, any 1, and a death at any time of a step that begins while an engine boots",
        _command(
            "boot",
            "offload",
            "recover",
            "onload",
            "recover",
            begin=("kill shared-0", "kill apart-0"),
            recover=True,
            launch_outcomes=3,
            injections=("cancel", "stop", "boot", "remove shared-0", *_DEATHS),
        ),
    ),
    Plan(
        "a push beside a boot",
        "four outcomes of every call, a start that fails or is slow, cancel, a death: any 1",
        _command(
            "boot",
            "update",
            "recover",
            begin=("kill shared-0",),
            recover=True,
            groups={"shared": {"num_engines": 2}},
            launch_outcomes=3,
            injections=("cancel", "kill shared-0"),
            **_FEW,
        ),
    ),
    Plan(
        "a step with a standby",
        "everything, any 1, and a death of an engine, of its standby or of all at any time of a "
        "step after an engine has died",
        _command(
            "boot",
            "offload",
            "recover",
            "onload",
            "recover",
            begin=(*WITH_STANDBYS, "kill shared-0"),
            **(STANDBYS | {"injections": (*STANDBYS["injections"], "kill all")}),
        ),
    ),
    Plan(
        "a standby takes a place while the trainer has the memory",
        "four outcomes of every call, a start that fails or is slow, cancel, stop, an onload, two "
        "deaths: any 2",
        _command(
            "recover",
            "onload",
            begin=(*WITH_STANDBYS, "offload", "kill shared-0"),
            deviations=2,
            **(
                STANDBYS
                | {"injections": (*STANDBYS["injections"], "onload")}
                | {"groups": {"shared": {"standby": 1}}}
            ),
            **_FEW,
        ),
    ),
    Plan(
        "a group with a standby is lost",
        "four outcomes of every call, a start that fails or is slow, cancel, stop, two deaths: any "
        "1 while another group takes over the engines, and in a step after it",
        _command(
            "replace shared",
            "recover",
            "offload",
            "recover",
            "onload",
            begin=WITH_STANDBYS,
            **STANDBYS,
            **_FEW,
        ),
    ),
    Plan(
        "a standby boots",
        "four outcomes of every call, a start that fails or is slow, cancel, stop, an onload, two "
        "deaths: any 1 in a step that begins while one boots",
        _command(
            "boot",
            "update",
            "boot",
            "offload",
            "recover",
            "onload",
            **(STANDBYS | {"injections": (*STANDBYS["injections"], "onload")}),
            **_FEW,
        ),
    ),
    Plan(
        "cycle, recovering",
        "everything, any 1, and a death at any time; recovery before, between and after",
        _recovering_cycle(),
    ),
    Plan(
        "cycle over vLLM, recovering",
        "everything, any 1, and a death at any time; recovery before, between and after",
        _recovering_cycle(protocol="vllm"),
    ),
    Plan(
        "all die",
        "four outcomes of every call, a death of all engines: any 1 in each command of a step; the "
        "engines come back without weights, and the command is repeated",
        _all_die({"shared": {"num_engines": 2}}, Settings((), ("kill all",), FEW_OUTCOMES), 1),
    ),
    Plan(
        "a group dies, or all",
        "a death of one group, or of all, at any time of each command of a step: any 1",
        _all_die(None, Settings((), ("kill shared", "kill all"), ORDER_ONLY), 1),
    ),
    Plan(
        "a group is lost after a command",
        "four outcomes of every call, cancel, a death: any 1 in each command of a step; then "
        "another group takes over the engines, which do not report what they have released",
        _all_die(
            {"shared": {"num_engines": 2}},
            Settings((), ("cancel", "kill shared-0"), FEW_OUTCOMES),
            1,
            then=("replace shared",),
        ),
    ),
    Plan(
        "a group is lost in a command",
        "the loss of a group at any time of each command of a step, also after its engines have "
        "answered: any 1; they do not report what they have released",
        _all_die({"shared": {"num_engines": 2}}, _crash("shared"), 1),
    ),
    Plan(
        "a group of reporting engines is lost in a command",
        "the same, beside another group, over engines that report what they have released",
        _all_die(_WITH_ANOTHER, _crash("shared"), 1, reports_released=True),
    ),
    Plan(
        "a server is lost in a command",
        "the loss of a server with its groups at any time of each command of a step, also before "
        "and after each record of its journal: any 1; another server continues",
        _all_die({"shared": {"num_engines": 2}}, _crash("server"), 1, has_journal=True),
    ),
    Plan(
        "a server of reporting engines is lost in a command",
        "the same, with two groups, over engines that report what they have released",
        _all_die(_WITH_ANOTHER, _crash("server"), 1, has_journal=True, reports_released=True),
    ),
    Plan(
        "a group is lost while another server takes over",
        "the loss of a group at any time of the takeover after each command of a step: any 1",
        _all_die(
            {"shared": {"num_engines": 2}},
            _crash("shared"),
            1,
            then=("replace server",),
            has_journal=True,
        ),
    ),
    Plan(
        "a router is lost in a command",
        "the loss of the router at any time of each command of a step, also while its server calls "
        "it: any 1; another one begins with what the server knows",
        _all_die({"shared": {"num_engines": 2}}, _crash("router"), 1),
    ),
    Plan(
        "a router is lost under requests",
        "the loss of the router, a request, cancel, a death and an engine that leaves: any 1",
        _under_a_lost_router(1),
    ),
    Plan(
        "a driver is lost under requests",
        "the loss of a driver at any time of a step, also before and after each write of its "
        "journal: any 1; another driver goes on from there",
        _under_a_lost_driver(1),
    ),
    Plan(
        "a group of vLLM dies, or all",
        "a death of one group, or of all, at any time of each command of a step: any 1",
        _all_die(None, Settings((), ("kill shared", "kill all"), ORDER_ONLY), 1, protocol="vllm"),
    ),
    Plan(
        "remove and add",
        "four outcomes of every call, a start that fails, cancel, a death, a step: any 2",
        _command(
            "remove shared-1",
            "add shared-1",
            deviations=2,
            launch_outcomes=2,
            injections=("cancel", "offload", "kill shared-1"),
            **_FEW,
        ),
    ),
    Plan(
        "cycle, an engine out",
        "everything, any 1; an engine leaves and comes back, another command comes between",
        _command(
            "remove shared-1",
            "offload",
            "onload",
            "add shared-1",
            injections=("cancel", "remove apart-0", "add shared-1", "stop", *_DEATHS),
        ),
    ),
    Plan(
        "two servers",
        "everything, any 1, in one transaction over a policy and a frozen reference",
        _command(
            "all offload",
            "all onload",
            frozen={"judge": {"num_engines": 2}},
            injections=("cancel", "all onload", "all offload", "kill judge-0", *_DEATHS),
        ),
    ),
    Plan(
        "offload, raising, two servers",
        "four outcomes of every call, cancel: any 2, where one failure stops a step",
        _command(
            "all offload",
            deviations=2,
            groups={"shared": {"num_engines": 1}},
            frozen={"judge": {"num_engines": 1}},
            lifecycle=_RAISE,
            injections=("cancel",),
            **_FEW,
        ),
    ),
    Plan(
        "offload, finishing",
        "four outcomes of every call, cancel, requests that end late or never: any 2",
        _command(
            "offload",
            deviations=2,
            lifecycle={"drain": "finish", "drain_timeout_s": 60.0},
            injections=("cancel", "request"),
            **_FEW,
        ),
    ),
    Plan(
        "cycle, retracting",
        "everything, any 1, with requests that go on afterwards",
        _command(
            "offload",
            "onload",
            lifecycle={"drain": "retract"},
            injections=("cancel", "request", *_DEATHS),
        ),
    ),
    Plan(
        "offload by turns",
        "everything, and every order of what the event loop has ready: any 1",
        _command("offload", by_turns=True),
    ),
    Plan(
        "update by turns",
        "everything, and every order of what the event loop has ready: any 1",
        _command("update", by_turns=True),
    ),
    Plan(
        "random steps of nine engines",
        "seeded walks, every tenth event another than the ordinary one",
        _command(
            "offload",
            "onload",
            "update",
            groups=_THREE_BY_THREE,
            num_walks=500,
            by_turns=True,
            kill_outcomes=2,
            router_outcomes=3,
        ),
    ),
)

# `make explore`: hours.
DEEP: tuple[Plan, ...] = (
    Plan(
        "a push beside a boot",
        "four outcomes of every call, a start that fails or is slow, cancel, a death: any 2",
        _command(
            "boot",
            "update",
            "recover",
            begin=("kill shared-0",),
            deviations=2,
            recover=True,
            groups={"shared": {"num_engines": 2}},
            launch_outcomes=3,
            injections=("cancel", "kill shared-0"),
            **_FEW,
        ),
    ),
    Plan(
        "a group dies, or all",
        "a death of one group, and of all, at any time of each command of a step: any 2",
        _all_die(None, Settings((), ("kill shared", "kill all"), ORDER_ONLY), 2),
    ),
    Plan(
        "a group is lost in a command",
        "four outcomes of every call, cancel, a death, the loss of a group: any 2 in each command",
        _all_die(
            {"shared": {"num_engines": 2}},
            replace(_crash("shared", "cancel", "kill shared-0"), outcomes=FEW_OUTCOMES),
            2,
        ),
    ),
    Plan(
        "a server is lost in a command",
        "cancel, a death, the loss of a server with its groups: any 2 in each command",
        _all_die(
            {"shared": {"num_engines": 2}},
            _crash("server", "cancel", "kill shared-0"),
            2,
            has_journal=True,
        ),
    ),
    Plan(
        "a router is lost under requests",
        "the loss of the router, a request, cancel, a death and an engine that leaves: any 2",
        _under_a_lost_router(2),
    ),
    Plan(
        "a driver is lost under requests",
        "the loss of a driver, of the one in its place, of the router, and a death, at any time of "
        "a step: any 2",
        _under_a_lost_driver(2, "crash driver", "crash router", "kill shared-0"),
    ),
    Plan(
        "a server and its router are lost in a command",
        "the loss of a server, of its router, and of those in their place: any 2 in each command",
        _all_die(
            {"shared": {"num_engines": 2}},
            _crash("server", "crash router"),
            2,
            has_journal=True,
        ),
    ),
    Plan(
        "a server and a group are lost in a command",
        "the loss of a server, and of a group, also of those in their place: any 2 in each command",
        _all_die(
            {"shared": {"num_engines": 2}},
            _crash("server", "crash shared"),
            2,
            has_journal=True,
        ),
    ),
    Plan(
        "a step by phases",
        "four outcomes of every call and six events from outside, any 3 in a whole step",
        lambda explorer: _step(
            explorer,
            Settings((), ("cancel", "request", "offload", "stop", *_DEATHS), FEW_OUTCOMES),
            3,
        ),
    ),
    Plan("offload", "everything, any 2", _command("offload", deviations=2)),
    Plan(
        "onload and offload, actors",
        "calls of groups arrive late and out of order, cancel: any 2",
        _command(
            "onload",
            "offload",
            begin=("offload",),
            deviations=2,
            has_actors=True,
            outcomes=ORDER_ONLY,
            injections=("cancel",),
            num_requests=0,
        ),
    ),
    Plan(
        "prove, other weights",
        "four outcomes of every call, cancel, stop, two kills: any 2, of a push of other weights",
        _command(
            "prove",
            "recover",
            deviations=2,
            recover=True,
            groups={"shared": {"num_engines": 2}},
            injections=("cancel", "stop", "kill shared-0", "kill shared-1"),
            **_FEW,
        ),
    ),
    Plan("onload", "everything, any 2", _command("onload", begin=("offload",), deviations=2)),
    Plan("update", "everything, any 2", _command("update", deviations=2)),
    Plan(
        "offload by turns",
        "four outcomes, and every order of what the event loop has ready: any 2",
        _command("offload", deviations=2, by_turns=True, **_FEW),
    ),
    Plan(
        "random steps of nine engines",
        "seeded walks, every tenth event another than the ordinary one",
        _command(
            "offload",
            "onload",
            "update",
            groups=_THREE_BY_THREE,
            num_walks=200_000,
            by_turns=True,
            kill_outcomes=2,
            router_outcomes=3,
        ),
    ),
)

__all__ = ["DEEP", "DEFAULT", "OUTCOMES", "PHASES", "Plan"]
