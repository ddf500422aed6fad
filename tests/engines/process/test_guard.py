"""No process or shared memory of an engine outlives its owner, however owner and guard end."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engines.process import guard
from engines.process.engine_process import EngineProcess
from engines.process.engine_records import clear_crashed
from engines.sglang import environment as sglang
from engines.vllm import invocation as vllm
from tests.support.processes import wait_until

# A process that left its session and whose parent is gone, so only the guard can find it.
ORPHAN = "(setsid sh -c 'echo $$ > orphan.tmp; mv orphan.tmp orphan; exec sleep 600' &)"
ENGINE = f"{ORPHAN}; exec sleep 600"

OWNER = """
import asyncio, ctypes, os, signal, sys, time
from pathlib import Path
from engines.process.engine_process import EngineProcess

async def spawn(script, **options):
    name = f"engine-{len(engines)}"
    directory = Path(name)
    directory.mkdir()
    engines.append(await EngineProcess.spawn(
        ["sh", "-c", script], log_path=Path(name + ".log"), cwd=directory, **options))
    print(engines[-1].pid, flush=True)

async def yes():
    return True

engines = []
for line in sys.stdin:
    exec(line)
"""


class Owner:
    """A separate process that owns engines and executes commands, line by line."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str) -> str:
        assert self.process.stdout
        self.tell(line)
        return self.process.stdout.readline().strip()

    def spawn(self, script: str = ENGINE, **options: object) -> int:
        return int(self.ask(f"asyncio.run(spawn({script!r}, **{options!r}))"))

    def exit_status(self, index: int = 0) -> str:
        return self.ask(f"print(engines[{index}].exit_status, flush=True)")

    def orphan(self, index: int = 0) -> int:
        path = self.directory / f"engine-{index}" / "orphan"
        eventually(path.exists)
        return int(path.read_text())


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.process.kill()
    owner.process.communicate()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(is_so: Callable[[], bool]) -> None:
    assert wait_until(is_so, 60), "it never happened"


