"""What ``make dist`` builds can be installed into an empty environment, and works there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".git",
    ".venv*",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "runs",
)

# An offload and an onload of two engines, without torch.
CYCLE = """
from pathlib import Path
import rollout
from engines.fake import write_checkpoint
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.shared_memory import ByPath

write_checkpoint(Path("model"))
groups = {"main": {"num_engines": 2, "engine": {"kind": "fake"}}}
servers = {"policy": {"model_path": "model", "groups": groups}}
with rollout.launch(rollout.RolloutConfig.from_dict({"servers": servers})) as deployment:
    deployment.offload().result()
    folder = str(Path("model").absolute())
    push = WeightPush(1, read_checkpoint_manifest("model"), [{"path": folder}], ByPath())
    deployment.push({"policy": push}).result()
    status = deployment["policy"].status().result()
    print(status.weight_version, status.phase)
"""

# vLLM's own refuses a name that it has, as this one.
FACTORY = """
class WeightTransferEngineFactory:
    registry = {}
    @classmethod
    def register_engine(cls, name, module, class_name):
        if name in cls.registry:
            raise ValueError(name)
        cls.registry[name] = module, class_name
"""
REGISTERED = """
from importlib.metadata import entry_points
import engines.http.key_check
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
(plugin,) = entry_points(group="vllm.general_plugins")
plugin.load()()
plugin.load()()
((name, place),) = WeightTransferEngineFactory.registry.items()
print(name, *place)
"""


def run(*command: object, folder: Path, status: int = 0) -> str:
    # Not this environment's packages, and not the checkout's.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stderr if status else done.stdout


def python_versions() -> dict[str, Path]:
    """The oldest and the newest Python here that are supported."""
    spec = spec_from_file_location("pythons", ROOT / ".ci/pythons.py")
    assert spec
    assert spec.loader
    pythons: Any = module_from_spec(spec)
    spec.loader.exec_module(pythons)
    paths = {pythons.ask_version(path): path for path in pythons.candidates(dict(os.environ))}
    versions = pythons.usable({*paths, sys.version_info[:3]})
    paths[sys.version_info[:3]] = Path(sys.executable)
    return {"oldest": paths[versions[0]], "newest": paths[versions[-1]]}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the source distribution, built from a copy of this folder."""
    copy = tmp_path_factory.mktemp("dist") / "source"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    run("make", "dist", f"PYTHON={sys.executable}", folder=copy)
    names = sorted(path.name for path in (copy / "dist").iterdir())
    assert len(names) == 3, names
    patterns = {"wheel": "ray_rollout-*.whl", "source": "*.tar.gz", "plugin": "*_vllm-*.whl"}
    files = {kind: list((copy / "dist").glob(pattern)) for kind, pattern in patterns.items()}
    return {kind: path for kind, (path,) in files.items()}


def test_one_wheel_is_for_every_python_and_every_linux_of_ten_years(built: dict[str, Path]) -> None:
    name = built["wheel"].name
    assert "-cp311-abi3-manylinux" in name
    assert "_2_17_" in name
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = wheel.namelist()
    assert "engines/tensors/_bulk.abi3.so" in names
    assert "rollout/observability/page/static/index.html" in names
    aside = ("tests/", "examples/", "benchmarks/", "tools/")
    assert not [name for name in names if name.startswith(aside)]


def test_the_description_has_no_links_into_the_repository(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        description = wheel.read("ray_rollout-0.1.0.dist-info/METADATA").decode()
    assert "Description-Content-Type: text/markdown" in description
    assert "errors (`docs/failures.md`)" in description
    assert re.findall(r"\]\((?!https?:).*", description) == []


def test_the_source_distribution_tests_itself(built: dict[str, Path], tmp_path: Path) -> None:
    """With this environment's packages, but its own code."""
    with tarfile.open(built["source"]) as source:
        source.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    where = "import rollout, engines; print(rollout.__file__, engines.__file__)"
    printed = run(sys.executable, "-c", where, folder=folder)
    assert printed.count(str(folder)) == 2
    tests = ("tests/test_workflows.py", "tests/rollout/rules/test_lifecycle.py")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, folder=folder)


