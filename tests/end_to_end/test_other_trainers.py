"""The glue of the pages for verl, SkyRL and OpenRLHF, with the classes of their own wheels.

Their packages need GPUs and dozens of other packages, so only the modules and classes that the glue
builds on are loaded.  The wheels (3 MB together) are downloaded by pip; without them it is skipped.
"""

from __future__ import annotations

import abc
import ast
import enum
import importlib
import inspect
import subprocess
import sys
import typing
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

import rollout
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.pages import code_of, run_code
from tests.support.served_fakes import engines_of, launched

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a wheel's content."""
    folder = tmp_path_factory.mktemp("wheels")

    def unpack(name: str, version: str) -> Path:
        into = folder / name
        if into.exists():
            return into
        wheel = [f"{name}=={version}", "--no-deps", "--only-binary=:all:", "--quiet"]
        pip = [sys.executable, "-m", "pip", "download", *wheel, "--dest", str(folder)]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, f"pip download {name}=={version}: {done.stderr[-300:]}"
        (found,) = folder.glob(f"{name}-*.whl")
        zipfile.ZipFile(found).extractall(into)
        return into

    return unpack


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentHandle]:
    """Fake engines of the run that ``ROLLOUT_RUN`` names; every server is the policy."""
    monkeypatch.setenv("ROLLOUT_RUN", "runs/mine")
    with launched(launch_local, tmp_path) as deployment:
        policy = deployment["policy"]
        servers = {"policy": policy, "judge": policy}
        monkeypatch.setattr(rollout, "connect", {"runs/mine": servers}.__getitem__)
        yield deployment


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    """A module of this name, until the test ends; its packages are empty."""
    parent, _, own = name.rpartition(".")
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    if parent:
        package = sys.modules.get(parent) or module(monkeypatch, parent, __path__=[])
        monkeypatch.setattr(package, own, made, raising=False)
    return made


def own_packages(monkeypatch: pytest.MonkeyPatch, root: Path, package: str) -> None:
    """Packages with their own modules, but without what their ``__init__`` imports."""
    parts = package.split(".")
    for length in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:length])
        assert path.is_dir()
        module(monkeypatch, ".".join(parts[:length]), __path__=[str(path)])


