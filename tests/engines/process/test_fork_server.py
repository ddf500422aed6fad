"""A process that the fork server of the tests forks is what ``exec`` would have given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from engines.process import guarded_process
from engines.process.guarded_process import TERMINATE
from tests.support.forking import starts
from tests.support.forking.guarded_witness import (
    WAYS,
    WITNESS,
    GuardedWitness,
    choose,
    plain,
    was_forked,
)
from tests.support.forking.origins import own_origin
from tests.support.forking.starts import STARTS, ForkServer, ForkServerDied, Starts
from tests.support.processes import program, wait_until

UNKNOWN = 255


@pytest.fixture(scope="module")
def light() -> Iterator[Starts]:
    """Starts with a server that imports nothing, which is there at once."""
    made = Starts([own_origin(())])
    yield made
    made.close()


@pytest.fixture
def both(light: Starts, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """The same, used for guards too; ``choose`` says which way."""
    monkeypatch.setattr(guarded_process, "start_guard", light.start_guard)
    return light


def test_a_guarded_process_finds_what_exec_gives(both: Starts, tmp_path: Path) -> None:
    found = {}
    folder = tmp_path / "folder"
    folder.mkdir()
    env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "1000000", "CUDA_VISIBLE_DEVICES": ""}
    for way in WAYS:
        choose(both, way)
        log = tmp_path / way / "engine.log"
        log.parent.mkdir()
        engine = GuardedWitness(log.parent, "says", env=env)
        status, text = engine.ended()
        assert status == 0, text
        found[way] = plain(text)
        assert was_forked(both) is (way == "fork")
        found[way]["token"] = found[way]["seen"]["environment"].pop("ENGINE_GUARD_TOKEN")
        shown = f"ENGINE_GUARD_TOKEN={found[way]['token']}"
        found[way]["seen"]["environment_in_proc"].remove(shown)
        for fd in ("1", "2"):
            assert found[way]["seen"]["descriptors"].pop(fd) == str(log)
    assert found["fork"]["seen"] == found["exec"]["seen"]
    seen = found["fork"]["seen"]
    assert seen["descriptors"] == {"0": os.devnull}
    assert seen["session"] == seen["group"] == "its own"
    assert seen["ends_with_parent"] == signal.SIGKILL
    assert seen["folder"] == os.getcwd()


def test_a_program_finds_what_exec_gives(light: Starts) -> None:
    found = {}
    for way in WAYS:
        choose(light, way)
        process = light.start_module(WITNESS, "says", stdin=True, stdout=True, stderr=True)
        text, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, ""), errors
        found[way] = plain(text or "")
        assert was_forked(light) is (way == "fork")
    assert found["fork"]["seen"] == found["exec"]["seen"]
    seen = found["fork"]["seen"]
    assert seen["descriptors"] == dict.fromkeys("012", "pipe:")
    assert (seen["session"], seen["group"]) == (os.getsid(0), os.getpgid(0))


def test_a_fork_has_the_variables_that_an_import_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setting.py").write_text("import os; os.environ['SET_BY_AN_IMPORT'] = 'so'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Starts([own_origin(["setting"])])
    choose(made, "fork")
    process = made.start_module(WITNESS, "says", stdout=True)
    seen = plain(process.communicate(timeout=30)[0] or "")["seen"]
    made.close()
    assert was_forked(made)
    assert seen["environment"] == {**os.environ, "SET_BY_AN_IMPORT": "so"}
    assert "SET_BY_AN_IMPORT=so" not in seen["environment_in_proc"]


def test_no_two_forks_draw_the_same(light: Starts) -> None:
    choose(light, "fork")
    several = [light.start_module(WITNESS, "says", stdout=True) for _ in range(3)]
    drawn = [plain(process.communicate(timeout=30)[0] or "")["drawn"] for process in several]
    for name in drawn[0]:
        assert len({one[name] for one in drawn}) == 3, name
    assert was_forked(light)


@pytest.mark.embedded
def test_a_fork_that_has_torch_computes_as_a_process_that_imports_it() -> None:
    found = {}
    was_forking = STARTS.is_forking
    try:
        for way in ("exec", "fork", "fork"):
            STARTS.is_forking = way == "fork"
            num_reasons = len(STARTS.reasons)
            process = STARTS.start_module(WITNESS, "torch", stdout=True)
            found[way, len(found)] = plain(process.communicate(timeout=100)[0] or "")
            assert (len(STARTS.reasons) == num_reasons) is (way == "fork")
    finally:
        STARTS.is_forking = was_forking
    first, second, third = found.values()
    assert first["seen"] == second["seen"] == third["seen"]
    for library in ("numpy", "torch"):
        assert len({str(one["drawn"][library]) for one in found.values()}) == 3


ENDS = {
    "exits": 7,
    "gives_a_reason": 1,
    "raises": 1,
    "is_killed": -signal.SIGKILL,
    "is_interrupted": -signal.SIGINT,
    "leaves_at_once": 5,
    "ends_late": 0,
    "unknown": 1,
}


@pytest.mark.parametrize("word", ENDS)
def test_a_fork_ends_as_a_program_ends(both: Starts, tmp_path: Path, word: str) -> None:
    """With the same status and output; a traceback has the same last lines."""
    outputs = {}
    for way in WAYS:
        choose(both, way)
        process = both.start_module(WITNESS, word, stdout=True, stderr=True)
        output, errors = process.communicate(timeout=30)
        folder = tmp_path / way
        folder.mkdir()
        engine = GuardedWitness(folder, word)
        status, log = engine.ended()
        assert process.returncode == status == ENDS[word]
        assert was_forked(both) is (way == "fork")
        assert ("Traceback" in (errors or "")) is (word in ("raises", "is_interrupted", "unknown"))
        outputs[way] = [output, (errors or "").splitlines()[-3:], log.splitlines()[-3:]]
    assert outputs["fork"] == outputs["exec"]


def test_a_fork_reads_lines_and_is_used_as_a_subprocess(light: Starts) -> None:
    for way in WAYS:
        choose(light, way)
        process = light.start_module(WITNESS, "lines", stdin=True, stdout=True)
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("first\n", "second\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == line.upper()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.kill(process.pid, signal.SIGSTOP)
        assert wait_until(partial(is_stopped, process.pid), 10)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=30) == ("", None)
        assert process.wait() == process.returncode == process.poll() == -signal.SIGTERM
        process.kill()  # of one that has ended
        assert was_forked(light) is (way == "fork")


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_a_forked_engine_ends_with_its_guard_and_by_sigterm(both: Starts, tmp_path: Path) -> None:
    choose(both, "fork")
    killed = GuardedWitness(tmp_path, "waits")
    pid = killed.waits()
    guard = psutil.Process(pid).parent()
    assert guard is not None
    assert (guard.name(), guard.pid) == ("engine-guard", killed.guarded.report.guard_pid)
    assert guard.cmdline()[1:3] == ["-I", "-S"]
    assert guard.ppid() != os.getpid()
    guard.kill()
    assert wait_until(lambda: not psutil.pid_exists(pid), 30)
    assert wait_until(killed.has_ended, 30)
    assert killed.guarded.report.exit_status == -signal.SIGKILL
    assert not killed.guarded.sweep()
    stopped = GuardedWitness(tmp_path / "stopped", "waits")
    stopped.waits()
    stopped.guarded.send(TERMINATE)
    assert stopped.ended()[0] == -signal.SIGTERM
    assert was_forked(both)


def test_a_forked_engine_is_found_by_its_token(both: Starts, tmp_path: Path) -> None:
    choose(both, "fork")
    engine = GuardedWitness(tmp_path, "waits")
    pid = engine.waits()
    identity = engine.guarded.report.identity
    assert identity is not None
    assert pid in engine.guarded.processes()
    assert f"ENGINE_GUARD_TOKEN={identity.token}" in Path(f"/proc/{pid}/environ").read_text()
    engine.end()
    assert was_forked(both)


# -- which processes are forked -------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["/usr/bin/python3", "-m", "engines.embedded"],
        [sys.executable, "-m", "engines.fake"],
        [sys.executable, "-m", "engines.embedded_other"],
        [sys.executable, "-X", "dev", "-m", "engines.embedded"],
        [sys.executable, "-c", "import engines.embedded"],
        [sys.executable],
        ["sh", "-c", "exec sleep 1"],
    ],
)
def test_what_is_no_module_of_ours_with_torch_is_started_by_exec(command: list[str]) -> None:
    assert not own_origin().is_of(command)


def test_an_embedded_engine_and_ranks_are_forked() -> None:
    for module in ("engines.embedded", "tests.end_to_end.rank_trainer", WITNESS):
        assert own_origin().is_of([sys.executable, "-m", module, "--port", "1"])


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"LD_PRELOAD": "some.so"}, "LD_PRELOAD may have been read at an import"),
        ({"PYTHONPATH": "/some"}, "PYTHONPATH may"),
        ({"NVML_DOUBLE": "/some", "HF_HUB_OFFLINE": "0"}, "HF_HUB_OFFLINE, NVML_DOUBLE may"),
        ({"PATH": None}, "PATH may"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "it has GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "", "PYTEST_CURRENT_TEST": "other"}, ""),
        ({"RAY_TMPDIR": "/some", "TORCHINDUCTOR_CACHE_DIR": "/some"}, ""),
        (
            {"XRAY_TMPDIR": "/some", "TORCHINDUCTOR_CACHE_DIR_": "/some"},
            "TORCHINDUCTOR_CACHE_DIR_, XRAY",
        ),
        ({"ENGINE_GUARD_TOKEN": "a", "MALLOC_MMAP_THRESHOLD_": "1"}, ""),
    ],
)
def test_a_process_with_other_variables_is_started_by_exec(
    variables: dict[str, str | None], why: str
) -> None:
    env = {**os.environ, **variables}
    given = {name: value for name, value in env.items() if value is not None}
    found = starts.why_exec(given, os.environ, starts.inherited())
    assert found.startswith(why)
    assert bool(found) is bool(why)


def test_a_process_that_inherits_something_else_is_started_by_exec(light: Starts) -> None:
    choose(light, "fork")
    assert light.start_module(WITNESS).wait(30) == 0
    assert was_forked(light)
    was = os.umask(0o077)
    try:
        process = light.start_module(WITNESS, "says", stdout=True)
    finally:
        os.umask(was)
    assert plain(process.communicate(timeout=30)[0] or "")["seen"]["status"]["Umask"] == "0077"
    assert light.reasons == [
        "this process has other limits or signals than when it started the fork server"
    ]


@pytest.mark.exec
def test_all_processes_of_a_test_that_is_marked_are_started_by_exec() -> None:
    assert not STARTS.is_forking
    process = STARTS.start_module(WITNESS, "says", stdout=True)
    process.communicate(timeout=30)
    assert isinstance(process, subprocess.Popen)
    assert STARTS.reasons[-1] == "this test starts all by exec"


def test_the_tests_start_guards_by_the_fork_server() -> None:
    assert STARTS.is_forking is not bool(os.environ.get("TEST_EXEC"))
    assert guarded_process.start_guard == STARTS.start_guard


# -- the end of the server ------------------------------------------------------------------


def test_a_server_that_was_killed_fails_one_start_and_the_next_has_a_new_one(
    both: Starts, tmp_path: Path
) -> None:
    choose(both, "fork")
    program_before = both.start_module(WITNESS, "waits", stdout=True)
    engine = GuardedWitness(tmp_path, "waits")
    engine.waits()
    before = both.servers[sys.executable].process
    before.kill()
    with pytest.raises(ForkServerDied, match="ended with status -9"):
        both.start_module(WITNESS)
    assert both.start_module(WITNESS).wait(30) == 0
    assert both.servers[sys.executable].process.pid != before.pid
    # What it had started goes on, and ends as usual; only a status is not known any more.
    engine.end()
    assert program_before.returncode is None
    program_before.kill()
    program_before.communicate(timeout=30)
    assert program_before.returncode == UNKNOWN
    assert wait_until(lambda: not psutil.pid_exists(program_before.pid), 30)
    assert was_forked(both)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('a bad library')", "ImportError: a bad library"),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            "a module that the fork server imports has started a thread",
        ),
        (
            "import sys; sys.modules['ray'] = sys",
            "a module that the fork server imports has imported Ray",
        ),
        (
            "held = open('/etc/passwd')",
            r"a module that the fork server imports has opened \['/etc/passwd'\]",
        ),
    ],
)
def test_a_server_that_cannot_fork_fails_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (tmp_path / "a_bad_module.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Starts([own_origin(["a_bad_module"])])
    made.is_forking = True
    with pytest.raises(ForkServerDied, match=f"(?s)status 1:.*{why}"):
        made.start_module(WITNESS)
    assert not made.servers
    made.close()


def test_a_server_leaves_no_process_no_file_and_no_descriptor(light: Starts) -> None:
    choose(light, "fork")
    light.start_module(WITNESS).wait(30)
    open_before = psutil.Process().num_fds()
    made = ForkServer(own_origin(()))
    files = [os.readlink(f"/proc/{made.process.pid}/fd/{fd}") for fd in (1, 2)]
    assert all(name.endswith(" (deleted)") for name in files)
    made.close()
    assert made.process.returncode == 0
    assert psutil.Process().num_fds() == open_before
    for _ in range(3):
        process = light.start_module(WITNESS, "says", stdout=True, stderr=True)
        process.communicate(timeout=30)
        del process
    assert psutil.Process().num_fds() == open_before


OWNER = """
import os, signal, subprocess
from tests.support.forking.origins import own_origin
from tests.support.forking.starts import ForkServer
server = ForkServer(own_origin(()))
os.set_inheritable(server.requests.fileno(), True)
subprocess.Popen(["sleep", "600"], close_fds=False)  # has the owner's end of the socket, too
print("server", server.process.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_owner(number: signal.Signals) -> None:
    with program("-c", OWNER) as owner:
        owner.wait_for("server", 30)
        pid = int(owner.output.split()[-1])
        assert psutil.pid_exists(pid)
        owner.process.send_signal(number)
        assert wait_until(lambda: not psutil.pid_exists(pid), 30)


def test_starts_of_several_threads_are_those_of_one(light: Starts) -> None:
    choose(light, "fork")
    statuses: list[int] = []

    def start() -> None:
        statuses.extend(light.start_module(WITNESS, "exits").wait(30) for _ in range(5))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [7] * 20