def all_gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    "death",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.killpg(0, signal.SIGKILL)",
        "os.abort()",
        "os._exit(1)",
        "sys.exit()",
        "raise SystemError",
        "engines.clear()",
    ],
)
def test_the_engine_and_its_orphans_end_with_the_owner(owner: Owner, death: str):
    engine, orphan = owner.spawn(), owner.orphan()
    guard = psutil.Process(engine).ppid()
    assert is_running(engine)
    assert is_running(orphan)
    owner.tell("import warnings; warnings.simplefilter('ignore')")
    owner.tell(f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {death}")
    eventually(all_gone(engine, orphan, guard))


def test_an_engine_that_is_ready_ends_with_its_owner_too(owner: Owner):
    engine, orphan = owner.spawn(), owner.orphan()
    owner.tell("asyncio.run(engines[0].wait_until_ready(yes, 10))")
    assert owner.ask("print('ready', flush=True)") == "ready"
    owner.process.kill()
    eventually(all_gone(engine, orphan))


def test_a_process_that_inherited_the_pipe_does_not_keep_the_engine(owner: Owner):
    engine, orphan = owner.spawn(), owner.orphan()
    heir = int(owner.ask("child = os.fork(); child or signal.pause(); print(child, flush=True)"))
    owner.process.kill()
    eventually(all_gone(engine, orphan))
    assert is_running(heir)
    os.kill(heir, signal.SIGKILL)


def test_a_later_engine_does_not_keep_an_earlier_one(owner: Owner):
    first, second = owner.spawn(), owner.spawn()
    orphan = owner.orphan(0)
    owner.tell("asyncio.run(engines[0].kill())")
    eventually(all_gone(first, orphan))
    assert is_running(second)
    assert is_running(owner.orphan(1))
    owner.process.kill()
    eventually(all_gone(second, owner.orphan(1)))


def test_an_engine_that_exits_takes_what_it_started_with_it(owner: Owner):
    engine = owner.spawn(f"{ORPHAN}; while [ ! -e orphan ]; do sleep 0.02; done; exit 4")
    eventually(all_gone(engine, owner.orphan()))
    eventually(lambda: owner.exit_status() == "4")


def test_a_killed_guard_takes_the_engine_and_the_owner_finds_the_rest(owner: Owner):
    engine, orphan = owner.spawn(), owner.orphan()
    psutil.Process(psutil.Process(engine).ppid()).kill()
    eventually(all_gone(engine))
    eventually(lambda: owner.exit_status() == "-9")
    owner.tell("asyncio.run(engines[0].kill())")
    eventually(all_gone(orphan))
    assert owner.ask("print('killed', flush=True)") == "killed"


def test_a_guard_shrugs_off_polite_signals(owner: Owner):
    engine = owner.spawn()
    guard = psutil.Process(engine).ppid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    assert owner.ask("print(engines[0].is_alive(), flush=True)") == "True"
    assert is_running(guard)
    assert is_running(engine)


def test_the_engine_has_ordinary_signals_and_no_pipes_of_ours(owner: Owner):
    ask = "grep -E '^Sig(Blk|Ign)' /proc/self/status; ls /proc/self/fd"
    owner.spawn(f"{{ {ask}; }} > seen.tmp; mv seen.tmp seen; sleep 600")
    path = owner.directory / "engine-0" / "seen"
    eventually(path.exists)
    blocked, ignored, *fds = path.read_text().splitlines()
    assert int(blocked.split()[1], 16) == 0
    # 32 and 33 are the C library's own; started under make they come ignored, whatever we do.
    assert int(ignored.split()[1], 16) & ~0x180000000 == 0
    assert fds == ["0", "1", "2", "3"]  # 3 is the listing itself


def test_exit_status_is_known_although_the_owner_ignores_its_children(owner: Owner):
    owner.tell("signal.signal(signal.SIGCHLD, signal.SIG_IGN)")
    engine = owner.spawn("exit 5")
    eventually(all_gone(engine))
    owner.tell("asyncio.run(engines[0].kill())")
    assert owner.exit_status() == "5"


def test_an_owner_that_adopts_orphans_reaps_its_guards(owner: Owner):
    owner.tell("ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); import psutil")
    owner.spawn()
    owner.orphan()
    owner.tell("asyncio.run(engines[0].kill())")
    assert owner.ask("print(psutil.Process().children(), flush=True)") == "[]"


async def test_a_guard_is_light_and_does_not_load_what_the_engine_preloads(tmp_path: Path):
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": ""}
    process = await EngineProcess.spawn(["sleep", "600"], log_path=tmp_path / "engine.log", env=env)
    guard = psutil.Process(psutil.Process(process.pid).ppid())
    assert guard.name() == "engine-guard"
    assert guard.memory_info().rss < 15e6
    assert "LD_PRELOAD" not in guard.environ()
    assert "LD_PRELOAD" in psutil.Process(process.pid).environ()
    await process.kill()


def test_shared_memory_left_behind_is_removed_and_only_that(owner: Owner):
    tag = f"/dev/shm/rr-test-{os.getpid()}"
    script = (
        f": > {tag}-mq-0$$-0; : > {tag}-loads-other; : > {tag}-mq-$$-0; exec 7> {tag}-loads-mine; "
        ": > there; sleep 600"
    )
    engine = owner.spawn(script, cleanup=[f"{tag}-mq-{{pid}}-*", f"{tag}-loads-*"])
    eventually((owner.directory / "engine-0" / "there").exists)
    mine = [Path(f"{tag}-mq-{engine}-0"), Path(f"{tag}-loads-mine")]
    others = [Path(f"{tag}-mq-0{engine}-0"), Path(f"{tag}-loads-other")]
    assert all(path.exists() for path in mine)
    guard = psutil.Process(engine).ppid()
    owner.process.kill()
    eventually(all_gone(guard))
    assert not any(path.exists() for path in mine)
    for path in others:
        path.unlink()  # raises where it was removed


@pytest.mark.parametrize("cleanup", [sglang.CLEANUP, vllm.CLEANUP], ids=["sglang", "vllm"])
def test_semaphores_of_joblib_in_a_killed_engine_are_removed(
    owner: Owner, cleanup: tuple[str, ...]
) -> None:
    """The name is ``SemLock._make_name`` of joblib 1.5 (``externals/loky/backend``)."""
    script = ": > /dev/shm/sem.loky-$$-test; : > /dev/shm/sem.loky-0$$-test; : > there; sleep 600"
    engine = owner.spawn(script, cleanup=cleanup)
    eventually((owner.directory / "engine-0" / "there").exists)
    guard = psutil.Process(engine).ppid()
    owner.process.kill()
    eventually(all_gone(guard))
    assert not Path(f"/dev/shm/sem.loky-{engine}-test").exists()
    Path(f"/dev/shm/sem.loky-0{engine}-test").unlink()  # raises where it was removed


def test_shared_memory_of_an_engine_that_died_by_itself_is_removed(owner: Owner):
    tag = f"/dev/shm/rr-test-{os.getpid()}"
    script = f"""
import mmap, os, signal
held = open("{tag}-held:0-[0-1]_0", "wb")  # a name with the signs of a pattern, as vLLM's
with open("{tag}-mapped", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
os.rename("{tag}-mapped", "{tag}-renamed")
os.mkfifo("die")
open("there", "w").close()
open("die").close()
os.kill(os.getpid(), signal.SIGKILL)
"""
    owner.spawn(shlex.join(["exec", sys.executable, "-S", "-c", script]), cleanup=[f"{tag}-*"])
    eventually((owner.directory / "engine-0" / "there").exists)
    owner.tell("asyncio.run(engines[0].wait_until_ready(yes, 10))")
    assert owner.ask("print('noted', flush=True)") == "noted"
    assert len(list(Path("/dev/shm").glob(f"{Path(tag).name}-*"))) == 2
    (owner.directory / "engine-0" / "die").write_bytes(b"")
    eventually(lambda: not list(Path("/dev/shm").glob(f"{Path(tag).name}-*")))


def test_a_semaphore_made_while_an_engine_serves_is_removed_after_its_stop(owner: Owner):
    tag = f"/dev/shm/rr-test-{os.getpid()}"
    script = f"""
import mmap, os, signal
os.mkfifo("serve")
open("there", "w").close()
open("serve").close()
with open("{tag}-late", "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
open("served", "w").close()
signal.pause()
"""
    owner.spawn(shlex.join(["exec", sys.executable, "-S", "-c", script]), cleanup=[f"{tag}-*"])
    folder = owner.directory / "engine-0"
    eventually((folder / "there").exists)
    owner.tell("asyncio.run(engines[0].wait_until_ready(yes, 10))")
    assert owner.ask("print('noted', flush=True)") == "noted"
    (folder / "serve").write_bytes(b"")
    eventually((folder / "served").exists)
    assert Path(f"{tag}-late").exists()
    owner.tell("asyncio.run(engines[0].stop(10))")
    eventually(lambda: not Path(f"{tag}-late").exists())


@pytest.mark.parametrize("death", ["owner.process.kill()", "asyncio.run(engines[0].kill())"])
def test_a_semaphore_of_an_engine_killed_as_it_starts_is_removed(owner: Owner, death: str):
    """It makes one after the other, until it is killed; of a child of it, too."""
    tag = f"/dev/shm/rr-test-{os.getpid()}"
    script = f"""
import itertools, mmap, os
place = os.fork()
held = []
for number in itertools.count():
    with open(f"{tag}-{{place}}-{{number}}", "w+b") as file:
        file.truncate(4096)
        held.append(mmap.mmap(file.fileno(), 4096))
    if number >= 100:
        os.unlink(f"{tag}-{{place}}-{{number - 100}}")
        held.pop(0).close()
    open("there", "w").close()
"""
    command = shlex.join(["exec", sys.executable, "-S", "-c", script])
    engine = owner.spawn(command, cleanup=[f"{tag}-*"])
    eventually((owner.directory / "engine-0" / "there").exists)
    guard = psutil.Process(engine).ppid()
    if death.startswith("owner"):
        owner.process.kill()
    else:
        owner.tell(death)
    eventually(all_gone(guard))
    assert list(Path("/dev/shm").glob(f"{Path(tag).name}-*")) == []


def test_the_folder_of_an_engine_ends_with_its_owner_and_takes_a_socket(owner: Owner):
    script = """
import os, signal, socket, uuid
held = socket.socket(socket.AF_UNIX)
held.bind(f"{os.environ['ITS_FOLDER']}/{uuid.uuid4()}")
open("there", "w").close()
signal.pause()
"""
    command = shlex.join(["exec", sys.executable, "-S", "-c", script])
    engine = owner.spawn(command, folder_variable="ITS_FOLDER")
    eventually((owner.directory / "engine-0" / "there").exists)
    folder = Path(psutil.Process(engine).environ()["ITS_FOLDER"])
    guard = psutil.Process(psutil.Process(engine).ppid())
    assert [path for path in folder.iterdir() if path.is_socket()]
    assert folder.stat().st_mode & 0o777 == 0o700
    # Open in the guard, so that one sees whose it is; the kernel keeps its lock for it.
    assert str(folder) in [os.path.realpath(fd) for fd in Path(f"/proc/{guard.pid}/fd").iterdir()]
    owner.process.kill()
    eventually(all_gone(guard.pid))
    assert not folder.exists()


def test_a_variable_that_the_environment_has_stays(owner: Owner):
    given = {**os.environ, "ITS_FOLDER": "elsewhere"}
    engine = owner.spawn("exec sleep 600", env=given, folder_variable="ITS_FOLDER")
    environment = psutil.Process(engine).environ()
    assert environment["ITS_FOLDER"] == "elsewhere"
    record = Path(f"/dev/shm/rollout-engine-{environment['ENGINE_GUARD_TOKEN']}", "record.json")
    assert record.exists()


class Held:
    """An engine with an orphan and shared memory of both forms of name, and its guard."""

    def __init__(self, owner: Owner, *, is_ready: bool = True) -> None:
        self.owner = owner
        self.tag = f"/dev/shm/rr-test-{os.getpid()}"
        script = (
            f"{ORPHAN}; : > $ITS_FOLDER/made; : > {self.tag}-mq-$$-0; exec 7> {self.tag}-loads-1; "
            "exec sleep 600"
        )
        cleanup = [f"{self.tag}-mq-{{pid}}-*", f"{self.tag}-loads-*"]
        self.engine = owner.spawn(
            script, engine_id="mine-0", cleanup=cleanup, folder_variable="ITS_FOLDER"
        )
        self.orphan = owner.orphan()
        self.guard = psutil.Process(self.engine).ppid()
        eventually(lambda: len(self.files()) == 2)
        self.folder = Path(psutil.Process(self.engine).environ()["ITS_FOLDER"])
        assert (self.folder / "made").exists()
        if is_ready:
            owner.tell("asyncio.run(engines[0].wait_until_ready(yes, 10))")
            assert owner.ask("print('ready', flush=True)") == "ready"

    def files(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"{Path(self.tag).name}-*"))

    def record(self) -> Path:
        token = psutil.Process(self.engine).environ()["ENGINE_GUARD_TOKEN"]
        return Path(f"/dev/shm/rollout-engine-{token}", "record.json")

    def kill_guard_and_owner(self) -> None:
        """In this order, or the guard would see its owner end; stopped, it cannot see it."""
        os.kill(self.guard, signal.SIGSTOP)
        self.owner.process.kill()
        self.owner.process.wait()
        os.kill(self.guard, signal.SIGKILL)
        eventually(all_gone(self.engine, self.guard))