def test_the_source_distribution_has_its_tests_and_examples(built: dict[str, Path]) -> None:
    with tarfile.open(built["source"]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"Makefile", "constraints.txt", "tests/conftest.py", "examples/grpo.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize(("kind", "age"), [("wheel", "oldest"), ("source", "newest")])
def test_it_works_in_an_empty_environment(
    built: dict[str, Path], tmp_path: Path, kind: str, age: str
) -> None:
    run(python_versions()[age], "-m", "venv", "env", folder=tmp_path)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", built[kind], folder=tmp_path)
    run(python, "-m", "pip", "check", folder=tmp_path)
    assert run(python.with_name("rollout"), "--version", folder=tmp_path).strip() == "0.1.0"
    code = "import rollout, engines, time; print(rollout.__file__, time.process_time())"
    path, cpu_s = run(python, "-c", code, folder=tmp_path).split()
    assert path.startswith(str(tmp_path))
    assert float(cpu_s) < 0.5
    (tmp_path / "cycle.py").write_text(CYCLE)
    assert run(python, "cycle.py", folder=tmp_path).split() == ["1", "serving"]
    assert python.with_name("py-spy").exists()  # of `rollout doctor`
    refused = run(python.with_name("rollout"), "quickstart", folder=tmp_path, status=2)
    assert "the quickstart needs torch" in refused
    assert "pip install 'jinja2>=3.1'" in refused


def test_the_plugin_of_vllm_brings_two_packages_and_is_found(
    built: dict[str, Path], tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "env", folder=tmp_path)
    python = tmp_path / "env/bin/python"
    site = tmp_path / "env/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", built["plugin"], folder=tmp_path)
    listed = json.loads(run(*pip, "list", "--format", "json", folder=tmp_path))
    assert {one["name"] for one in listed} == {"ray-rollout-vllm", "orjson", "xxhash"}
    factory = site / "vllm/distributed/weight_transfer/factory.py"
    factory.parent.mkdir(parents=True)
    factory.write_text(FACTORY)
    printed = run(python, "-c", REGISTERED, folder=tmp_path)
    assert printed.split() == ["rollout_shm", "engines.vllm_plugin.shm_transfer", "ShmTransfer"]
    # Where the main wheel is, too, in another version, the files are of one of them.
    (site / "ray_rollout-9.9.dist-info").mkdir()
    (site / "ray_rollout-9.9.dist-info/METADATA").write_text("Name: ray-rollout\nVersion: 9.9\n")
    refused = run(python, "-c", REGISTERED, folder=tmp_path, status=1)
    assert "ray-rollout 9.9 and ray-rollout-vllm 0.1.0 are installed beside vLLM" in refused


def needed_by(extras: Sequence[str]) -> dict[str, metadata.Distribution]:
    """The packages of this environment that ray-rollout with these extras needs, by name."""
    found: dict[str, metadata.Distribution] = {}
    seen = set[tuple[str, str]]()
    new = [("ray-rollout", extra) for extra in ("", *extras)]
    while new:
        name, extra = new.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        one = found.setdefault(name, metadata.distribution(name))
        for text in one.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                new += [(canonicalize_name(needed.name), more) for more in ("", *needed.extras)]
    del found["ray-rollout"]
    return found


def test_the_quickstart_runs_from_a_wheel_with_its_extras_alone(
    built: dict[str, Path], tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    python = tmp_path / "env/bin/python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", built["wheel"], folder=tmp_path)
    check_quickstart(tmp_path, ["embedded", "examples"])
    model = "runs/colocated_grpo/model-1"
    check_quickstart(tmp_path, ["ray", "embedded", "examples"], "--model", model)


def check_quickstart(folder: Path, extras: Sequence[str], *options: str) -> None:
    """With the packages of these extras, and of those before."""
    python = folder / "env/bin/python"
    # Links to packages of this environment, which take the place of gigabytes of downloads.
    (site_packages,) = (folder / "env/lib").glob("python*/site-packages")
    for one in needed_by(extras).values():
        for top in {path.parts[0] for path in one.files or []} - {"..", "__pycache__"}:
            if not (link := site_packages / top).exists():
                link.symlink_to(Path(str(one.locate_file(top))))
    run(python, "-m", "pip", "check", folder=folder)
    has_ray = "import importlib.util; print(bool(importlib.util.find_spec('ray')))"
    assert run(python, "-c", has_ray, folder=folder).strip() == str("ray" in extras)
    how = ("--steps", "1", "--prompts", "4", *options)
    printed = run(python.with_name("rollout"), "quickstart", *how, folder=folder)
    assert "accuracy" in printed
    plan, serve = (line.strip() for line in printed.splitlines()[-2:])
    assert plan.startswith("env/bin/rollout plan runs/colocated_grpo/rollout.yaml")
    assert serve.startswith("env/bin/rollout serve runs/colocated_grpo/rollout.yaml")
    assert "needs 2 CPU" in run("sh", "-c", plan, folder=folder)
    figures = json.loads((folder / "runs/colocated_grpo/colocated_grpo.json").read_text())
    assert len(figures["steps"]) == 1
