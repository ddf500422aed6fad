"""The distribution of the plugin for vLLM has what the plugin imports, and installs beside vLLM."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.vllm_plugin import registration

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "tools/vllm_plugin_dist/pyproject.toml"
# What vLLM loads of us: the plugin and the check of keys (engines/vllm/command.py).
ROOTS = [
    *(f"engines.vllm_plugin.{path.stem}" for path in (ROOT / "engines/vllm_plugin").glob("*.py")),
    "engines.http.key_check",
]


def settings(path: Path) -> dict:
    return tomllib.loads(path.read_text())


def file_of(module: str) -> Path | None:
    path = ROOT / module.removesuffix(".__init__").replace(".", "/")
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needed() -> tuple[set[str], set[str]]:
    """Modules of ours, packages with ``__init__``; and the names of other packages."""
    ours, others, new = set[str](), set[str](), list(ROOTS)
    while new:
        name = new.pop()
        file = file_of(name)
        module = name.removesuffix(".__init__")
        module += ".__init__" if file is not None and file.name == "__init__.py" else ""
        if not name.startswith("engines"):
            others.add(name.partition(".")[0])
        elif file is not None and module not in ours:
            ours.add(module)
            parts = name.split(".")
            new += [".".join(parts[:length]) for length in range(1, len(parts))]
            new += imported(file)
    return ours, others - set(sys.stdlib_module_names)


def test_it_has_exactly_the_modules_that_vllm_loads_and_their_packages() -> None:
    project, (ours, others) = settings(PROJECT), needed()
    assert project["tool"]["setuptools"]["py-modules"] == sorted(ours)
    brought = {text.partition(">=")[0] for text in project["project"]["dependencies"]}
    assert others - brought == {"torch", "numpy", "vllm"}
    assert brought <= others


def test_version_python_entry_point_and_bounds_are_those_of_the_main_distribution() -> None:
    plugin, main = settings(PROJECT)["project"], settings(ROOT / "pyproject.toml")["project"]
    for name in ("version", "requires-python", "license", "authors", "entry-points"):
        assert plugin[name] == main[name]
    assert set(plugin["dependencies"]) <= set(main["dependencies"])


def test_files_of_two_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"ray-rollout": "0.1.0", "ray-rollout-vllm": "0.1.0"}
    monkeypatch.setattr(registration, "version", versions.__getitem__)
    registration.check_versions()
    versions["ray-rollout-vllm"] = "0.2.0"
    with pytest.raises(RuntimeError, match=r"0.1.0 and ray-rollout-vllm 0.2.0 are installed"):
        registration.check_versions()


BESIDE_VLLM = """
from pathlib import Path
import engines, vllm.plugins
vllm.plugins.load_general_plugins()
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
import engines.vllm_plugin.worker, engines.vllm_plugin.shm_transfer, engines.http.key_check
print(Path(engines.__file__).parents[1], "rollout_shm" in WeightTransferEngineFactory._registry)
"""


@pytest.mark.vllm
def test_real_vllm_loads_the_wheel(tmp_path: Path) -> None:
    from tests.support.cpu_engines import install

    python = install.python_of("vllm")
    copy = tmp_path / "source"
    for name in ("engines", "tools/vllm_plugin_dist"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [python, "-m", "pip"]
    make = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*pip, *make, copy / "tools/vllm_plugin_dist"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "target"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    shims, _ = install.variables_of("vllm")["PYTHONPATH"].split(os.pathsep)
    path = os.pathsep.join([str(target), shims])
    env = os.environ | install.variables_of("vllm") | {"PYTHONPATH": path}
    command = [python, "-P", "-c", BESIDE_VLLM]
    printed = subprocess.run(
        command, env=env, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=110
    ).stdout
    assert printed.splitlines()[-1] == f"{target} True"