def test_an_owner_whose_guard_was_killed_removes_the_shared_memory(owner: Owner):
    held = Held(owner)
    record = held.record()
    os.kill(held.guard, signal.SIGKILL)
    eventually(all_gone(held.engine))
    owner.tell("asyncio.run(engines[0].kill())")
    assert owner.ask("print('killed', flush=True)") == "killed"
    assert held.files() == []
    assert not held.folder.exists()
    assert not record.exists()
    assert not is_running(held.orphan)


@pytest.mark.parametrize("is_ready", [True, False])
def test_what_a_killed_owner_and_guard_left_is_cleared_by_the_next_launch(
    owner: Owner, is_ready: bool
):
    held = Held(owner, is_ready=is_ready)
    record = held.record()
    eventually(lambda: f"{held.tag}-loads-1" in record.read_text())
    held.kill_guard_and_owner()
    assert len(held.files()) == 2
    assert is_running(held.orphan)
    # A launch of another test may have cleared it a moment before.
    assert "mine-0" in clear_crashed() or not record.exists()
    assert held.files() == []
    assert not held.folder.exists()
    assert not record.exists()
    assert not is_running(held.orphan)


def test_an_engine_with_an_owner_is_not_cleared(owner: Owner):
    held = Held(owner)
    assert "mine-0" not in clear_crashed()
    assert len(held.files()) == 2
    assert held.folder.exists()
    assert is_running(held.engine)


