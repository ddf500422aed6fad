"""Wrong calls, by group of the public API: one error of this library that names what is wrong.

Kinds and bounds of arguments are pydantic's (tests/rollout/core/test_arguments.py): a case for each
class with all its settings.  What our own code refuses has a case of its own.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

import rollout
from engines import protocol
from rollout.adapters.trl import RolloutFunction, RolloutWorker, WeightTransfer
from rollout.cli.main import app
from rollout.core.errors import ConfigError, LifecycleError, RolloutError, WeightMismatch
from rollout.core.pending import LoopThread, Pending
from rollout.driver import (
    EvalPlan,
    RetryPolicy,
    groups_of,
    packed,
    padded,
    rewards,
)
from rollout.driver.client import http_client
from rollout.driver.client.agent_session import AgentSession
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.processes import program
from tests.support.served_fakes import TIMEOUT_S, launched
from tests.support.waits import forever

URL = "http://127.0.0.1:1"
PROMPT, SAMPLING = rollout.Prompt((1, 2)), rollout.SamplingParams()
SAMPLE = rollout.Sample([1], [2], [-1.0])
BATCH = {"num_groups": 1, "group_size": 1, "sampling": SAMPLING}
ROLLOUT = {"rollout_id": 1, "prompts": [PROMPT], "group_size": 1, "sampling": SAMPLING}


class On(NamedTuple):
    """What a wrong call is made on: a run that serves, and one that has been stopped."""

    deployment: DeploymentHandle
    closed: DeploymentHandle
    folder: Path

    @property
    def policy(self) -> ServerHandle:
        return self.deployment["policy"]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    folder = tmp_path_factory.mktemp("wrong")
    with launched(launch_local, folder / "closed", {"main": {}}) as closed:
        pass
    agents = {"agents": {"workers": 1}}
    with launched(launch_local, folder / "open", {"main": {}}, server=agents) as deployment:
        yield On(deployment, closed, folder)


Case = tuple[Callable[[On], Any], type[Exception], str]


def end(value: Any) -> None:
    if isinstance(value, Pending):
        value.result(TIMEOUT_S)


def driver(use: Callable[[rollout.Driver], Any]) -> Callable[[On], Any]:
    """A wrong use of a driver without engines."""

    def call(on: On) -> None:
        with rollout.Driver(URL) as own:
            end(use(own))

    return call


def sampling(value: Any) -> Callable[[On], Any]:
    return driver(lambda one: one.rollout(**ROLLOUT | {"sampling": value}))


def prompts(value: Any) -> Callable[[On], Any]:
    return driver(lambda one: one.rollout(**ROLLOUT | {"prompts": value}))


def pending(use: Callable[[Pending[Any]], Any]) -> Callable[[On], Any]:
    """A wrong use of a call that does not end by itself."""

    def call(on: On) -> None:
        loop = LoopThread("test")
        endless = loop.submit(forever())
        try:
            use(endless)
        finally:
            endless.cancel()
            loop.close()

    return call


def closed_session(on: On) -> Any:
    session = on.policy.session("mine")
    session.close().result(TIMEOUT_S)
    return session


def closed_pusher(on: On) -> Any:
    pusher = on.policy.pusher()
    pusher.close()
    return pusher.offload()


def push_of(on: On, value: Any, **options: Any) -> Any:
    with on.policy.pusher() as pusher:
        return pusher.push(value, **options)


def of_other_shapes(on: On) -> None:
    import torch

    from rollout.driver.logprobs.token_logprobs import token_logprobs

    token_logprobs(torch.ones(2, 5), torch.tensor([1, 2, 3]))


def worker(on: On | None = None, **changed: Any) -> RolloutWorker:
    names = "queue_maxsize max_inflight_tasks max_completion_length temperature top_p"
    args = dict.fromkeys(names.split(), 1) | {"top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    policy = SimpleNamespace(generate=None, weight_version=0)
    given = {"policy": policy, "dataset": [], "reward_funcs": len, "processing_class": None}
    return RolloutWorker(**given | {"args": SimpleNamespace(**args)} | changed)


def started_twice(on: On) -> None:
    one = worker()
    one._thread = SimpleNamespace()  # type: ignore[assignment]
    one.start()


def twice_prepared(on: On) -> None:
    transfer = WeightTransfer(on.policy)
    transfer.init_weight_transfer()
    try:
        transfer.init_weight_transfer()
    finally:
        transfer.destroy()


def closed_function(on: On) -> None:
    function = RolloutFunction(on.policy)
    function.close()
    function.sync_weights(5)


CASES: list[Case] = [
    # Start, join, configurations.
    (lambda on: rollout.launch({}), TypeError, "takes a RolloutConfig, not a dict"),
    (
        lambda on: rollout.launch(on.deployment.config, backend="slurm"),
        ValueError,
        "backend = 'slurm': must be 'local' or 'ray'",
    ),
    (
        lambda on: rollout.launch(on.deployment.config, bundles=[0]),
        ValueError,
        "placement_group and bundles need backend='ray'",
    ),
    (lambda on: rollout.connect(""), ValueError, "run = '': must be the run's folder"),
    (lambda on: ConfigError.of([]), ValueError, "needs at least one mistake"),
    # A deployment.
    (lambda on: on.deployment["polcy"], KeyError, "no server 'polcy'; this run has policy"),
    (lambda on: rollout.RunHandle({})["a"], KeyError, "no server 'a'; this run has no server"),
    (lambda on: on.deployment.started(), LifecycleError, "was started by launch"),
    (
        lambda on: on.deployment.push({"polcy": {}}),
        ValueError,
        "no server 'polcy' to push weights to; known: policy",
    ),
    # A server: phases, engines, weights.
    (lambda on: on.policy.serve(before_kv=5), TypeError, "before_kv takes a plain function"),
    (
        lambda on: on.policy.offloaded({}),
        TypeError,
        "a function that returns tensors, not a dict",
    ),
    (lambda on: on.policy.offloaded().push({}), LifecycleError, "window is not open"),
    (lambda on: on.policy.checks.expect(5), WeightMismatch, "a list of floats per prompt"),
    (lambda on: on.policy.checks.expect([["x"]]), WeightMismatch, "a list of floats per prompt"),
    (lambda on: on.policy.checks.expect([[0.1]]), WeightMismatch, "expected log-probs of"),
    (lambda on: on.policy.push({}, name_map=5), WeightMismatch, "name_map is a function"),
    # Requests and sessions.
    (lambda on: on.policy.generate([1], nope=3), TypeError, "nope is no option of a request; kn"),
    (lambda on: on.policy.generate([1], timeout_s=0), ValueError, "timeout_s = 0: must be more"),
    (lambda on: on.policy.session("a b"), ValueError, "session_id = 'a b': must be 1 to 256"),
    (lambda on: on.policy.abort(""), ValueError, "request_id = '': must be a text"),
    (lambda on: closed_session(on).turns(), RolloutError, "session mine is closed"),
    (lambda on: closed_session(on).samples(), RolloutError, "closed, and its turns are deleted"),
    (
        lambda on: AgentSession([URL], "a", key="", control_key="", submit=asyncio.run).close(),
        rollout.GenerationFailed,
        f"DELETE {URL}/sessions/a: ClientConnectorError",
    ),
    # What has not ended yet.
    (pending(lambda one: one.result(-1)), ValueError, "timeout_s = -1: must be"),
    (pending(lambda one: one.then(5)), TypeError, "act = 5: must be a function"),
    (pending(lambda one: one.object_ref), RolloutError, "has no object_ref"),
    # The driver.
    (prompts("abc"), TypeError, "prompts = 'abc': must be a list of Prompt"),
    (prompts([[1, 2]]), TypeError, r"prompts\[0\] = \[1, 2\]: must be a Prompt"),
    (sampling({}), TypeError, "sampling = {}: must be an instance of SamplingParams"),
    (sampling(protocol.SamplingParams(top_k=0)), ValueError, "top_k = 0"),
    (sampling(protocol.SamplingParams(min_new_tokens=500)), ValueError, "at most max_new_tokens"),
    (driver(lambda one: one.state_of(PROMPT)), ValueError, "nothing was rolled out"),
    (
        driver(lambda one: one.restore(rollout.PromptData([{"prompt_ids": [1]}]), {}, **BATCH)),
        ValueError,
        "no state of a stream: it has no audit, next_serial, source, works",
    ),
    (driver(lambda one: one.restore(5, {}, **BATCH)), TypeError, "a source such as PromptData"),
    (lambda on: rollout.RolloutDriver(URL), RolloutError, "needs a running event loop"),
    (lambda on: rollout.Driver("localhost:80"), ValueError, "'localhost:80': must be the http://"),
    (lambda on: rollout.Driver(URL, key="a\nb"), ValueError, "printable ASCII text"),
    (lambda on: rollout.Driver(URL, key=b"x"), TypeError, r"key = \(hidden\): must be a text"),
    # Data, samples, log-probs, rewards.
    (lambda on: rollout.PromptData([]), ValueError, "the data set has no rows"),
    (
        lambda on: rollout.PromptData([{"prompt_ids": [1]}]).load_state_dict({"seed": 0}),
        ValueError,
        "no state of a PromptData: it has no epoch, num_rows, place",
    ),
    (lambda on: groups_of([{"prompt_ids": [1]}]), ValueError, "it has no column 'rollout_id'"),
    (lambda on: packed([]), ValueError, "no samples to make a batch of"),
    (lambda on: padded([], pad_to_multiple=0), ValueError, "pad_to_multiple = 0: must be"),
    (lambda on: rewards.in_thread(5), TypeError, "reward = 5: must be a plain"),
    (lambda on: rewards.RemoteReward("host"), ValueError, "url = 'host': must be an http"),
    # The adapter of TRL.
    (lambda on: RolloutFunction("policy"), TypeError, "policy = 'policy': must be the handle"),
    (lambda on: RolloutFunction(on.policy)(["a"], 5), TypeError, "trainer = 5: must be a GRPO"),
    (closed_function, RolloutError, "RolloutFunction is closed"),
    (lambda on: worker(reward_funcs=[5]), TypeError, r"reward_funcs\[0\] = 5: must be a func"),
    (started_twice, LifecycleError, "worker has been started"),
    (lambda on: WeightTransfer(5), TypeError, "policy = 5: must be the"),
]
OF_TORCH: list[Case] = [
    (
        lambda on: on.policy.phases.make_push({}, adapter={}),
        WeightMismatch,
        "weights.update is full: adapters need lora",
    ),
    (lambda on: push_of(on, {}, dtype="bfloat16"), TypeError, "'bfloat16': must be a torch"),
    (lambda on: on.policy.pusher(rank_timeout_s=0), ValueError, "rank_timeout_s = 0: must be"),
    (closed_pusher, RolloutError, "this pusher is closed; policy.pusher.. makes another"),
    (
        of_other_shapes,
        ValueError,
        r"token_ids.shape = \[3\]: must be \[2\]",
    ),
    (twice_prepared, LifecycleError, "was called before; call destroy first"),
]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.torch) for case in OF_TORCH)],
    ids=[words for *_, words in (*CASES, *OF_TORCH)],
)
def test_a_wrong_call_has_a_clear_error(
    call: Callable[[On], Any],
    kind: type[Exception],
    words: str,
    on: On,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.1)
    with pytest.raises(kind, match=words) as raised:
        end(call(on))
    assert type(raised.value) is kind or kind not in (TypeError, ValueError)  # Python's own
    assert on.policy.status().result(TIMEOUT_S).phase == "serving"


# Each class or call with all its settings wrong, and the settings that its error names.
SETTINGS: list[tuple[Callable[[On], Any], str]] = [
    (
        lambda on: rollout.Driver(
            *(URL, 1.0),
            max_in_flight="8",
            request_timeout_s=0,
            adapt_every_s=-1,
            max_failed_share=2,
            max_prompt_tokens=True,
            routed_experts=1,
            retry_policy={},
        ),
        "reward max_in_flight request_timeout_s adapt_every_s max_failed_share"
        " max_prompt_tokens routed_experts retry_policy",
    ),
    (
        lambda on: rollout.RolloutOptions(
            mode="fast",
            partial=1,
            over_sampling=float("nan"),
            max_version_lag=-1,
            when_stale="keep",
            max_redone=None,
            abort_timeout_s=0,
        ),
        "mode partial over_sampling max_version_lag when_stale max_redone abort_timeout_s",
    ),
    (
        lambda on: rollout.Hooks(generate="x", reward=1, reward_tries=0),
        "generate reward reward_tries",
    ),
    (
        lambda on: rollout.EvalDataset(prompts=["text"], sampling={}, ks=("a",)),
        "prompts[0] sampling ks[0]",
    ),
    (lambda on: EvalPlan(every=1.5), "every"),
    (lambda on: EvalPlan(2).is_due("x"), "num_trained"),
    (lambda on: RetryPolicy(max_lost=-1), "max_lost"),
    (lambda on: rollout.Prompt((1.5,)), "ids ids[0]"),
    (lambda on: rollout.Prompt(()), "ids"),
    (lambda on: rollout.SamplingParams(temperature="hot", n=0), "temperature n"),
    (
        driver(
            lambda one: one.rollout(
                **ROLLOUT
                | {"rollout_id": "1", "options": {}, "weight_version": "3", "on_sample": 5}
            )
        ),
        "rollout_id options weight_version on_sample",
    ),
    (sampling(protocol.SamplingParams(temperature=-1, top_p=1.5)), "temperature top_p"),
    (driver(lambda one: one.evaluate(1, {"sums": []})), "datasets['sums']"),
    (driver(lambda one: one.check_logprobs([], [], on_mismatch="x")), "on_mismatch"),
    (driver(lambda one: one.set_weight_version("7")), "version"),
    (lambda on: rollout.compare_logprobs([SAMPLE], [[-1.0]]).truncated_weights(0), "cap"),
    (lambda on: worker().update_model_version("x"), "model_version"),
    (lambda on: worker().check_health(0), "stale_after_s"),
]


@pytest.mark.parametrize(("call", "names"), SETTINGS, ids=[names for _, names in SETTINGS])
def test_every_wrong_setting_is_named(call: Callable[[On], Any], names: str, on: On) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call(on)
    assert type(raised.value) in (TypeError, ValueError)  # Python's own
    assert set(re.findall(r"^ *(\S+) = ", str(raised.value), re.MULTILINE)) == set(names.split())


PUSHES: list[tuple[Any, str]] = [
    ("abc", "takes tensors by name, such as model.state_dict.., not the str 'abc'"),
    (b"abc", "not the bytes b'abc'"),
    (5, "not the int 5"),
    ([1, 2], r"pairs \(name, tensor\); item 0 is the int 1"),
    ([("a", 1, 2)], r"item 0 is the tuple"),
    ([(1, 2)], "the name of a tensor is a str; item 0 has the int 1"),
    ({"model.norm.weight": [1.0]}, "'model.norm.weight' is a list, not a tensor"),
    ({"model.norm.weight": None}, "is a NoneType, not a tensor"),
]


@pytest.mark.torch
@pytest.mark.parametrize(("value", "words"), PUSHES, ids=[words for _, words in PUSHES])
def test_a_push_of_something_else_is_refused(value: Any, words: str, on: On) -> None:
    checks, phases = on.policy.checks, on.policy.phases
    for call in (
        *(on.policy.push, phases.update_weights, phases.make_push),
        *(checks.push_path, checks.base_differs),
    ):
        with pytest.raises(WeightMismatch, match=words):
            call(value)


def test_after_a_stop_every_call_says_so(on: On) -> None:
    policy = on.closed["policy"]
    transfer = WeightTransfer(policy)
    for call in (
        *(on.closed.status, on.closed.offload, policy.status, policy.offload, policy.serve),
        *(policy.phases.pause_generation, policy.phases.verify, policy.phases.continue_generation),
        *(transfer.pause, transfer.resume, lambda: policy.weight_version),
        lambda: ServerHandle("policy", policy._config, policy._caller).url,
    ):
        with pytest.raises(RolloutError, match="deployment is closed: no call is possible after"):
            call()
    on.closed.stop()


def test_a_closed_driver_says_so() -> None:
    own = rollout.Driver(URL)
    own.close()
    own.close()
    for call in (
        lambda: own.rollout(**ROLLOUT),
        lambda: own.evaluate(1, {}),
        lambda: own.check_logprobs([], []),
        lambda: own.state_of(PROMPT),
    ):
        with pytest.raises(RolloutError, match="driver is closed: no call is possible"):
            call()


def test_a_command_in_the_wrong_phase_says_what_to_do_and_both_ways_lead_on(on: On) -> None:
    policy = on.policy
    with pytest.raises(LifecycleError, match="is open already"), policy.offloaded() as window:
        window.__enter__()
    with pytest.raises(LifecycleError, match=r"push them: with window.push\(weights\) in an offl"):
        policy.serve().result(TIMEOUT_S)
    with pytest.raises(LifecycleError, match="cannot flush_cache while offloaded"):
        policy.phases.flush_cache().result(TIMEOUT_S)
    policy.offload().result(TIMEOUT_S)
    assert policy.status().result(TIMEOUT_S).phase == "offloaded"
    version = policy.weight_version + 1
    assert policy.push(push(version)).result(TIMEOUT_S).weight_version == version


# -- packages that are not installed --------------------------------------------------------------


class Missing(MetaPathFinder):
    """Makes packages look as if they were not installed."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("torch", "transformers") or name.startswith(
            (
                "rollout.weights.tensors",
                "engines.tensors.collective",
                "engines.tensors.torch_fingerprint",
            )
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing("torch", "transformers"), *sys.meta_path])


