"""The sections of a run on a GPU: what each shows, how long it may take, and how they are run.

A section is a process with a limit of its own: one that hangs, also inside a call of CUDA, is ended
with all that it started, and the next begins.  What it finds is in the folder of the run at once:
``summary.jsonl`` has a line per section, ``figures.jsonl`` what the tests measured, ``rows.jsonl``
what the benchmarks measured, ``log.txt`` all output, ``engines.txt`` the logs of engines.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TESTS = ("-m", "pytest", "-s", "-q", "-p", "no:cacheprovider")
# What a version of torch calls deprecated that CI has not seen is no error there.
_OF_GPU = ("-W", "default", "-m", "gpu")
_OF_REHEARSAL = ("-m", "not gpu and not vllm and not chaos")
_BENCHMARK = ("-m", "benchmarks.gpu")
_WARM = """
import time; t = time.monotonic()
import torch
print("torch", torch.__version__, torch.version.cuda, f"{time.monotonic() - t:.1f} s", flush=True)
torch.cuda.init(); x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print(f"context after {time.monotonic() - t:.1f} s", torch.cuda.mem_get_info(), flush=True)
(x @ x).sum().item(); print(f"product after {time.monotonic() - t:.1f} s", flush=True)
import transformers, fastapi, pydantic, uvicorn, torch_memory_saver
print("transformers", transformers.__version__, f"{time.monotonic() - t:.1f} s", flush=True)
print(torch.cuda.get_device_properties(0))
"""
_WARM_REHEARSAL = "import torch, transformers, fastapi, uvicorn; print('torch', torch.__version__)"
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)  # made before a fork, after which little may be called
_STACK_S, _END_S = 4.0, 5.0
# Engines end with their guard; what is there after that has been lost by it.
_AFTER_END_S = 15.0
_MOST_LOG = 300_000


@dataclass(frozen=True)
class Section:
    """Arguments of the interpreter, seconds it may take, and those it should take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    expected_s: float

    @property
    def has_tests(self) -> bool:
        return "pytest" in self.arguments

    @property
    def is_benchmark(self) -> bool:
        return "benchmarks.gpu" in self.arguments


def _tests(name: str, *files: str, limit_s: float, expected_s: float, only: str = "") -> Section:
    chosen = ("-k", only) if only else ()
    return Section(name, (*_TESTS, *chosen, *files), limit_s, expected_s)


def _benchmark(name: str, *families: str, limit_s: float, expected_s: float) -> Section:
    # Its own limit comes first, so that its last rows are complete.
    budget = ("--seconds", str(int(limit_s - 15)))
    return Section(name, (*_BENCHMARK, *budget, "--families", *families), limit_s, expected_s)


_GPU = "tests/gpu/test_"
WARM = Section("warm", ("-c", _WARM), 90, 20)
SECTIONS = (
    WARM,
    _tests("facts", f"{_GPU}facts.py", limit_s=70, expected_s=20),
    _tests("saver", f"{_GPU}saver.py", limit_s=80, expected_s=40),
    _tests(
        "ipc",
        f"{_GPU}ipc_format.py",
        f"{_GPU}fingerprint.py",
        "tests/engines/tensors/test_torch_fingerprint.py",
        limit_s=90,
        expected_s=45,
    ),
    _tests(
        "nccl",
        f"{_GPU}nccl.py",
        "tests/engines/embedded/weights/test_broadcast_receiver.py",
        "tests/rollout/weights/tensors/test_flat_buffers.py",
        limit_s=60,
        expected_s=20,
    ),
    _benchmark("bench-0.6b", "limits", "qwen3-0.6b", limit_s=120, expected_s=60),
    _tests("sglang", f"{_GPU}sglang.py", limit_s=170, expected_s=100, only="not graphs"),
    _benchmark("bench-8b", "qwen3-8b", limit_s=130, expected_s=80),
    _benchmark("bench-saver", "saver", limit_s=80, expected_s=45),
    # What a second command does.
    _benchmark("bench-sglang", "sglang", limit_s=150, expected_s=90),
    _tests("push", f"{_GPU}push.py", limit_s=110, expected_s=70, only="not many"),
    _tests("embedded", f"{_GPU}embedded.py", limit_s=110, expected_s=70),
    _tests("sglang-graphs", f"{_GPU}sglang.py", limit_s=150, expected_s=100, only="graphs"),
    _benchmark("bench-sglang-8b", "sglang-8b", limit_s=150, expected_s=110),
    _tests("environment", f"{_GPU}environment.py", limit_s=110, expected_s=80),
    _tests("ranks", f"{_GPU}ranks.py", limit_s=60, expected_s=40),
    _tests("many", f"{_GPU}push.py", limit_s=150, expected_s=130, only="many"),
    _benchmark("bench-30b-a3b", "qwen3-30b-a3b", limit_s=200, expected_s=150),
)


