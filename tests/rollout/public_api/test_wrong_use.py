"""Wrong arguments of public methods: one error of this library that names the argument."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rollout
from engines import protocol
from rollout.cli.main import app
from rollout.core.errors import ConfigError, LifecycleError, RolloutError, WeightMismatch
from rollout.driver.driver import RolloutDriver
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.processes import program
from tests.support.served_fakes import TIMEOUT_S, launched

S = rollout.SamplingParams()
URL = "http://127.0.0.1:1"
PROMPT = rollout.Prompt((1, 2))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    with launched(launch_local, tmp_path_factory.mktemp("wrong"), {"main": {}}) as handle:
        yield handle


def test_a_backend_that_does_not_exist_is_refused(deployment: DeploymentHandle) -> None:
    with pytest.raises(ConfigError, match="backend = 'slurm': must be 'local' or 'ray'"):
        rollout.launch(deployment.config, backend="slurm")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"placement_group": object()}, {"bundles": [0]}])
def test_a_placement_group_without_ray_is_refused(
    deployment: DeploymentHandle, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="placement_group and bundles need backend='ray'"):
        rollout.launch(deployment.config, **wrong)


PUSHES = [
    ("abc", "takes tensors by name, such as model.state_dict.., not the str 'abc'"),
    (b"abc", "not the bytes b'abc'"),
    (5, "not the int 5"),
    ([1, 2], r"pairs \(name, tensor\); item 0 is the int 1"),
    ([("a", 1, 2)], r"item 0 is the tuple"),
    ([(1, 2)], "the name of a tensor is a str; item 0 has the int 1"),
    ({"model.norm.weight": [1.0]}, "'model.norm.weight' is a list, not a tensor"),
    ({"model.norm.weight": None}, "is a NoneType, not a tensor"),
]
SENDERS = [
    *("serve_weights", "phases.update_weights", "checks.push_path"),
    "phases.make_push",
]


@pytest.mark.parametrize("method", [*SENDERS, "checks.base_differs"])
@pytest.mark.parametrize(("value", "said"), PUSHES, ids=[str(value) for value, _ in PUSHES])
@pytest.mark.torch
def test_a_push_of_something_else_is_refused(
    method: str, value: Any, said: str, deployment: DeploymentHandle
) -> None:
    with pytest.raises(WeightMismatch, match=said):
        attrgetter(method)(deployment["policy"])(value)


@pytest.mark.parametrize("version", ["7", 1.5, True, [1], b"7"])
@pytest.mark.parametrize("method", SENDERS)
@pytest.mark.torch
def test_a_version_that_is_no_number_is_refused(
    method: str, version: Any, deployment: DeploymentHandle
) -> None:
    with pytest.raises(WeightMismatch, match=r"is not an integer from 0 to 2\*\*63 - 1"):
        attrgetter(method)(deployment["policy"])({}, version=version)


HANDLE: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda p: p.serve_weights({}, name_map={"a": "b"}), WeightMismatch, "name_map is a function"),
    (lambda p: p.serve_weights({}, before_kv=5), ConfigError, "before_kv takes a plain function"),
    (lambda p: p.checks.expect([["x"]]), WeightMismatch, "a list of floats per prompt"),
    (lambda p: p.checks.expect([[0.1]]), WeightMismatch, "expected log-probs of"),
    (lambda p: p.engines.remove(5).result(TIMEOUT_S), RolloutError, "5"),
]


@pytest.mark.parametrize(("call", "kind", "said"), HANDLE)
@pytest.mark.torch
def test_a_wrong_argument_of_a_handle_is_named(
    call: Callable[[Any], Any],
    kind: type[Exception],
    said: str,
    deployment: DeploymentHandle,
) -> None:
    with pytest.raises(kind, match=said):
        call(deployment["policy"])
    assert deployment["policy"].status().result(TIMEOUT_S).phase == "serving"


def test_weights_of_no_server_are_refused(
    deployment: DeploymentHandle,
) -> None:
    assert "polcy" not in deployment
    with pytest.raises(ConfigError, match="no server 'polcy'"):
        deployment.serve_weights({"polcy": {}})


@pytest.mark.torch
def test_a_command_in_the_wrong_phase_says_what_was_wrong_in_the_callers_words(
    deployment: DeploymentHandle,
) -> None:
    policy = deployment["policy"]
    policy.give_memory().result(TIMEOUT_S)
    with pytest.raises(LifecycleError, match=r"push them: with window.push\(weights\) in an offl"):
        policy.serve().result(TIMEOUT_S)
    with pytest.raises(LifecycleError, match="cannot flush while offloaded"):
        policy.phases.flush_cache().result(TIMEOUT_S)
    # The weights have their memory again, and both ways lead on from there.
    policy.give_memory().result(TIMEOUT_S)
    assert policy.status().result(TIMEOUT_S).phase == "offloaded"
    assert policy.serve_weights(push(1)).result(TIMEOUT_S).weight_version == 1


def test_a_window_that_is_open_is_not_entered_again(deployment: DeploymentHandle) -> None:
    policy = deployment["policy"]
    with pytest.raises(LifecycleError, match="is open already"), policy.offloaded() as window:
        window.__enter__()
    assert policy.status().result(TIMEOUT_S).phase == "offloaded"
    policy.serve_weights(push(policy.weight_version + 1)).result(TIMEOUT_S)


def test_after_a_stop_every_call_says_so(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, {"main": {}}) as handle:
        policy = handle["policy"]
    for call in (
        policy.give_memory,
        policy.status,
        policy.serve,
        handle.status,
        handle.give_memory,
    ):
        with pytest.raises(RolloutError, match="deployment is closed: no call is possible"):
            call()
    handle.stop()


SETTINGS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        rollout.Driver,
        {"url": "localhost:8000"},
        "url = 'localhost:8000': must be the http://host:port",
    ),
    (rollout.Driver, {"url": None}, "url = None: must be a text"),
    (rollout.Driver, {"reward": 1.0}, "reward = 1.0: must be a function"),
    (rollout.Driver, {"hooks": {}, "reward": None}, "Hooks"),
    (rollout.Driver, {"max_in_flight": 0}, "max_in_flight = 0: must be at least 1"),
    (rollout.Driver, {"max_in_flight": "8"}, "max_in_flight = '8': must be a whole number"),
    (rollout.Driver, {"max_in_flight": True}, "max_in_flight = True: must be a whole number"),
    (rollout.Driver, {"request_timeout_s": 0}, "request_timeout_s = 0: must be more than 0"),
    (rollout.Driver, {"adapt_every_s": -1}, "adapt_every_s = -1"),
    (rollout.Driver, {"max_failed_share": 2}, "max_failed_share = 2: must be at most 1"),
    (rollout.Driver, {"max_prompt_tokens": 0}, "max_prompt_tokens = 0"),
    (rollout.Driver, {"routed_experts": 1}, "routed_experts = 1: must be True or False"),
    (rollout.Driver, {"key": "a\nb"}, "printable ASCII text"),
    (rollout.Driver, {"key": b"secret"}, r"key = \(hidden\): must be a text"),
    (rollout.Driver, {"retry_policy": {}}, "retry_policy = {}: must be an instance of RetryPolicy"),
    (
        rollout.RolloutOptions,
        {"mode": "fast"},
        "mode = 'fast': must be 'sync', 'one_ahead' or 'async'",
    ),
    (rollout.RolloutOptions, {"over_sampling": 0.5}, "over_sampling = 0.5: must be at least 1"),
    (rollout.RolloutOptions, {"over_sampling": float("nan")}, "over_sampling = nan"),
    (rollout.RolloutOptions, {"max_version_lag": -1}, "max_version_lag = -1"),
    (rollout.RolloutOptions, {"when_stale": "keep"}, "when_stale = 'keep'"),
    (rollout.RolloutOptions, {"max_redone": None}, "max_redone = None"),
    (rollout.RolloutOptions, {"abort_timeout_s": 0}, "abort_timeout_s = 0"),
    (rollout.RolloutOptions, {"mode": 1, "pin": "v1"}, "2 settings are wrong:\n  mode = 1"),
    (rollout.Hooks, {"generate": "x"}, "generate = 'x': must be a function"),
    (rollout.Hooks, {"reward_tries": 0}, "reward_tries = 0"),
    (
        rollout.EvalDataset,
        {"prompts": ["text"]},
        r"prompts\[0\] = 'text': must be an instance",
    ),
    (rollout.EvalDataset, {"sampling": {}}, "sampling = {}"),
    (rollout.Prompt, {"ids": (1.5,)}, r"ids\[0\] = 1.5: must be a whole number"),
    (rollout.Prompt, {"ids": ()}, r"ids = \(\): must have at least 1 item"),
]
RIGHT_SETTINGS: dict[Any, dict[str, Any]] = {
    rollout.Driver: {"url": URL},
    rollout.EvalDataset: {"prompts": [PROMPT]},
}


@pytest.mark.parametrize(("kind", "values", "said"), SETTINGS)
def test_a_wrong_setting_is_named(
    kind: Callable[..., Any], values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        kind(**RIGHT_SETTINGS.get(kind, {}) | values)


ROLLOUTS: list[tuple[dict[str, Any], str]] = [
    ({"rollout_id": "1"}, "rollout_id = '1': must be a whole number"),
    ({"prompts": "abc"}, "prompts = 'abc': must be a list of Prompt"),
    ({"prompts": 5}, "prompts = 5"),
    ({"prompts": []}, "at least one prompt"),
    ({"prompts": [[1, 2]]}, r"prompts\[0\] = \[1, 2\]: must be a Prompt"),
    ({"group_size": 0}, "group_size = 0"),
    ({"sampling": {}}, "sampling = {}: must be an instance of SamplingParams"),
    ({"sampling": rollout.SamplingParams(max_new_tokens=0)}, "max_new_tokens = 0"),
    ({"sampling": protocol.SamplingParams(temperature=-1)}, "temperature = -1"),
    ({"sampling": protocol.SamplingParams(top_p=1.5)}, "top_p = 1.5"),
    ({"sampling": protocol.SamplingParams(top_k=0)}, "top_k = 0"),
    ({"sampling": rollout.SamplingParams(n=2)}, "group_size sets the number"),
    ({"sampling": protocol.SamplingParams(min_new_tokens=500)}, "at most max_new_tokens"),
    ({"options": {}}, "options = {}"),
    ({"weight_version": "3"}, "weight_version = '3'"),
    ({"on_sample": 5}, "on_sample = 5"),
]
RIGHT = {"rollout_id": 1, "prompts": [PROMPT], "group_size": 1, "sampling": S}


@pytest.mark.parametrize(("change", "said"), ROLLOUTS)
async def test_a_wrong_argument_of_a_rollout_is_named(change: dict[str, Any], said: str) -> None:
    async with RolloutDriver(URL) as driver:
        with pytest.raises(ConfigError, match=said):
            await driver.rollout(**RIGHT | change)


async def test_a_wrong_data_set_is_named() -> None:
    async with RolloutDriver(URL) as driver:
        with pytest.raises(ConfigError, match=r"datasets\['sums'\] = \[\]: must be an instance"):
            await driver.evaluate(1, {"sums": []})  # type: ignore[dict-item]


def test_a_closed_driver_says_so() -> None:
    driver = rollout.Driver(URL)
    driver.close()
    driver.close()
    with pytest.raises(RolloutError, match="driver is closed"):
        driver.rollout(1, [PROMPT], group_size=1, sampling=S)


# -- packages that are not installed ----------------------------------------------------------


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


def test_without_torch_a_push_and_a_bench_say_how_to_install_it(
    without_torch: None,
    deployment: DeploymentHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"torch, which is not installed; pip install"):
        deployment["policy"].phases.make_push({})
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "--engine", "embedded"])
    assert isinstance(result.exception, ConfigError)
    assert "pip install 'accelerate>=1.0' 'jinja2>=3.1'" in str(result.exception)


def test_an_embedded_engine_without_torch_is_refused_before_it_starts(
    deployment: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    other = deployment.config.model_copy(update={"run_id": "other"})
    with pytest.raises(ConfigError, match=r"groups.main.engine.kind = 'embedded': torch is not"):
        rollout.launch(other)


# -- the command line --------------------------------------------------------------------------

COMMANDS: list[tuple[tuple[str, ...], int, str]] = [
    (("--version",), 0, rollout.__version__),
    (("nonsense",), 2, "No such command"),
    (("status", "/nowhere"), 2, "no running server found"),
    (("top", "/nowhere"), 2, "no running server found"),
    (("doctor", "http://127.0.0.1:1"), 1, "does not answer"),
    (("stop", "/nowhere", "--yes"), 2, "no running server found"),
    (("attach", "/nowhere"), 2, "no journal.json in /nowhere"),
    (("trace", "/nowhere"), 2, "there is no run /nowhere"),
    (("report", "/nowhere"), 2, "there is no run /nowhere"),
    (("plan",), 2, "Missing argument"),
    (("serve", "/nowhere.yaml"), 2, "cannot read config /nowhere.yaml"),
    (("bench", "--clients", "0"), 2, "Invalid value for '--clients'"),
    (("bench", "--engine", "vllm"), 2, "must be 'fake' or 'embedded'"),
    (("bench", "--engine", "fake", "--backend", "slurm"), 2, "must be 'local' or 'ray'"),
    (("status", "--ray"), 2, "--ray needs the id of the run"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "status", "said"), COMMANDS)
def test_a_wrong_command_is_one_message_and_a_status(
    words: tuple[str, ...], status: int, said: str
) -> None:
    with program("-m", "rollout", *words) as command:
        assert command.finish(60) == status, command.output
        assert said in command.output
        assert "Traceback" not in command.output
