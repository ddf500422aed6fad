"""What the other tests here stand on: few packages, and one file of figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

from tests.support.gpu.figures import FILE_VARIABLE, record
from tests.support.gpu.machine import bytes_to_host, collect_handles
from tests.support.processes import importing_us

ROOT = Path(__file__).parents[2]
# What such a machine has; the rest comes from the folder of wheels.
OF_MACHINE = ("torch", "transformers", "pip", "setuptools")
OF_TESTS = (
    "httpx",
    "hypothesis",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "torch-memory-saver",
)
# What section 14 of the design asks for, by the beginnings of the tests' names.
SECTIONS = {
    "test_facts.py": ("the_machine", "a_tensor_is_shared", "our_figure"),
    "test_saver.py": ("two_regions",),
    "test_embedded.py": (
        *("a_step_lends", "an_offload_frees", "weights_are_poisoned", "without_room"),
        *("an_engine_killed_while_serving", "an_engine_killed_while_offloaded"),
    ),
    "test_push.py": ("the_engine_holds", "wider_floats", "many_pushes", "a_push_by_ipc", "nccl"),
    "test_ipc_format.py": ("every_rank_opens", "a_process_that_sees"),
    "test_ranks.py": ("shards_of_all_ranks",),
    "test_fingerprint.py": ("cpu_and_gpu_agree", "it_reads_as_fast", "the_checksum"),
    "test_environment.py": ("an_engine_comes_up", "a_killed_process"),
    "test_nccl.py": ("a_group_of_its_own",),
    "test_sglang.py": ("a_push_is", "a_step_frees", "other_weights", "its_logprobs"),
}
BLOCKER = """
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec

def without_blocked(_, name, path=None, target=None):
    return None if name.partition(".")[0] in {blocked!r} else find_spec(name, path, target)

PathFinder.find_spec = classmethod(without_blocked)
"""


def needed() -> set[str]:
    """Distributions that such a machine has, or gets from the wheels."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    left = [*OF_MACHINE, *OF_TESTS, *map(_name, project["dependencies"])]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # of another platform
        left += [_name(one) for one in requires if "extra ==" not in one]
    return found


def _name(requirement: str) -> str:
    (name,) = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
@pytest.mark.embedded
def test_collecting_imports_nothing_that_the_machine_lacks(tmp_path: Path) -> None:
    has = needed()
    assert not has & {"ray", "sglang", "accelerate"}
    blocked = {
        module
        for module, owners in packages_distributions().items()
        if not {_name(owner) for owner in owners} & has and module not in ("rollout", "engines")
    }
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]  # the only ones there
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", *plugins),
            *("-m", "gpu", "--collect-only", "tests/gpu"),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file, tests in SECTIONS.items():
        for test in tests:
            assert f"tests/gpu/{file}::test_{test}" in done.stdout


@pytest.mark.slow
@pytest.mark.embedded
def test_a_run_for_the_gpu_that_used_none_has_failed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_facts.py"],
        cwd=ROOT,
        env=importing_us(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert "tests for a GPU none was run and passed" in done.stdout


@pytest.mark.slow
def test_skipped_tests_for_the_gpu_are_a_failed_run(tmp_path: Path) -> None:
    tests = "import pytest\ndef test_without_the_gpu(): pass\n@pytest.mark.gpu\n"
    tests += "@pytest.mark.skipif({}, reason='not there')\ndef test_one(): pass\n"
    folder = tmp_path / "gpu"
    folder.mkdir()
    (folder / "conftest.py").write_text((ROOT / "tests/gpu/conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for is_skipped, status in ((True, 1), (False, 0)):
        (folder / "test_it.py").write_text(tests.format(is_skipped))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
            cwd=tmp_path,
            env=importing_us(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == status, done.stdout + done.stderr


def test_copies_to_the_host_are_counted_by_what_the_profiler_writes() -> None:
    """The form of Kineto's ``output_json.cpp``; ``KinetoEvent.nbytes`` is 0 for copies."""
    copy = {"ph": "X", "cat": "gpu_memcpy", "args": {"device": 0, "stream": 7, "bytes": 4096}}
    others = ["Memcpy HtoD (Pageable -> Device)", "Memcpy DtoD (Device -> Device)"]
    names = ["Memcpy DtoH (Device -> Pageable)", "Memcpy DtoH (Device -> Pinned)", *others]
    events: list[dict[str, object]] = [{**copy, "name": name} for name in names]
    events += [{"ph": "M", "args": {"name": "python"}}, {"ph": "X", "name": "cudaMemcpyAsync"}]
    assert bytes_to_host({"traceEvents": events}) == 2 * 4096


def test_handles_that_a_process_still_uses_are_an_error_and_not_left_behind(tmp_path: Path) -> None:
    counters = tmp_path / f"torch_{os.getpid()}_1_0"
    (tmp_path / "torch_1_2_0").touch()  # of another process
    counters.touch()
    collected = iter([lambda: None, lambda: None, counters.unlink])
    collect_handles(lambda: next(collected)(), folder=tmp_path)
    counters.touch()
    with pytest.raises(pytest.fail.Exception, match=counters.name):
        collect_handles(lambda: None, timeout_s=0.2, folder=tmp_path)


def test_figures_of_all_tests_are_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "figures.json"))
    record("saver", seconds=2.0, num_bytes=4 << 30)
    record("facts", driver="1.2")
    lines = (tmp_path / "figures.json").read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"test": "saver", "seconds": 2.0, "num_bytes": 4 << 30, "gib_per_s": 2.0},
        {"test": "facts", "driver": "1.2"},
    ]
    assert "saver: seconds 2, num_bytes 4294967296, gib_per_s 2\n" in capsys.readouterr().out
