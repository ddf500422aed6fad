"""A conversation over embedded engines goes on over each loss as it does without: the same ids.

In the middle of a turn a worker of agents, an engine or the router is killed, the same weights are
pushed, or the engines are offloaded.  Turns before it are as they were, and its own is generated
again: by the router, or when the client sends it again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import rollout
from rollout.core.types import EngineStatus
from rollout.driver.client.agent_session import AgentSession
from rollout.runtime.handle import ServerHandle
from tests.support.agent_workers import worker_processes
from tests.support.busy_engines import busy_engines
from tests.support.chat_models import THINKS_FIRST, TOOLS
from tests.support.models import make_plain_model
from tests.support.processes import kill_listener, wait_until

pytest.importorskip("torch")
pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(300)]

END_S = 120.0
Turns = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_plain_model(tmp_path_factory.mktemp("model") / "model", seed=1)
    (model / "chat_template.jinja").write_text(THINKS_FIRST)
    return model


@dataclass
class Run:
    """Two engines, one worker of agents.

    Attributes:
        model: folder of the weights that are served.
    """

    policy: ServerHandle
    model: Path
    is_over_ray: bool

    def busy(self) -> EngineStatus:
        """The engine that generates the turn."""
        engines: list[EngineStatus] = []

        def is_busy() -> bool:
            engines[:] = busy_engines(self.policy)
            return bool(engines)

        assert wait_until(is_busy, END_S)
        return engines[0]

    def kill_the_worker(self) -> None:
        if self.is_over_ray:
            (url,) = self.policy.status().result(END_S).agents_urls
            kill_listener(url)
            return
        (worker,) = worker_processes()
        worker.kill()

    def kill_the_router(self) -> None:
        kill_listener(self.policy.url)

    def is_well(self) -> bool:
        (group,) = self.policy.status().result(END_S).groups
        return [one.fence_reason or one.is_stale for one in group.engines] == [False, False]


over_ray = pytest.param("ray", marks=pytest.mark.ray)


@pytest.fixture(scope="module")
def run(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    """Each test hands it back with two engines that serve."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    group = {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}
    server = {
        "model_path": str(model),
        "groups": {"main": group},
        "health": {"probe_interval_s": 0.5, "backoff_s": 0.1},
        "weights": {"store": True},
    }
    config = {"log_dir": str(tmp_path_factory.mktemp("run")), "servers": {"policy": server}}
    whole = rollout.RolloutConfig.from_dict(config)
    with rollout.launch(whole, backend=request.param) as deployment:
        yield Run(deployment["policy"], model, request.param == "ray")


@dataclass(frozen=True)
class Step:
    """One turn of the conversation; without ``tools`` it does not continue one that has them."""

    text: str
    num_tokens: int = 40
    stream: bool = False
    tools: bool = False


STEPS = (
    Step("one"),
    Step("two", stream=True),
    Step("three", 600),
    Step("one", tools=True),
    Step("two", 600, stream=True, tools=True),
    Step("three", tools=True),
)
LONG = {"whole": 2, "streamed": 4}
"""Those in whose middle something happens."""
Fault = Callable[[Run], None]


@dataclass
class Conversation:
    """All steps with the openai client, which sends again what was lost.

    Attributes:
        num_lost: streams that broke off, or ended with an error.
    """

    session: AgentSession
    num_lost: int = 0
    histories: dict[bool, list[Any]] = field(default_factory=lambda: {False: [], True: []})

    def __enter__(self) -> Conversation:
        url, key = self.session.base_url, self.session.api_key
        self._client = openai.OpenAI(base_url=url, api_key=key, max_retries=9)
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def turns(self) -> Turns:
        return self.session.turns().result(END_S)

    def take(self, step: Step, fault: Callable[[], None] = lambda: None) -> None:
        """One turn; while it is generated, ``fault`` happens."""
        history = self.histories[step.tools]
        history.append({"role": "user", "content": step.text})
        while True:
            try:
                answer = (self._streamed if step.stream else self._whole)(step, fault)
            except (openai.APIError, httpx.TransportError):
                self.num_lost += 1
                assert self.num_lost < 3
                fault = _nothing
            else:
                history.append(answer)
                return

    def _ask(self, step: Step, **options: Any) -> Any:
        options |= {"tools": TOOLS} if step.tools else {}
        create: Any = self._client.chat.completions.create
        return create(
            model="policy",
            messages=self.histories[step.tools],
            temperature=0,
            max_tokens=step.num_tokens,
            extra_body={"ignore_eos": True},
            **options,
        )

    def _whole(self, step: Step, fault: Callable[[], None]) -> Any:
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(self._ask, step)
            fault()
            return asking.result(END_S).choices[0].message

    def _streamed(self, step: Step, fault: Callable[[], None]) -> Any:
        """It happens when the stream has begun."""
        parts = {"content": "", "reasoning_content": ""}
        for chunk in self._ask(step, stream=True):
            delta, has_begun = chunk.choices[0].delta, any(parts.values())
            for name in parts:
                parts[name] += getattr(delta, name, None) or ""
            if any(parts.values()) and not has_begun:
                fault()
        return {"role": "assistant", **parts}


