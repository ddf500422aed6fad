"""Starting, awaiting and ending an engine process; real processes, tiny ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from engines.process.engine_process import EngineProcess
from engines.protocol.errors import EngineNotReady, EngineUnreachable
from tests.support.waits import until

Spawn = Callable[..., Awaitable[EngineProcess]]

FOREVER = "exec sleep 600"
STUBBORN = "trap '' TERM; echo trapped; while :; do sleep 0.05; done"


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[Spawn]:
    """Spawns shell scripts as engines and kills them after the test."""
    processes: list[EngineProcess] = []

    async def spawn(script: str, **options: object) -> EngineProcess:
        process = await EngineProcess.spawn(
            ["sh", "-c", script],
            log_path=tmp_path / f"engine-{len(processes)}.log",
            engine_id=f"decode-{len(processes)}",
            **options,  # type: ignore[arg-type]
        )
        processes.append(process)
        return process

    yield spawn
    for process in processes:
        await process.kill()


def is_running(pid: int | None) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


async def test_a_spawned_engine_runs_until_killed(spawn: Spawn):
    process = await spawn(FOREVER)
    assert process.is_alive()
    assert process.exit_status is None
    assert is_running(process.pid)
    await process.kill()
    assert not process.is_alive()
    assert process.exit_status == -9
    assert not psutil.pid_exists(process.pid or 0)


async def test_killing_twice_and_killing_the_dead_is_nothing(spawn: Spawn):
    process = await spawn("exit 3")
    await until(lambda: not process.is_alive())
    await process.kill()
    await process.kill()
    assert await process.stop() is False


async def test_the_exit_status_is_the_engines_own(spawn: Spawn):
    process = await spawn("exit 3")
    await until(lambda: not process.is_alive())
    assert process.exit_status == 3


async def test_the_engine_leads_its_own_session(spawn: Spawn):
    process = await spawn("exec cat /proc/self/stat")
    await until(lambda: not process.is_alive())
    _, _, fields = process.log_tail().rpartition(")")
    assert fields.split()[2:4] == [str(process.pid)] * 2


async def test_the_environment_is_the_one_given_and_the_directory_too(spawn: Spawn, tmp_path: Path):
    env = {"PATH": "/usr/bin:/bin", "COLOR": "blue"}
    process = await spawn('echo "$COLOR $HOME $PWD"', env=env, cwd=tmp_path)
    await until(lambda: not process.is_alive())
    assert process.log_tail() == f"blue  {tmp_path}"


async def test_an_environment_larger_than_a_pipe_arrives_whole(spawn: Spawn):
    env = {"PATH": "/usr/bin:/bin"} | {f"LONG_{i}": "x" * 100_000 for i in range(4)}
    process = await spawn("env | wc -c", env=env)
    await until(lambda: not process.is_alive())
    assert int(process.log_tail()) > 400_000


async def test_a_ready_engine_is_told_at_once(spawn: Spawn):
    process = await spawn(FOREVER)
    await process.wait_until_ready(yes, 10)
    assert process.is_alive()


async def test_a_refused_probe_means_not_yet(spawn: Spawn):
    async def probe() -> bool:
        answers.append(len(answers))
        if len(answers) < 3:
            raise EngineUnreachable("cannot connect")
        return len(answers) == 5

    answers: list[int] = []
    process = await spawn(FOREVER)
    await process.wait_until_ready(probe, 30, interval_s=0)
    assert len(answers) == 5


async def test_a_bug_in_the_probe_is_not_taken_for_not_ready(spawn: Spawn):
    async def probe() -> bool:
        raise TimeoutError("somebody else's")

    process = await spawn(FOREVER)
    with pytest.raises(TimeoutError, match="somebody else's"):
        await process.wait_until_ready(probe, 30)


async def test_death_while_starting_shows_status_and_log(spawn: Spawn):
    process = await spawn("echo loading; echo 'CUDA out of memory' >&2; exit 7")
    with pytest.raises(EngineNotReady, match="engine decode-0: exited with status 7") as caught:
        await process.wait_until_ready(no, 60)
    assert caught.value.exit_status == 7
    assert caught.value.log_tail == "loading\nCUDA out of memory"
    assert "CUDA out of memory" in str(caught.value)


async def test_the_deadline_shows_the_last_probe_and_the_log(spawn: Spawn):
    async def probe() -> bool:
        raise EngineUnreachable("is_ready cannot connect")

    process = await spawn("echo loading; " + FOREVER)
    await until(lambda: process.log_tail() == "loading")
    with pytest.raises(EngineNotReady, match=r"not ready after 0\.2 s .*cannot connect") as caught:
        await process.wait_until_ready(probe, 0.2)
    assert (caught.value.exit_status, caught.value.log_tail) == (None, "loading")
    assert process.is_alive()


async def test_a_probe_that_hangs_does_not_outlast_the_deadline(spawn: Spawn):
    async def probe() -> bool:
        await asyncio.Event().wait()
        return True

    process = await spawn(FOREVER)
    with pytest.raises(EngineNotReady, match=r"not ready after 0\.1 s"):
        await process.wait_until_ready(probe, 0.1)


async def test_a_command_that_does_not_exist_is_told_in_the_log(tmp_path: Path):
    process = await EngineProcess.spawn(["no-such-engine"], log_path=tmp_path / "logs" / "e.log")
    with pytest.raises(EngineNotReady, match="cannot start no-such-engine") as caught:
        await process.wait_until_ready(no, 60)
    assert caught.value.exit_status == 127
    await process.kill()


async def test_the_tail_is_of_this_run_and_bounded(spawn: Spawn, tmp_path: Path):
    (tmp_path / "engine-0.log").write_text("the run before\n")
    process = await spawn("i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo line $i; done")
    await until(lambda: not process.is_alive())
    assert process.log_tail(2) == "line 99\nline 100"
    assert process.log_tail(1000).startswith("line 1\n")
    assert (tmp_path / "engine-0.log").read_text().startswith("the run before\n")


async def test_a_long_line_does_not_drown_the_cause_behind_it(spawn: Spawn, tmp_path: Path):
    """SGLang's second line has all its settings."""
    settings = "server_args=" + "x" * 15_000
    (tmp_path / "settings").write_text(settings)
    process = await spawn(
        f"cat {tmp_path}/settings; echo; echo 'Traceback (most recent call last):';"
        "echo 'RuntimeError: no kernel for this GPU'; exit 1"
    )
    with pytest.raises(EngineNotReady) as caught:
        await process.wait_until_ready(no, 60)
    assert caught.value.log_tail.splitlines() == [
        settings[:297] + "...",
        "Traceback (most recent call last):",
        "RuntimeError: no kernel for this GPU",
    ]
    assert str(caught.value).endswith("\nRuntimeError: no kernel for this GPU")
    assert len(str(caught.value)) < 1000
    assert settings in process.log_path.read_text(), "the log itself is whole"


