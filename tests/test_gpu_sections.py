"""``.ci/gpu.py``: the bundle holds what a machine lacks, and no section stops those after it."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.support.processes import importing_us, wait_until

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci/gpu.py"
IMAGE = "Packages: numpy, torch, transformers, httpx."


@pytest.fixture(scope="module", autouse=True)
def on_path() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(scope="module")
def gpu_bundle(on_path: None) -> ModuleType:
    return importlib.import_module("gpu_bundle")


@pytest.fixture(scope="module")
def gpu_sections(on_path: None) -> ModuleType:
    return importlib.import_module("gpu_sections")


# -- which sections there are ------------------------------------------------------------------


def test_each_test_for_a_gpu_is_in_a_section(gpu_sections: Any) -> None:
    marks = re.compile(r"mark\.gpu\b|gpu\.machine import .*\b(Gpu|devices|with_engines)\b")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text())]
    of_gpus = {str(path.relative_to(ROOT)) for path in files}
    of_gpus -= {str(Path(__file__).relative_to(ROOT)), "tests/gpu/test_machine.py"}
    named = [word for one in gpu_sections.SECTIONS for word in one.arguments if "test_" in word]
    assert set(named) == of_gpus


def test_each_family_of_figures_is_in_one_section(gpu_sections: Any) -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu.__main__ import FAMILIES

    words = [one.arguments for one in gpu_sections.SECTIONS if one.is_benchmark]
    named = [family for one in words for family in one[one.index("--families") + 1 :]]
    assert sorted(named) == sorted(FAMILIES)


def test_the_documentation_has_the_limits_of_each_section(gpu_sections: Any) -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert rows == [
        (one.name, str(one.limit_s), str(one.expected_s)) for one in gpu_sections.SECTIONS
    ]


def test_what_comes_first_is_shown_in_the_time_of_a_command(gpu_sections: Any) -> None:
    """The limit of a command is ten minutes, and eight with its transfers."""
    expected, names = 0.0, []
    for one in gpu_sections.SECTIONS:
        expected += one.expected_s
        if expected <= 465:
            names.append(one.name)
    assert {"nccl", "bench-0.6b", "sglang", "bench-8b", "bench-saver"} <= set(names)


# -- how they are run ----------------------------------------------------------------------------

# A process of an engine, under our guard, and one that has left its session; then a hang that
# hears no SIGINT, as in a call of CUDA.
HANGS = """
import asyncio, pathlib, signal, subprocess, sys
from engines.process.engine_process import EngineProcess

async def main():
    engine = await EngineProcess.spawn(["sleep", "600"], log_path=pathlib.Path("engine.log"))
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("pids").write_text(f"{engine.pid} {orphan.pid}")
    print('{"row": 1}', flush=True)

asyncio.run(main())
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pause()
"""
RUNNER = """
import sys, time
from pathlib import Path
import gpu_sections
from gpu_sections import Run, Section

gpu_sections._STACK_S = gpu_sections._AFTER_END_S = 1.5
sections = eval(sys.argv[1])
sys.exit(Run(Path.cwd(), Path("out"), None).all(sections, time.monotonic() + float(sys.argv[2])))
"""


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(SCRIPT.parent), importing_us()["PYTHONPATH"]])
    return importing_us(PYTHONPATH=path, TMPDIR=str(folder))


def run(folder: Path, sections: str, seconds: float = 60.0) -> tuple[int, str]:
    """A run of sections in a process of its own, which becomes the parent of all orphans."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, sections, str(seconds)],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/summary.jsonl").read_text().splitlines()]


def test_a_section_that_hangs_ends_with_its_engines_and_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    hangs = "Section('hangs', ('hangs.py', 'benchmarks.gpu'), 3, 1)"
    after = "Section('after', ('-c', 'print(\"here\")'), 30, 1)"
    status, told = run(tmp_path, f"[{hangs}, {after}]")
    first, second = results(tmp_path)
    assert first["status"] == "ended"
    assert first["left"] == ["sleep 600"], "the guard ends engines; the orphan had none"
    assert second == {"section": "after", "status": 0, "seconds": second["seconds"], "says": "here"}
    assert status == 1
    assert "left behind, and ended: sleep 600" in told
    for pid in (tmp_path / "pids").read_text().split():
        assert not psutil.pid_exists(int(pid))
    log = (tmp_path / "out/log.txt").read_text()
    assert "Fatal Python error: Aborted" in log
    assert 'hangs.py", line' in log, "the stack of the hang"
    assert (tmp_path / "out/rows.jsonl").read_text() == '{"row": 1}\n'


def test_a_section_without_enough_time_is_not_begun_and_is_named(tmp_path: Path) -> None:
    short = "Section('short', ('-c', ''), 30, 1)"
    long = "Section('long', ('-c', 'raise SystemExit(3)'), 600, 500)"
    status, told = run(tmp_path, f"[{short}, {long}]", seconds=30)
    assert [one["status"] for one in results(tmp_path)] == [0, "not begun"]
    assert status == 0
    assert "not begun, for lack of time: --only long" in told


@pytest.mark.parametrize(
    "sections",
    [
        "[]",
        "[Section('failed', ('-c', 'raise SystemExit(1)'), 30, 1)]",
        "[Section('late', ('-c', ''), 600, 500)]",
    ],
    ids=["none", "failed", "not-begun"],
)
def test_a_run_that_has_shown_nothing_has_failed(tmp_path: Path, sections: str) -> None:
    status, told = run(tmp_path, sections, seconds=20)
    assert status == 1
    assert "this run has shown nothing" in told


