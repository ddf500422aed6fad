"""Processes of every role die at random moments of an asynchronous run that offloads and pushes.

Each round kills one.  Every request is answered, or its client may send it again; every token is
of the version that it names; the trainer gets every prompt once; no command waits for a boot; then
others have taken the place of what was killed.  At the end nothing is left.

Many kills: ``ROLLOUT_KILLS=100 pytest -m chaos -s tests/end_to_end/test_random_kills.py``.
"""

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import rollout
from rollout.core.errors import ActorLost, PhaseFailed
from rollout.core.samples import Sample, all_samples
from rollout.core.types import EngineStatus
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.stream.options import RolloutOptions
from tests.support.cpu_engines import cpu_config
from tests.support.load import PROMPTS
from tests.support.models import plain_models
from tests.support.processes import shared_memory_of, wait_until
from tests.support.ray_worlds import RayWorld
from tests.support.referee import Answer, Referee, Span

pytestmark = [pytest.mark.exec, pytest.mark.timeout(500)]
NUM_KILLS = int(os.environ.get("ROLLOUT_KILLS", "100"))
SEED = int(os.environ.get("ROLLOUT_SEED", "1"))
NUM_TOKENS = 64
NUM_CLIENTS = 3
BATCH: dict[str, Any] = {
    "num_groups": 6,
    "group_size": 2,
    "sampling": rollout.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
}
OPTIONS = RolloutOptions(mode="async", over_sampling=2.0, max_version_lag=2)
ACTORS = {
    "router": "RouterActor",
    "launcher": "EngineActor",
    "store agent": "StoreAgentActor",
    "group": "ServerGroupActor",
    "server": "RolloutServerActor",
}
# A standby has a launcher, too, and may be missing for a time.
LEAST = {"router": 1, "group": 1, "server": 1, "launcher": 2, "store agent": 1}
ROLES = ("engine", "standby", *ACTORS)
BACK_S = 240.0  # with boots
DEADLINE_S = 120.0  # of each command
DEADLINES_S = {"offload": DEADLINE_S, "push": DEADLINE_S}
# For a machine that only kills: the shortest deadline of a phase.  No engine is left after half a
# push, and the next push waits for a boot, which takes SGLang a minute.
COMMAND_S = {
    "embedded": {"offload": 60.0, "push": 60.0},
    "sglang": {"offload": 60.0, "push": 120.0},
}


def config(model_path: Path, folder: Path, kind: str) -> rollout.RolloutConfig:
    engine = cpu_config(kind, cpus=0.5)
    policy = {
        "model_path": str(model_path),
        "groups": {
            "main": {"num_engines": 2, "standby": 1, "needs_offload": True, "engine": engine}
        },
        "router": {"token_failover": "on"},
        "weights": {"store": {"spare_bytes": 0}},
        "health": {
            "probe_interval_s": 0.5,
            "probe_timeout_s": 10.0,
            "backoff_s": 0.1,
            "max_restarts": 1000,
        },
    }
    return rollout.RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


class Clients:
    """They send one request after the other, again what a lost router did not answer."""

    def __init__(self, policy: rollout.ServerHandle) -> None:
        self.wrong: list[str] = []
        self.answers: list[Answer] = []
        self.num_again = 0
        self.least_version = policy.weight_version
        self._policy = policy
        self._ends = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_CLIENTS)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in self.threads:
                thread.join(60)

    def _run(self, number: int) -> None:
        serial = 0
        with httpx.Client(trust_env=False, timeout=300) as client:
            while not self._ends.is_set():
                serial += 1
                prompt = PROMPTS[(number + serial) % len(PROMPTS)]
                body = {
                    "rid": f"client-{number}-{serial}",
                    "input_ids": list(prompt),
                    "sampling_params": BATCH["sampling"].to_wire(),
                    "return_logprob": True,
                }
                self._ask(client, prompt, body)

    def _ask(self, client: httpx.Client, prompt: tuple[int, ...], body: dict[str, Any]) -> None:
        least = self.least_version
        while True:
            try:
                reply = client.post(f"{self._policy.url}/generate", json=body)
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code != 503:
                break
            self.num_again += 1
            self._ends.wait(0.1)
        if reply.status_code != 200:
            self.wrong.append(f"{body['rid']}: {reply.status_code}: {reply.text[:300]}")
            return
        answer = Answer.of(prompt, reply.json())
        self.answers.append(answer)
        if len(answer.output) != NUM_TOKENS:
            self.wrong.append(f"{answer.rid}: {len(answer.output)} tokens, {answer.kind}")
        # A request that lost its router may have begun before the push that it was sent after.
        if answer.spans[-1].version < least:
            self.wrong.append(f"{answer.rid}: {answer.spans}, sent after {least} was published")