def imported(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """A module of their own, until the test ends."""
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    return importlib.import_module(name)


def classes(path: Path, *names: str, **needed: Any) -> dict[str, Any]:
    """These classes and constants of a source file, without its imports."""
    tree = ast.parse(path.read_text())
    kept = [
        node
        for node in tree.body
        if getattr(node, "name", "") in names
        or any(getattr(target, "id", "") in names for target in getattr(node, "targets", ()))
    ]
    future = ast.parse("from __future__ import annotations").body
    made: dict[str, Any] = {"__name__": path.stem, **vars(typing), **needed}
    exec(compile(ast.Module([*future, *kept], []), str(path), "exec"), made)
    return {name: made[name] for name in names}


def parameters_of(path: Path, owner: str, method: str) -> list[str]:
    """The parameters of a method, as the source has them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for one in node.body:
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == method:
                    return [argument.arg for argument in one.args.args]
    raise AssertionError(f"{path.name} has no {owner}.{method}")


def fits(ours: Any, theirs: Any) -> bool:
    """Whether ours takes every call that theirs takes."""
    mine = inspect.signature(ours).parameters.values()
    kinds = {one.kind for one in mine}
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        return True
    named = [one.name for one in mine]
    optional = {one.name for one in mine if one.default is not one.empty}
    wanted = inspect.signature(theirs).parameters.values()
    names = [
        one.name
        for one in wanted
        if one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds
    known = all(name in named or takes_more for name in names)
    return known and all(name in names or name in optional for name in named if name != "more")


# -- verl -----------------------------------------------------------------------------------------


@pytest.fixture
def verl(unpacked: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What verl's page makes, with verl's own classes under it."""
    folder = unpacked("verl", "0.9.1") / "verl/workers/rollout"
    pytest.importorskip("torch")
    base = classes(
        folder / "base.py",
        "BaseRollout",
        "_ROLLOUT_REGISTRY",
        ABC=abc.ABC,
        abstractmethod=abc.abstractmethod,
        omega_conf_to_dataclass=lambda given: given,
    )
    replica = classes(
        folder / "replica.py",
        *("TokenOutput", "RolloutMode", "RolloutReplica", "RolloutReplicaRegistry"),
        ABC=abc.ABC,
        abstractmethod=abc.abstractmethod,
        Enum=enum.Enum,
        BaseModel=pydantic.BaseModel,
    )
    module(monkeypatch, "ray")
    module(monkeypatch, "verl.workers.rollout.base", **base)
    module(monkeypatch, "verl.workers.rollout.replica", **replica)
    return base | replica | run_code("how-to/verl.md")


def test_verl_finds_the_glue_in_its_registries(verl: dict[str, Any]) -> None:
    assert verl["RolloutReplicaRegistry"].get("ray_rollout") is verl["Replica"]
    assert verl["_ROLLOUT_REGISTRY"]["ray_rollout", "async"] == "rollout_verl.Weights"


@pytest.mark.parametrize(
    ("ours", "theirs"), [("Replica", "RolloutReplica"), ("Weights", "BaseRollout")]
)
def test_verls_abstract_methods_are_there_with_their_parameters(
    verl: dict[str, Any], ours: str, theirs: str
) -> None:
    assert verl[theirs].__abstractmethods__
    assert not verl[ours].__abstractmethods__
    for name in verl[theirs].__abstractmethods__:
        assert fits(getattr(verl[ours], name), getattr(verl[theirs], name)), name


async def test_verls_token_output_comes_from_our_engines(
    verl: dict[str, Any], fakes: DeploymentHandle
) -> None:
    server = verl["Server"](response_length=5)
    # As AgentLoopWorker makes them.
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    output = await server.generate(
        request_id="a" * 32, prompt_ids=[1, 2], sampling_params=params | {"logprobs": True}
    )
    assert isinstance(output, verl["TokenOutput"])
    assert len(output.token_ids) == len(output.log_probs) == 5
    assert (output.stop_reason, output.extra_fields) == ("length", {"global_steps": 0})
    short = await server.generate([1, 2], params | {"max_tokens": 3}, "b" * 32, image_data=None)
    assert len(short.token_ids) == 3
    with pytest.raises(ValueError, match="image_data"):
        await server.generate([1], params, "c" * 32, image_data=["x"])


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A trainer of one rank."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors() -> Iterator[tuple[str, Any]]:
    """The weights of a trainer of the fakes' model."""
    import torch

    for one in DEFAULT_TENSORS:
        yield one.name, torch.full(one.shape, 2.0)


async def test_verls_verbs_release_memory_and_bring_new_weights(
    verl: dict[str, Any], fakes: DeploymentHandle, one_rank: None
) -> None:
    weights = verl["Weights"](None, None, None, replica_rank=0)
    policy = fakes["policy"]
    await weights.release()
    assert "offloaded" in {group.phase for group in policy.status().result(30).groups}
    # As ActorRolloutRefWorker.update_weights calls them.
    await weights.resume(tags=["weights"])
    with pytest.raises(ValueError, match="full weights"):
        await weights.update_weights(tensors(), peft_config={"r": 8}, global_steps=3)
    await weights.update_weights(tensors(), peft_config=None, base_sync_done=True, global_steps=3)
    await weights.resume(tags=["kv_cache"])
    assert policy.status().result(30).phase == "serving"
    params = {"temperature": 1.0, "max_tokens": 2}
    output = await verl["Server"](response_length=5).generate([1], params, "d" * 32)
    assert output.extra_fields == {"global_steps": 3}
    weights.pusher.close()


# -- SkyRL ----------------------------------------------------------------------------------------


@pytest.fixture
def skyrl(unpacked: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What SkyRL's page makes, with SkyRL's own module of its interface."""
    package = "skyrl.backends.skyrl_train.inference_servers"
    own_packages(monkeypatch, unpacked("skyrl", "0.3.0"), package)
    base = imported(monkeypatch, f"{package}.base")
    return {"base": base, **run_code("how-to/skyrl.md")}


def test_skyrls_abstract_methods_are_there_with_their_parameters(skyrl: dict[str, Any]) -> None:
    theirs, ours = skyrl["base"].InferenceEngineInterface, skyrl["Engines"]
    assert not ours.__abstractmethods__
    for name in theirs.__abstractmethods__ - {"model_name"}:
        assert fits(getattr(ours, name), getattr(theirs, name)), name


async def test_skyrls_output_comes_from_our_engines(
    skyrl: dict[str, Any], fakes: DeploymentHandle
) -> None:
    client = skyrl["Engines"]("runs/mine", "/models/policy")
    # As get_vllm_sampling_params makes them.
    params = {
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "logprobs": 1,
        "stop": None,
    }
    prompts = {"prompt_token_ids": [[1, 2], [3]], "session_ids": ["a", "b"]}
    output = await client.generate(prompts | {"sampling_params": params})
    assert set(output) == set(skyrl["base"].InferenceEngineOutput.__annotations__)
    assert output["stop_reasons"] == ["length"] * 2
    assert [len(row) for row in output["response_ids"]] == [4, 4]
    assert [len(row) for row in output["response_logprobs"]] == [4, 4]
    assert client.model_name == "/models/policy"
    assert client.get_endpoint_url() == fakes["policy"].url
    assert await client.get_world_size() == (3, 1)
    with pytest.raises(NotImplementedError, match="get_endpoint_url"):
        await client.chat_completion({})


async def test_skyrls_sleep_releases_the_memory_of_our_engines(
    skyrl: dict[str, Any], fakes: DeploymentHandle
) -> None:
    client = skyrl["Engines"]("runs/mine", "/models/policy")
    await client.sleep(level=1)
    with engines_of(fakes["policy"]) as engines:
        assert engines["shared-0"].requests("/release_memory_occupation")


def test_skyrls_hooks_have_the_parameters_of_its_source(
    unpacked: Callable[[str, str], Path], skyrl: dict[str, Any]
) -> None:
    root = unpacked("skyrl", "0.3.0") / "skyrl"
    ours = {
        (node.name, one.name): [argument.arg for argument in one.args.args]
        for node in ast.parse(code_of("how-to/skyrl.md", "py")).body
        if isinstance(node, ast.ClassDef)
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    worker = root / "backends/skyrl_train/workers/fsdp/fsdp_worker.py"
    entry, trainer = root / "train/entrypoints/main_base.py", root / "train/trainer.py"
    for (cls, method), path, owner in (
        (("PolicyWorker", "init_weight_sync_state"), worker, "FSDPPolicyWorkerBase"),
        (("PolicyWorker", "broadcast_to_inference_engines"), worker, "FSDPPolicyWorkerBase"),
        (("Trainer", "build_models"), trainer, "RayPPOTrainer"),
        (("Experiment", "get_inference_client"), entry, "BasePPOExp"),
    ):
        assert ours[cls, method] == parameters_of(path, owner, method), method
    assert parameters_of(entry, "BasePPOExp", "get_trainer")


async def test_skyrls_worker_pushes_its_weights(
    skyrl: dict[str, Any], fakes: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks over a double of SkyRL's worker, whose module needs Ray and a GPU."""
    folder = "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"
    pytest.importorskip("torch")
    module(monkeypatch, "ray")
    module(monkeypatch, folder, FSDPPolicyWorkerBase=type("FSDPPolicyWorkerBase", (), {}))
    module(monkeypatch, "skyrl.train.entrypoints.main_base", BasePPOExp=type("Base", (), {}))
    module(monkeypatch, "skyrl.train.trainer", RayPPOTrainer=type("RayPPOTrainer", (), {}))
    worker = run_code("how-to/skyrl.md", "py", **skyrl)["PolicyWorker"]()
    worker.model = SimpleNamespace(model=SimpleNamespace(state_dict=lambda: dict(tensors())))
    client = skyrl["Engines"]("runs/mine", "/models/policy")
    await worker.init_weight_sync_state(client, None)
    before = fakes["policy"].weight_version
    await client.sleep()
    await client.wake_up(tags=["weights"])
    await worker.broadcast_to_inference_engines(client, None)
    await client.wake_up(tags=["kv_cache"])
    status = fakes["policy"].status().result(30)
    assert (status.phase, status.weight_version) == ("serving", before + 1)
    worker.pusher.close()


# -- OpenRLHF -------------------------------------------------------------------------------------


async def test_a_judge_on_our_engines_scores_openrlhfs_samples(
    unpacked: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    fakes: DeploymentHandle,
) -> None:
    (root,) = unpacked("openrlhf", "0.11.2").glob("**/openrlhf/utils")
    own_packages(monkeypatch, root.parents[1], "openrlhf.utils")
    module(monkeypatch, "openrlhf.utils.logging_utils", init_logger=lambda name: SimpleNamespace())
    agent = imported(monkeypatch, "openrlhf.utils.agent")
    executor = run_code("how-to/names.md", "py")["AgentExecutor"]()
    assert isinstance(executor, agent.AgentExecutorBase)
    asked = []

    class Engine:
        """A double of OpenRLHF's vLLM actor."""

        async def generate(self, prompt_token_ids: list[int], *given: Any, **more: Any) -> Any:
            asked.append(prompt_token_ids)
            output = SimpleNamespace(token_ids=[7, 8], finish_reason="stop", logprobs=None)
            return SimpleNamespace(outputs=[output])

    class Tokenizer:
        def __call__(self, text: str, **more: Any) -> Any:
            ids = SimpleNamespace(tolist=lambda: list(text.encode()))
            return {"input_ids": [ids]}

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    params = SimpleNamespace(max_tokens=2, logprobs=None)
    output = await executor.execute("hi", "", params, 64, Tokenizer(), Engine())
    assert asked == [[*b"hi"]]
    assert output["observation_tokens"] == [*b"hi", 7, 8]
    assert output["reward"] == output["scores"] == 0.0  # a fake's text is not yes
    with engines_of(fakes["policy"]) as engines:
        assert sum(len(one.requests("/generate")) for one in engines.values()) == 1