def test_without_a_gpu_nothing_is_begun_after_the_first_section(
    gpu_sections: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_sections, "adopt_orphans", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    warm = gpu_sections.Section("warm", ("-c", "raise SystemExit('no CUDA')"), 30, 1)
    monkeypatch.setattr(gpu_sections, "WARM", warm)
    after = gpu_sections.Section("after", ("-c", ""), 30, 1)
    one = gpu_sections.Run(ROOT, tmp_path / "out", None)
    assert one.all([warm, after], time.monotonic() + 60) == 1
    assert [row["says"] for row in results(tmp_path)] == ["no CUDA"]


def test_a_run_that_is_killed_leaves_what_was_measured_and_no_process(tmp_path: Path) -> None:
    waits = "print('{\"row\": 2}', flush=True); import signal; signal.pause()"
    section = f"[Section('waits', ('-c', {waits!r}), 60, 1)]"
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, section, "60"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    log = tmp_path / "out/log.txt"
    assert wait_until(lambda: log.is_file() and '{"row": 2}' in log.read_text(), 60)
    (section,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    psutil.wait_procs([section], timeout=20)
    assert not section.is_running()


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(300)
def test_sections_run_on_a_logical_gpu(tmp_path: Path) -> None:
    """Tests and figures, with the packages of this interpreter; SGLang's: tests/gpu."""
    command = [sys.executable, SCRIPT, "run", "--rehearse", "--out", tmp_path / "out"]
    done = subprocess.run(
        [*command, "--only", "warm", "facts", "bench-0.6b"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(one["section"], one["status"]) for one in results(tmp_path)] == [
        *(("warm", 0), ("facts", 0), ("bench-0.6b", 0))
    ]
    figures = [json.loads(one) for one in (tmp_path / "out/figures.jsonl").read_text().splitlines()]
    assert {"facts cpu", "memory by uuid cpu"} <= {one["test"] for one in figures}
    rows = [json.loads(one) for one in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert {"gpu.limits", "gpu.qwen3-0.6b.sync"} <= {name for row in rows for name in row}


# -- the bundle ----------------------------------------------------------------------------------


def test_the_bundle_has_what_the_machine_lacks(gpu_bundle: Any) -> None:
    names = gpu_bundle.missing(ROOT, gpu_bundle.packages_of(IMAGE))
    assert {"pytest", "fastapi", "uvicorn", "torch-memory-saver"} <= {
        one.partition("==")[0] for one in names
    }
    has = ("torch==", "httpx==", "sglang==", "transformers==")
    assert not [name for name in names if name.startswith(has)]


def test_a_text_without_a_package_is_refused_and_one_of_pip_is_read(gpu_bundle: Any) -> None:
    assert gpu_bundle.packages_of("Foo_Bar==1.0\nbaz==2\n") == {"foo-bar", "baz"}
    with pytest.raises(SystemExit, match="names no package: give it the output of `pip freeze`"):
        gpu_bundle.packages_of("nothing here")


def wheel(path: Path, *files: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, file)


def test_a_bundle_is_pruned_has_the_hooks_and_is_unpacked_once(
    gpu_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(_root: Path, wheels: Path, names: list[str], python: str) -> None:
        assert python == "3.12"
        assert "pytest-timeout" in " ".join(names)
        kept, pruned = "sglang/srt/server_args.py", "sglang/multimodal_gen/large.py"
        wheel(wheels / "sglang-1-py3-none-any.whl", kept, pruned)
        wheel(wheels / "one-1-py3-none-any.whl", "one-1.data/purelib/one/__init__.py")

    monkeypatch.setattr(gpu_bundle, "download", download)
    (tmp_path / "has.txt").write_text(IMAGE)
    bundle = tmp_path / "made/bundle.tar.xz"
    gpu_bundle.make(ROOT, bundle, tmp_path / "has.txt", "3.12")
    site = gpu_bundle.unpack(bundle)
    found = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    assert {"sglang/srt/server_args.py", "one/__init__.py", "sitecustomize.py"} <= found
    assert "sgl_kernel/__init__.py" in found
    assert not [name for name in found if "multimodal_gen" in name]
    assert not list(site.glob("*.data"))
    (site / "one/__init__.py").write_text("changed")
    assert gpu_bundle.unpack(bundle) == site
    assert (site / "one/__init__.py").read_text() == "changed"
    with tarfile.open(bundle, "w:xz") as archive:
        archive.add(tmp_path / "has.txt", arcname="site/other.txt")
    assert gpu_bundle.unpack(bundle) != site, "of another content"


def test_without_the_bundle_the_run_says_how_it_is_made(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "run", "--bundle", "no.tar.xz", "--out", tmp_path / "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no.tar.xz: no such file; `python .ci/gpu.py bundle" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_copies_are_compiled_where_there_is_a_compiler_and_else_it_is_said(
    gpu_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "_bulk.abi3.so"
    assert gpu_bundle.compile_bulk(ROOT, target) == "engines/tensors/_bulk.c is compiled"
    assert ctypes.CDLL(str(target)).bulk_kind() >= 0
    monkeypatch.setenv("PATH", str(tmp_path))
    told = gpu_bundle.compile_bulk(ROOT, tmp_path / "other.so")
    assert "is not compiled, there is no compiler: pushes through host memory take" in told
    assert not (tmp_path / "other.so").exists()