def _nothing() -> None: ...


@pytest.fixture(scope="module")
def reference(run: Run) -> tuple[Turns, list[rollout.Sample]]:
    """The conversation without a loss."""
    with run.policy.session() as session, Conversation(session) as conversation:
        for step in STEPS:
            conversation.take(step)
        assert conversation.num_lost == 0
        return conversation.turns(), session.samples().result(END_S)


def kill_the_worker(run: Run) -> None:
    run.busy()
    run.kill_the_worker()


def kill_the_router(run: Run) -> None:
    run.busy()
    run.kill_the_router()


def kill_its_engine(run: Run) -> None:
    pid = run.busy().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def push_the_same(run: Run) -> None:
    from safetensors.torch import load_file

    run.busy()
    run.policy.push(load_file(run.model / "model.safetensors")).result(END_S)


def offload_and_onload(run: Run) -> None:
    run.busy()
    run.policy.offload().result(END_S)
    run.policy.serve().result(END_S)


CUT = (kill_the_worker, kill_the_router)
"""A stream that has begun is not continued by the program, and is sent again by the client."""


def check_goes_on(
    run: Run, reference: tuple[Turns, list[rollout.Sample]], fault: Fault, place: int
) -> None:
    """The conversation with ``fault`` in the turn at ``place``, held against that without."""
    with run.policy.session() as session, Conversation(session) as conversation:
        for step in STEPS[:place]:
            conversation.take(step)
        before = conversation.turns()
        seen: list[Turns] = []

        def happen() -> None:
            fault(run)
            seen.append(conversation.turns())

        conversation.take(STEPS[place], happen)
        (during,) = seen
        for step in STEPS[place + 1 :]:
            conversation.take(step)
        turns, samples = conversation.turns(), session.samples().result(END_S)
    assert during[:place] == turns[:place] == before
    assert conversation.num_lost == (fault in CUT and STEPS[place].stream)
    if fault is push_the_same:  # in the middle
        assert len(turns[place]["weight_versions"]) == 2
    expected, expected_samples = reference
    check_turns(turns, expected)
    for sample, wanted in zip(samples, expected_samples, strict=True):
        assert sample.prompt_ids + sample.output_ids == wanted.prompt_ids + wanted.output_ids
        assert sample.mask == wanted.mask
        assert sample.output_logprobs == pytest.approx(wanted.output_logprobs, abs=1e-4)
    assert sum(sum(one.mask) for one in samples) == sum(step.num_tokens for step in STEPS)
    assert wait_until(run.is_well, END_S)


def check_turns(turns: Turns, expected: Turns) -> None:
    same = ("turn", "parent", "drift", "first_difference", "prompt_ids", "output_ids", "text")
    for turn, wanted, step in zip(turns, expected, STEPS, strict=True):
        assert {name: turn[name] for name in same} == {name: wanted[name] for name in same}
        assert turn["output_logprobs"] == pytest.approx(wanted["output_logprobs"], abs=1e-4)
        assert len(turn["output_ids"]) == step.num_tokens


@pytest.mark.parametrize("place", LONG.values(), ids=LONG)
@pytest.mark.parametrize(
    "fault",
    [kill_the_worker, kill_its_engine, push_the_same, offload_and_onload],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("run", ["local"], indirect=True)
def test_a_conversation_is_the_same_over_a_loss_in_the_middle_of_a_turn(
    run: Run, reference: tuple[Turns, list[rollout.Sample]], fault: Fault, place: int
) -> None:
    check_goes_on(run, reference, fault, place)


@pytest.mark.parametrize("place", LONG.values(), ids=LONG)
@pytest.mark.parametrize("fault", CUT, ids=lambda one: one.__name__)
@pytest.mark.parametrize("run", [over_ray], indirect=True)
def test_so_it_is_over_a_lost_actor(
    run: Run, reference: tuple[Turns, list[rollout.Sample]], fault: Fault, place: int
) -> None:
    check_goes_on(run, reference, fault, place)