async def test_the_beginning_of_a_long_last_line_stays(spawn: Spawn, tmp_path: Path):
    (tmp_path / "cause").write_text("ValueError: no shard of " + "y" * 100_000)
    process = await spawn(f"echo loading; cat {tmp_path}/cause")
    await until(lambda: not process.is_alive())
    begin, cause = process.log_tail().splitlines()
    assert begin == "loading"
    assert cause.startswith("ValueError: no shard of yyy")
    assert len(cause) == 300


async def test_a_willing_engine_is_stopped_without_a_kill(spawn: Spawn):
    process = await spawn("trap 'exit 0' TERM; echo trapped; while :; do sleep 0.01; done")
    await until(lambda: process.log_tail() == "trapped")
    assert await process.stop(60) is False
    assert process.exit_status == 0


async def test_stop_reaches_the_whole_process_group(spawn: Spawn, tmp_path: Path):
    process = await spawn(f"sleep 600 & echo $! > {tmp_path}/pid; echo there; wait")
    await until(lambda: process.log_tail() == "there")
    assert await process.stop(60) is False
    assert not is_running(int((tmp_path / "pid").read_text()))


async def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(spawn: Spawn):
    process = await spawn(STUBBORN)
    await until(lambda: process.log_tail() == "trapped")
    assert await process.stop(0.2) is True
    assert process.exit_status == -9
    assert not is_running(process.pid)


async def test_a_cancelled_stop_still_ends_the_engine(spawn: Spawn):
    process = await spawn(STUBBORN)
    await until(lambda: process.log_tail() == "trapped")
    stopping = asyncio.create_task(process.stop(600))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(lambda: not is_running(process.pid))


async def test_kill_cuts_a_running_stop_short(spawn: Spawn):
    process = await spawn(STUBBORN)
    await until(lambda: process.log_tail() == "trapped")
    stopping = asyncio.create_task(process.stop(600))
    await asyncio.sleep(0)
    await process.kill()
    assert await asyncio.wait_for(stopping, 20) is True


async def test_a_frozen_engine_can_be_killed(spawn: Spawn):
    process = await spawn(FOREVER)
    psutil.Process(process.pid).suspend()
    await process.kill()
    assert not is_running(process.pid)


async def test_killing_one_engine_leaves_the_other(spawn: Spawn):
    one, other = await spawn(FOREVER), await spawn(FOREVER)
    await one.kill()
    assert not is_running(one.pid)
    assert other.is_alive()
    assert is_running(other.pid)


async def test_no_zombie_and_no_descriptor_is_left(spawn: Spawn):
    await (await spawn(FOREVER)).kill()  # what the first use opens for good
    num_before, children = psutil.Process().num_fds(), psutil.Process().children()
    await (await spawn(FOREVER)).kill()
    assert psutil.Process().num_fds() == num_before
    assert set(psutil.Process().children()) <= set(children)


async def test_resident_memory_covers_all_processes(spawn: Spawn):
    process = await spawn("setsid sleep 600 & echo there; exec sleep 600")
    await until(lambda: process.log_tail() == "there")
    pids = [process.pid, *(p.pid for p in psutil.Process(process.pid).children())]
    await until(
        lambda: process.resident_bytes() == sum(psutil.Process(p).memory_info().rss for p in pids)
    )
    await process.kill()
    assert process.resident_bytes() == 0


async def test_spawning_can_be_cancelled_and_leaves_nothing(tmp_path: Path):
    mark = tmp_path / "started"
    script = f"echo $$ > {mark}; exec sleep 600"
    spawning = asyncio.create_task(
        EngineProcess.spawn(["sh", "-c", script], log_path=tmp_path / "engine.log")
    )
    await asyncio.sleep(0)
    spawning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await spawning
    await until(lambda: not any(str(mark) in " ".join(c) for c in command_lines()))
    assert not mark.exists() or not is_running(int(mark.read_text()))


def command_lines() -> list[list[str]]:
    return [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