@dataclass(frozen=True)
class Result:
    """How a section ended: its exit status, or why it has none."""

    section: str
    status: int | str
    seconds: float
    says: str
    left: tuple[str, ...] = ()

    @property
    def is_failure(self) -> bool:
        return (self.status != 0 and self.status != NOT_BEGUN) or bool(self.left)


NOT_BEGUN = "not begun"


@dataclass
class Run:
    """One run of sections.

    Args:
        out: gets the files.
        site: the packages of a bundle; None to use those of this interpreter.
        is_rehearsal: on a logical GPU.
    """

    root: Path
    out: Path
    site: Path | None
    is_rehearsal: bool = False
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-run-"))
        self.environment = self._environment()

    def all(self, sections: Sequence[Section], deadline: float) -> int:
        """Run them until ``deadline`` (``time.monotonic``); the exit status of the run.

        It is 0 if none failed and one with tests or a benchmark was run.
        """
        adopt_orphans()
        results = []
        self._describe()
        compiling = self._compile()
        try:
            for section in sections:
                results.append(self._begin(section, deadline))
                self._note(results[-1])
                if section == WARM and results[-1].is_failure:
                    print("nothing can run here: stopped, to keep the time of the device")
                    break
        finally:
            if compiling is not None:
                compiling.kill()
                compiling.wait()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._show(results)
        shown = [one for one in results if one.section != WARM.name and one.status == 0]
        if not shown:
            print("no section with tests or figures has passed: this run has shown nothing")
        return int(not shown or any(one.is_failure for one in results))

    def _begin(self, section: Section, deadline: float) -> Result:
        left_s = deadline - time.monotonic()
        if left_s < min(0.7 * section.expected_s, section.limit_s):
            return Result(section.name, NOT_BEGUN, 0.0, f"{left_s:.0f} s were left")
        # Triton's interpreter and two cores take longer than a GPU.
        limit_s = min(section.limit_s * (3 if self.is_rehearsal else 1), left_s)
        print(f"== {section.name}, at most {limit_s:.0f} s", flush=True)
        return self.one(section, limit_s)

    def one(self, section: Section, limit_s: float) -> Result:
        """Run a section; it and all that it started have ended."""
        log = self.out / "log.txt"
        before = children_of(os.getpid())
        with log.open("ab") as output:
            output.write(f"\n\n===== {section.name}, at most {limit_s:.0f} s\n".encode())
            output.flush()
            start = output.tell()
            began = time.monotonic()
            process = subprocess.Popen(
                self.command(section),
                cwd=self.root,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_the_run,
            )
            status = _wait(process, limit_s)
            seconds = time.monotonic() - began
        left = end_what_is_left(before, _AFTER_END_S)
        self._keep_engine_logs(section)
        with log.open("rb") as written:
            written.seek(start)
            text = written.read().decode(errors="replace")
        if section.is_benchmark:
            rows = [line for line in text.splitlines() if line.startswith("{")]
            with (self.out / "rows.jsonl").open("a") as file:
                file.writelines(f"{row}\n" for row in rows)
        says = last_words(text, has_failed=status != 0)
        return Result(section.name, status, round(seconds, 1), says, tuple(left))

    def command(self, section: Section) -> list[str]:
        arguments = section.arguments
        if self.is_rehearsal and section == WARM:
            arguments = ("-c", _WARM_REHEARSAL)
        if section.has_tests:
            marker = _OF_REHEARSAL if self.is_rehearsal else _OF_GPU
            arguments = (*arguments, *marker)
        elif section.is_benchmark and self.is_rehearsal:
            arguments = (*arguments, "--smoke")
        return [sys.executable, *arguments]

    def _environment(self) -> dict[str, str]:
        paths = [str(self.site)] if self.site else []
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # A hang inside a call shows its stack when it is ended.
            "PYTHONFAULTHANDLER": "1",
            "GPU_JSON": str(self.out / "figures.jsonl"),
            "TMPDIR": str(self._folder),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.site:
            env["SGLANG_WITHOUT_KERNELS"] = "1"
            env["SGLANG_SOURCES"] = str(self.site / "sglang/srt")
            if self.is_rehearsal:
                emulation = str(self.root / "tests/support/gpu/emulated_cuda")
                env["GPU_EMULATION"] = os.pathsep.join((emulation, str(self.site)))
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [*paths, str(self.root), os.environ.get("PYTHONPATH", "")])
        )
        return env

    def _compile(self) -> subprocess.Popen[bytes] | None:
        """Bytecode of the bundle, on other cores, so that engines need not make it."""
        if self.site is None:
            return None
        command = [sys.executable, "-m", "compileall", "-q", "-j", "8", str(self.site)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _note(self, result: Result) -> None:
        row = {name: value for name, value in vars(result).items() if value != ()}
        with (self.out / "summary.jsonl").open("a") as file:
            print(json.dumps(row), file=file, flush=True)
            os.fsync(file.fileno())
        print(f"   {result.status} after {result.seconds} s: {result.says}", flush=True)

    def _describe(self) -> None:
        commands = (
            ["nvidia-smi"],
            ["df", "-h", "/dev/shm", "/tmp"],
            ["sh", "-c", "ulimit -a; nproc; ldd --version | head -1; cc --version | head -1"],
            ["sh", "-c", "ldconfig -p | grep -E 'libcuda|cudart'"],
        )
        with (self.out / "log.txt").open("a") as log:
            log.write(f"{platform.platform()} {sys.version}\n")
            for command in commands:
                if shutil.which(command[0]) is None:
                    continue
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
                    log.write(done.stdout + done.stderr + "\n")
                except subprocess.TimeoutExpired:
                    log.write(f"{command[0]} took more than 30 s\n")

    def _keep_engine_logs(self, section: Section) -> None:
        """Add the logs of its engines to the file, and make room for the next section."""
        with (self.out / "engines.txt").open("a") as file:
            for path in sorted(self._folder.rglob("*.log")):
                text = path.read_text(errors="replace")[-_MOST_LOG:]
                file.write(f"\n===== {section.name}: {path.relative_to(self._folder)}\n{text}")
        for path in self._folder.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def _show(self, results: Sequence[Result]) -> None:
        """The figures and a table last: the end of an output is what most tools show."""
        print("\n== figures")
        for name in ("figures.jsonl", "rows.jsonl"):
            path = self.out / name
            for line in path.read_text().splitlines() if path.is_file() else []:
                print(line[:400])
        print("\n== sections")
        for one in results:
            print(f"{one.section:16} {one.status!s:10} {one.seconds:6} s  {one.says[:160]}")
            if one.left:
                print(f"{'':16} left behind, and ended: {', '.join(one.left)[:300]}")
        if waiting := [one.section for one in results if one.status == NOT_BEGUN]:
            print(f"not begun, for lack of time: --only {' '.join(waiting)}")
        sys.stdout.flush()


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | str:
    """Its status; one that takes too long shows where it is, and ends."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    # pytest's own words first; then a stack of Python's, also out of a call that does not return.
    for number, grace_s in (
        (signal.SIGINT, _STACK_S),
        (signal.SIGABRT, _STACK_S),
        (signal.SIGKILL, _END_S),
    ):
        try:
            os.killpg(process.pid, number)
            process.wait(grace_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        break
    return "ended"


def last_words(text: str, *, has_failed: bool) -> str:
    """The line of an output that says how it ended."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    signs = (" passed", " failed", " error", "Error") if has_failed else (" passed",)
    found = [line for line in lines if any(sign in line for sign in signs)]
    return (found or lines or [""])[-1][:300]


def adopt_orphans() -> None:
    """What a section leaves behind becomes a child of this process, which can then end it."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_with_the_run() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children_of(pid: int) -> set[int]:
    """Processes that were started by it and not yet reaped, zombies too."""
    found: set[int] = set()
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        try:
            found |= {int(child) for child in (folder / "children").read_text().split()}
        except FileNotFoundError:
            continue  # the thread has ended
    return found


def end_what_is_left(before: set[int], grace_s: float) -> list[str]:
    """Wait for orphans to end by themselves, and kill those that do not; their command lines."""
    deadline = time.monotonic() + grace_s
    while new := _running(before):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    names = [_command_line(pid) for pid in sorted(new)]
    deadline = time.monotonic() + _END_S  # one that is stuck in the driver does not end
    while (new := _running(before)) and time.monotonic() < deadline:
        for pid in new:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return names


def _running(before: set[int]) -> set[int]:
    """Children of this process that are not of ``before``, without those that have ended."""
    new = children_of(os.getpid()) - before
    for pid in list(new):
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                new.discard(pid)
        except ChildProcessError:
            new.discard(pid)
    return new


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:120]
    except FileNotFoundError:
        return str(pid)