def test_without_torch_a_push_says_how_to_install_it(without_torch: None, on: On) -> None:
    with pytest.raises(ConfigError, match=r"torch, which is not installed; pip install"):
        on.policy.phases.make_push({})


def test_an_embedded_engine_without_torch_is_refused_before_it_starts(
    on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    other = on.deployment.config.model_copy(update={"run_id": "other"})
    with pytest.raises(ConfigError, match=r"groups.main.engine.kind = 'embedded': torch is not"):
        rollout.launch(other)


# -- the command line -----------------------------------------------------------------------------

COMMANDS: list[tuple[str, int, str]] = [
    ("nonsense", 2, "No such command"),
    ("attach /nowhere", 2, "no journal.json in /nowhere"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status", "said"), COMMANDS)
def test_a_wrong_command_is_one_message_and_a_status(words: str, status: int, said: str) -> None:
    with program("-m", "rollout", *words.split()) as command:
        assert command.finish(60) == status, command.output
        assert said in command.output
        assert "Traceback" not in command.output


REFUSED = [
    ("top /nowhere", "no running server found"),
    ("doctor http://127.0.0.1:1", "does not answer"),
    ("trace /nowhere", "there is no run /nowhere"),
    ("report /nowhere", "there is no run /nowhere"),
    ("status --ray", "--ray needs the id of the run"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_a_command_that_is_refused_says_why(words: str, said: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code != 0
    assert isinstance(result.exception, RolloutError | SystemExit)
    assert said in f"{result.exception} {result.output}"


def test_another_backend_than_those_two_is_refused(on: On, tmp_path: Path) -> None:
    file = tmp_path / "rollout.json"
    file.write_text(on.deployment.config.model_dump_json(exclude_defaults=True))
    result = CliRunner().invoke(app, ["serve", str(file), "--backend", "slurm"])
    assert isinstance(result.exception, ConfigError)
    assert "must be 'local' or 'ray'" in str(result.exception)