# Launches of other tests clear a crashed engine, too: what is to stop them is there before it.


def test_a_file_that_a_living_process_holds_is_not_removed(owner: Owner):
    held = Held(owner)
    first, second = held.files()
    with second.open():
        held.kill_guard_and_owner()
        clear_crashed()
        eventually(lambda: held.files() == [second])
    assert not first.exists()
    second.unlink()


def test_a_record_of_another_user_is_not_believed(owner: Owner):
    if os.getuid():
        pytest.skip("only root gives folders away")
    held = Held(owner)
    os.chown(held.folder, 1, 1)
    held.kill_guard_and_owner()
    assert "mine-0" not in clear_crashed()
    assert is_running(held.orphan)
    assert len(held.files()) == 2
    os.chown(held.folder, 0, 0)
    clear_crashed()
    eventually(lambda: held.files() == [])


def test_of_an_engine_of_another_container_what_is_held_stays_until_it_is_let_go(owner: Owner):
    held = Held(owner)
    record = held.record()
    record.write_text(record.read_text().replace("pid:[", "pid:[1"))
    second = held.files()[1]
    with second.open():
        held.kill_guard_and_owner()
        assert "mine-0" not in clear_crashed()
        eventually(lambda: held.files() == [second])
        assert record.exists()
    clear_crashed()
    eventually(lambda: held.files() == [] and not held.folder.exists())
    assert is_running(held.orphan)  # its pid has another meaning there
    os.kill(held.orphan, signal.SIGKILL)