class Run:
    """A training loop over a server whose processes are killed.

    Attributes:
        longest: command -> the seconds that it took at most, by the role that was killed.
    """

    def __init__(
        self,
        policy: rollout.ServerHandle,
        models: list[Path],
        world: RayWorld | None,
        command_s: dict[str, float],
    ) -> None:
        from safetensors.torch import load_file

        self.policy, self.models, self.world = policy, models, world
        self.command_s = command_s
        self.tensors = [load_file(path / "model.safetensors") for path in models]
        rows = [{"input_ids": [*PROMPTS[i % len(PROMPTS)], i % 90]} for i in range(20_000)]
        self.data = PromptData(rows, seed=3, num_epochs=1)
        self.step_number, self.version = 0, policy.weight_version
        self.step_s: list[float] = []
        self.role = "nothing"
        self.longest: dict[str, dict[str, float]] = defaultdict(dict)
        self.back_s: dict[str, list[float]] = defaultdict(list)
        self.num_called_again: Counter[str] = Counter()
        self.trained: list[int] = []
        self.files: set[Path] = set()
        self.clients = Clients(policy)
        self.referee = Referee(lambda version: models[version % len(models)])

    def engines(self) -> tuple[EngineStatus, ...]:
        (group,) = self.policy.status().result(60).groups
        return group.engines

    def engine_processes(self) -> list[int]:
        """The first process of each engine, also of those that sleep."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                parent = process.parent()
                is_guarded = parent is not None and parent.name() == "engine-guard"
                if is_guarded and str(self.models[0]) in process.cmdline():
                    found.append(process.pid)
        return found

    def pids(self, role: str) -> list[int]:
        if self.world is not None and role in ACTORS:
            return self.world.pids(ACTORS[role])
        serving = {one.pid for one in self.engines()}
        return [pid for pid in self.engine_processes() if (pid in serving) == (role == "engine")]

    def call(self, name: str, command: Callable[[], Any]) -> None:
        """Call it, again if an actor that it needed was lost."""
        begun_s = time.monotonic()
        while True:
            try:
                command()
                break
            except (ActorLost, PhaseFailed) as error:  # between two calls, or in one of its phases
                if "call again" not in str(error):
                    raise
                self.num_called_again[self.role] += 1
        took_s = time.monotonic() - begun_s
        self.longest[name][self.role] = max(took_s, self.longest[name].get(self.role, 0.0))
        assert took_s < self.command_s[name], f"{name} took {took_s:.1f} s, killed: {self.role}"

    def push(self) -> None:
        status = self.policy.status().result(60)
        # A server that was lost in a push may have had the version, and not served it yet.
        if (status.weight_version, status.gate) != (self.version, "open"):
            weights = self.tensors[self.version % len(self.tensors)]
            self.policy.push(weights, self.version).result(DEADLINE_S)

    def step(self, driver: rollout.Driver) -> None:
        begun_s = time.monotonic()
        self.step_number += 1
        groups = driver.rollout(
            self.step_number, self.data, options=OPTIONS, weight_version=self.version, **BATCH
        ).result(DEADLINE_S)
        self.check(driver, [*all_samples(groups)])
        self.trained += [group.prompt_index for group in groups]
        self.call("offload", lambda: self.policy.offload().result(DEADLINE_S))
        self.version += 1
        self.call("push", self.push)
        self.clients.least_version = self.version
        self.step_s.append(time.monotonic() - begun_s)

    def check(self, driver: rollout.Driver, samples: list[Sample]) -> None:
        """What the trainer gets, and what the clients got meanwhile."""
        for sample in samples:
            sample.check()
            assert sum(sample.mask) == NUM_TOKENS, sample.error
        stream = driver._inner.stream_of(self.data)
        assert stream.auditor.findings(stream.pending) == []
        answers, self.clients.answers = self.clients.answers, []
        wrong = self.clients.wrong + self.referee.findings(
            [*answers, *(answer_of(number, one) for number, one in enumerate(samples))]
        )
        assert not wrong, (self.role, wrong[:5])

    def kill(self, driver: rollout.Driver, role: str) -> None:
        """One process of a role, at a random moment of a step."""
        # One that boots takes the place of an engine, too.
        needed = "standby" if role == "engine" else role
        while True:
            assert wait_until(lambda: bool(self.pids(needed)), BACK_S), (role, self.engines())
            if self.kill_in_a_step(driver, role, CHANCE.uniform(0, min(self.step_s))):
                return

    def kill_in_a_step(self, driver: rollout.Driver, role: str, after_s: float) -> bool:
        """Whether the process was still there: an offload ends a standby that boots."""
        self.role = role
        pid = CHANCE.choice(self.pids(role))
        self.files |= shared_memory_of(pid)
        killed_s = list[float]()

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed_s.append(time.monotonic())

        timer = threading.Timer(after_s, kill)
        timer.start()
        try:
            self.step(driver)
        finally:
            timer.join()
        assert wait_until(lambda: self.is_whole(pid), BACK_S), (role, self.engines())
        assert killed_s or role == "standby"
        self.back_s[role] += [time.monotonic() - killed for killed in killed_s]
        print(f"{time.strftime('%T')} {role}: whole after {self.back_s[role][-1:]} s", flush=True)
        return bool(killed_s)

    def is_whole(self, killed: int = 0, *, with_standbys: bool = False) -> bool:
        """Whether all engines serve the published weights, and all actors are there."""
        if self.world is not None:
            for role, least in LEAST.items():
                pids = self.world.pids(ACTORS[role])
                if len(pids) < least or killed in pids:
                    return False
        engines = self.engines()
        return all(
            one.state == "serving"
            and one.pid != killed
            and one.weight_version == self.version
            and (one.standby == "ready" or not with_standbys)
            for one in engines
        )


CHANCE = random.Random(SEED)


def answer_of(number: int, sample: Sample) -> Answer:
    spans = tuple(Span(int(one.version), one.start, one.end) for one in sample.weight_versions)
    return Answer(
        rid=f"sample {number}",
        prompt=tuple(sample.prompt_ids),
        output=tuple(sample.output_ids),
        logprobs=tuple(sample.output_logprobs),
        spans=spans,
        kind=str(sample.finish_reason),
    )


def check(
    folder: Path,
    kind: str,
    world: RayWorld | None,
    roles: list[str],
    command_s: dict[str, float] = DEADLINES_S,
) -> str:
    models = plain_models(folder, 3)
    backend = "local" if world is None else "ray"
    with ExitStack() as stack:
        deployment = stack.enter_context(
            rollout.launch(config(models[0], folder / "logs", kind), backend=backend)
        )
        run = Run(deployment["policy"], models, world, command_s)
        assert wait_until(lambda: run.is_whole(with_standbys=True), BACK_S), run.engines()
        driver = stack.enter_context(rollout.Driver(run.policy.url, max_in_flight=16))
        with run.clients.running():
            run.step(driver)
            for role in roles:
                run.kill(driver, role)
            run.role = "nothing"
            run.step(driver)
        assert not any(thread.is_alive() for thread in run.clients.threads)
        run.check(driver, [])
        assert len(run.trained) == len(set(run.trained))
        run.files |= {file for pid in run.engine_processes() for file in shared_memory_of(pid)}
    assert wait_until(lambda: not run.engine_processes(), 20)
    assert wait_until(lambda: not any(file.exists() for file in run.files), 20), run.files
    if world is not None:
        assert not set(world.live_actors()) & {*ACTORS.values()}
    return figures(run, roles)


def figures(run: Run, roles: list[str]) -> str:
    lines = [
        f"{len(roles)} kills, {run.step_number} steps, the shortest {min(run.step_s):.1f} s, "
        f"{len(run.trained)} groups, {run.clients.num_again} requests of other clients sent again"
    ]
    for role, num in Counter(roles).items():
        back_s = sorted(run.back_s[role])
        longest = {name: round(by_role[role], 1) for name, by_role in run.longest.items()}
        lines.append(
            f"{role}: {num}, whole after {back_s[len(back_s) // 2]:.1f} s ({back_s[-1]:.1f}), "
            f"longest {longest}, {run.num_called_again[role]} calls repeated"
        )
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.embedded
def test_engines_and_standbys_are_killed(tmp_path: Path) -> None:
    print(check(tmp_path, "embedded", None, ["standby", "engine"]))


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.ray
def test_one_process_of_each_role_is_killed(ray_cluster: RayWorld, tmp_path: Path) -> None:
    print(check(tmp_path, "embedded", ray_cluster, [*ROLES]))


@pytest.mark.chaos
@pytest.mark.ray
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("embedded", marks=pytest.mark.embedded),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def test_many_processes_of_random_roles_are_killed(
    ray_cluster: RayWorld, tmp_path: Path, kind: str
) -> None:
    roles = CHANCE.choices(ROLES, k=NUM_KILLS)
    print(check(tmp_path, kind, ray_cluster, roles, COMMAND_S[kind]))
