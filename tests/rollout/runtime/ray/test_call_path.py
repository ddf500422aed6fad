"""How many functions and files lie between a call of a handle and its HTTP request.

A chain is measured while the call runs, over the stub of Ray, with two engines.  It begins with
the method of ``ServerHandle`` and ends with the function that hands the request to aiohttp.  Each
function of it has called, awaited, submitted or started the next one:

- inside one task, the chain is the stack of running functions;
- a task that ``asyncio.create_task`` starts continues the chain of the function that starts it;
- an actor call continues the chain of the function that submits it.

Counted are functions of ``rollout`` and ``engines``, closures and lambdas included.  Left out are
comprehensions, ``rollout.testing``, the standard library, aiohttp and Ray.  A function that has
returned before the request is sent is no part of the chain.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp
import pytest

from rollout.runtime.handle import DeploymentHandle
from rollout.testing.stub_actors import Actor
from tests.support.builders import push
from tests.support.ray_worlds import stub_world
from tests.support.served_fakes import TIMEOUT_S, launched

ROOT = Path(__file__).parents[4]
NUM_FILES = 12
NOT_COUNTED = ("<dictcomp>", "<listcomp>", "<setcomp>", "<genexpr>")
HOP = ("", "actor call")

Chain = tuple[tuple[str, str], ...]
"""File and qualified name of each function, outermost first; ``HOP`` between two processes."""


class Tracer:
    """Follows calls through tasks and actor calls, down to the HTTP requests."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[str, Chain]] = []
        self._of_tasks: dict[asyncio.Task[Any], Chain] = {}
        self._of_calls: dict[int, tuple[Any, Chain]] = {}
        self._watch_tasks(patch)
        self._watch_actor_calls(patch)
        self._watch_requests(patch)

    def chain(self, frame: FrameType | None) -> Chain:
        """From the beginning to ``frame``."""
        inner: list[tuple[str, str]] = []
        while frame is not None:
            code = frame.f_code
            if code is Actor._carry_out.__code__:
                _, before = self._of_calls[id(frame.f_locals["call"])]
                return (*before, HOP, *reversed(inner))
            file = Path(code.co_filename)
            if file.is_relative_to(ROOT) and code.co_name not in NOT_COUNTED:
                path = file.relative_to(ROOT).as_posix()
                if path.startswith(("rollout/", "engines/")) and "/testing/" not in path:
                    inner.append((path, code.co_qualname))
            frame = frame.f_back
        return (*self._of_tasks.get(current_task(), ()), *reversed(inner))

    def _watch_tasks(self, patch: pytest.MonkeyPatch) -> None:
        create_task = asyncio.create_task

        def watched(*args: Any, **kwargs: Any) -> Any:
            task = create_task(*args, **kwargs)
            # ``start_task`` stands for ``asyncio.create_task``.
            self._of_tasks[task] = self.chain(sys._getframe(2))
            return task

        patch.setattr(asyncio, "create_task", watched)

    def _watch_actor_calls(self, patch: pytest.MonkeyPatch) -> None:
        submit = Actor.submit

        def watched(actor: Actor, call: Any) -> Any:
            self._of_calls[id(call)] = call, self.chain(sys._getframe(1))
            return submit(actor, call)

        patch.setattr(Actor, "submit", watched)

    def _watch_requests(self, patch: pytest.MonkeyPatch) -> None:
        post: Callable[..., Any] = aiohttp.ClientSession.post

        def watched(session: Any, url: str, **more: Any) -> Any:
            self.requests.append((str(url), self.chain(sys._getframe(1))))
            return post(session, url, **more)

        patch.setattr(aiohttp.ClientSession, "post", watched)


def current_task() -> Any:
    """The task that runs; None outside of any loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    """One server with one group of two engines."""
    folder = tmp_path_factory.mktemp("run")
    with stub_world() as world:
        launch = world.load("launch").launch_ray
        with launched(launch, folder, {"main": {"num_engines": 2}}) as handle:
            yield handle


def measured(deployment: DeploymentHandle, verb: str, patch: pytest.MonkeyPatch) -> Chain:
    """The chain from ``verb`` of the handle to ``/release_memory_occupation``, on all engines.

    Args:
        verb: the path of the method from the handle.
    """
    policy = deployment["policy"]
    if verb == "phases.release_memory_occupation":
        policy.phases.pause_generation().result(TIMEOUT_S)
        policy.phases.flush_cache().result(TIMEOUT_S)
    with patch.context() as during:
        tracer = Tracer(during)
        attrgetter(verb)(policy)().result(TIMEOUT_S)
    version = policy.status().result(TIMEOUT_S).weight_version + 1
    policy.push(push(version)).result(TIMEOUT_S)
    chains = [one for url, one in tracer.requests if url.endswith("/release_memory_occupation")]
    assert len(chains) == 2
    assert chains[0] == chains[1]
    return chains[0]


@pytest.mark.parametrize(
    ("verb", "first", "method", "num_functions"),
    [
        ("phases.release_memory_occupation", "PhaseCommands.release_memory_occupation", "run", 19),
        ("offload", "ServerHandle.offload", "offload", 20),
    ],
)
def test_the_way_from_a_handle_to_the_request_is_short(
    deployment: DeploymentHandle,
    verb: str,
    first: str,
    method: str,
    num_functions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = measured(deployment, verb, monkeypatch)
    functions = [one for one in chain if one != HOP]
    words = "\n".join(f"{number} {name} {path}" for number, (path, name) in enumerate(functions, 1))
    # The chain is whole: both ends of it, and all three processes.
    names = [name for _, name in functions]
    assert (names[0], names[-1]) == (first, "Connections.post"), words
    assert chain.count(HOP) == 2, words
    for name in (
        f"RolloutServer.{method}",
        "ServerGroup.run",
        "EngineClient.release_memory_occupation",
    ):
        assert name in names, words
    assert len(functions) <= num_functions, words
    assert len({path for path, _ in functions}) <= NUM_FILES, words
    # What a name stands for is found where it is defined, not by who has passed it on.
    assert [name for name in names if "<" in name] == [], words


def test_a_lifecycle_command_is_spelled_in_six_source_files() -> None:
    """Its one name is in the table, in the diagnosis of it, and on its way to an engine."""
    name = re.compile(r"\bONLOAD_KV\b|\bonload_kv\b")
    assert [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "rollout").rglob("*.py"))
        if name.search(path.read_text(encoding="utf-8"))
    ] == [
        "rollout/control/engine/memory.py",
        "rollout/control/group/server_group.py",
        "rollout/control/server/server.py",
        "rollout/rules/diagnosis.py",
        "rollout/rules/lifecycle.py",
        "rollout/runtime/calls/phase_commands.py",
    ]