def test_a_folder_whose_guard_was_killed_before_it_had_a_lock_is_cleared() -> None:
    folder = Path(guard.folder_path(f"test{os.getpid()}"))
    folder.mkdir(mode=0o700)
    clear_crashed()
    assert not folder.exists()


def test_while_an_engine_starts_its_mappings_are_read_only_when_there_are_new_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process with a GPU has tens of thousands."""
    name = f"/dev/shm/rollout-test-{os.getpid()}"
    monkeypatch.setenv(guard.TOKEN_VARIABLE, "test")
    monkeypatch.setattr(guard, "START_NOTES_S", 0.001)
    command_fd, end_fd = os.pipe()
    watching = guard.Guard(command_fd, os.open(os.devnull, os.O_WRONLY), os.getpid())
    os.close(watching.owner_fd)
    watching.owner_fd = -1
    watching.cleanup = [f"{name}-{{pid}}", f"{name}.*"]
    changes = [None, f"{name}.sem", None, f"{name}-1", f"{name}.shm", None]
    read = []

    def note(files_of: Callable[[int], list[str]]) -> None:
        read.append(files_of is guard.mapped_files)
        if not changes:
            os.write(end_fd, b"k")
        elif (change := changes.pop(0)) is not None:
            Path(change).touch()

    monkeypatch.setattr(watching, "note", note)
    try:
        watching.watch(b"")
    finally:
        for file in Path("/dev/shm").glob(f"{Path(name).name}*"):
            file.unlink()
        for fd in (command_fd, end_fd, watching.report_fd):
            os.close(fd)
    assert read == [False, False, True, False, False, True, False]
