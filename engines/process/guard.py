"""Guards one engine: none of its processes outlives the process that owns it.

Run as ``python -I -S guard.py COMMAND_FD REPORT_FD OWNER_PID`` by ``guarded_process.py``; standard
library only, so that it starts in tens of milliseconds and stays near 11 MB.  What always holds:

- Every process of the engine descends from the guard.  It is a subreaper, so orphans come to it,
  whatever session or process group they moved to.
- The engine is killed when the owner sends the command, when the owner's end of the command pipe
  closes, when the owner dies (even if another process inherited the pipe), and when the engine's
  own main process exits.
- The guard exits after the last of them is reaped, never before.

The guard is forked twice, so it is no child of the owner: Ray kills a dying worker's direct
children first.  If the guard itself is killed, the kernel kills the engine's main process
(``PR_SET_PDEATHSIG``, set between fork and exec: the engine need not know); what else the engine
started is then found by the owner, see ``GuardedProcess.sweep``.

While the engine runs, shared memory has a folder of it, with a record; the guard has it locked.
After guard and owner were both killed, the next launch clears the rest by that record, see
``engine_records.py``.

In:  one line of JSON (``command``, ``env``, ``cwd``, ``cleanup``, ``folder_variable``, ``name``),
     then single bytes: ``n`` ready, so note the processes and shared memory, ``t`` SIGTERM to the
     engine's process group, ``k`` kill all.
Out: ``started GUARD_PID ENGINE_PID``, ``noted``, ``exited STATUS``, ``gone NUM_KILLED``, one line
     each.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing would be the largest import
if TYPE_CHECKING or __package__:
    from engines.process.own_files import SHARED_MEMORY, OwnFolder, remove_unused_file
else:  # a script, which finds what is beside it and nothing else of ours
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    from own_files import SHARED_MEMORY, OwnFolder, remove_unused_file

if TYPE_CHECKING:
    from collections.abc import Callable

    Execute = Callable[[str, list[str], dict[str, str]], object]

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 0.5
"""What an engine that exited by itself left running gets this long to notice."""

TOKEN_VARIABLE = "ENGINE_GUARD_TOKEN"
FOLDER_PREFIX = f"{SHARED_MEMORY}/rollout-engine-"
RECORD = "record.json"
START_NOTES_S = 1.0
"""Until the first ``n`` the record is renewed this often, for an engine that starts makes files.  A
file that is younger when guard and owner are killed stays."""

# What clocks of the kernel and of ``time`` may differ by.
_CLOCK_S = 1.0
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Guard:
    """State of one guard process; made after the double fork."""

    def __init__(self, command_fd: int, report_fd: int, owner_pid: int) -> None:
        self.command_fd = command_fd
        self.report_fd = report_fd
        self.owner_fd = _open_pidfd(owner_pid)
        self.wakeup_fd = -1
        self.folder: OwnFolder | None = None
        self.began_s = time.time() - _CLOCK_S
        self.engine_pid = 0
        self.exit_status: int | None = None
        self.name = ""
        self.is_ready = False
        self.cleanup: list[str] = []
        self.seen_pids: set[int] = set()
        self.seen_files: set[str] = set()
        self.looked_at: set[tuple[str, int]] = set()
        for fd in (command_fd, report_fd):
            os.set_inheritable(fd, False)

    def detach(self) -> None:
        """Leaves the owner's session, so that its signals and its end do not reach the guard."""
        os.setsid()
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _prctl(PR_SET_NAME, b"engine-guard", 0, 0, 0)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # An owner may have set SIGCHLD to be ignored; the exit status would be lost with it.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self.wakeup_fd, write_fd = os.pipe()
        os.set_blocking(self.wakeup_fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)

    def read_order(self) -> tuple[dict[str, object], bytes] | None:
        """What to start and the commands that came with it, or None if the owner is gone."""
        received = b""
        while b"\n" not in received:
            part = os.read(self.command_fd, 65536)
            if not part:
                return None
            received += part
        line, _, commands = received.partition(b"\n")
        order: dict[str, object] = json.loads(line)
        return order, commands

    def start(
        self, command: list[str], env: dict[str, str], cwd: str | None, execute: Execute
    ) -> None:
        """Starts the engine as leader of its own session; returns when its program is loaded."""
        read_fd, write_fd = os.pipe()  # closes by itself at exec: then the session exists
        guard_pid = os.getpid()
        self.engine_pid = os.fork()
        if self.engine_pid == 0:
            if self.folder is not None:  # also of a child that becomes no program
                self.folder.close()
            _become(command, env, cwd, guard_pid, execute)
        os.close(write_fd)
        os.read(read_fd, 1)
        os.close(read_fd)
        self.write_record()
        self.report(f"started {guard_pid} {self.engine_pid}")

    def make_folder(self) -> str:
        """A folder of this engine alone, removed with it, or empty if there can be none.

        It is locked until this process ends.
        """
        path = folder_path(os.environ[TOKEN_VARIABLE])
        try:
            self.folder = OwnFolder.make(path, fcntl.LOCK_EX)
        except OSError as error:  # the engine runs without; its files stay where they usually are
            print(f"guard: cannot make {path}: {error}", file=sys.stderr)
            return ""
        return path

    def watch(self, commands: bytes) -> None:
        """Carries out the owner's commands; returns when the engine exited or has to go now."""
        poll = select.poll()
        for fd in (self.command_fd, self.wakeup_fd, self.owner_fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while not self.must_go(commands) and self.exit_status is None:
            commands = b""
            ready = poll.poll(None if self.is_ready or not self.cleanup else 1000 * START_NOTES_S)
            if not ready:
                self.note(mapped_files if self.has_new_files() else _open_files)
            for fd, _ in ready:
                if fd == self.owner_fd:
                    return
                if fd == self.wakeup_fd:
                    _drain(fd)
                    self.reap()
                elif not (commands := os.read(fd, 4096)):
                    return

    def must_go(self, commands: bytes) -> bool:
        if b"n" in commands:
            self.is_ready = True
            self.note(mapped_files)
            self.report("noted")
        if b"t" in commands and self.exit_status is None:
            self.note(mapped_files)  # what it made while it served; a kill cannot wait for it
            os.killpg(self.engine_pid, signal.SIGTERM)
        return b"k" in commands

    def reap(self) -> bool:
        """Takes in every process that ended; True while any of the engine's is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # No children, so no descendants: orphans would be our children.
                return False
            if pid == 0:
                return True
            self.seen_pids.add(pid)
            if pid == self.engine_pid:
                self.exit_status = os.waitstatus_to_exitcode(status)
                self.report(f"exited {self.exit_status}")

    def end(self) -> None:
        """Kills the remaining processes and reports when none is left."""
        self.note_now()
        not_before = time.monotonic() + (0 if self.exit_status is None else LEFTOVER_GRACE_S)
        killed: set[int] = set()
        pause_s = 0.002
        while self.reap():
            if time.monotonic() >= not_before:
                if not killed and not self.is_ready:
                    # What starts makes files until it is stopped.
                    self.stop_all()
                    self.note_now()
                # A walk of /proc is no snapshot and new processes may be born: again until none.
                for pid in _descendants(os.getpid()):
                    _signal(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)
        self.seen_pids |= killed
        remove_files(self.leftovers(), self.began_s)
        if self.folder is not None:
            try:
                self.folder.remove()
            except OSError as error:
                print(f"guard: cannot remove {self.folder.path}: {error}", file=sys.stderr)
        self.report(f"gone {len(killed)}")

    def stop_all(self) -> None:
        """Stops every process of the engine where it is."""
        stopped: set[int] = set()
        while new := set(_descendants(os.getpid())) - stopped:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new

    def note(self, files_of: Callable[[int], list[str]]) -> None:
        """Remembers the processes there are and the shared memory they hold."""
        if not self.cleanup:
            return
        pids = _descendants(os.getpid())
        self.seen_pids.update(pids)
        for pid in pids:
            self.seen_files.update(files_of(pid))
        self.write_record()

    def note_now(self) -> None:
        """The same in the moment of an end: mappings only of what starts and has new files."""
        is_new = bool(self.cleanup) and not self.is_ready and self.has_new_files()
        self.note(mapped_files if is_new else _open_files)

    def has_new_files(self) -> bool:
        """Whether there are files since the last call that are removed if the engine holds them.

        It maps its own before they have their names.  Without new ones, the mappings of a process
        with a GPU need not be read, which are tens of thousands.
        """
        import fnmatch

        patterns = [pattern for pattern in self.cleanup if "{pid}" not in pattern]
        with os.scandir(SHARED_MEMORY) as entries:
            found = {
                (entry.path, entry.inode())
                for entry in entries
                if any(fnmatch.fnmatchcase(entry.path, pattern) for pattern in patterns)
            }
        is_new = not found <= self.looked_at
        self.looked_at = found
        return is_new

    def write_record(self) -> None:
        """Replaces the record by one of what is known now, or keeps it if that cannot be."""
        if self.folder is None:
            return
        record = {
            "name": self.name,
            "engine": [self.engine_pid, started_at(self.engine_pid)],
            "place": place(),
            "files": self.leftovers(),
            "since_s": self.began_s,
        }
        try:
            self.folder.replace(RECORD, json.dumps(record).encode())
        except OSError as error:  # only a crash of both would miss it
            print(f"guard: cannot write {RECORD} of {self.folder.path}: {error}", file=sys.stderr)

    def leftovers(self) -> list[str]:
        """Patterns of the files to remove: any with an ended ``{pid}``, other names if held open.

        A pattern without ``{pid}`` could name a living neighbour's file, so it only counts for
        files that this engine was seen to hold.  One with it could, too, in another container: see
        ``remove_files``.
        """
        import fnmatch
        import glob

        found = set()
        for pattern in self.cleanup:
            if "{pid}" in pattern:
                found |= {pattern.replace("{pid}", str(pid)) for pid in self.seen_pids}
            else:
                held = {name for name in self.seen_files if fnmatch.fnmatchcase(name, pattern)}
                found |= {glob.escape(name) for name in held}
        return sorted(found)

    def report(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone
            os.write(self.report_fd, line.encode() + b"\n")


def _become(
    command: list[str], env: dict[str, str], cwd: str | None, guard_pid: int, execute: Execute
) -> None:
    """In the child: becomes the engine.  Never returns."""
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard_pid:
            os._exit(127)  # the guard died before the line above could take effect
        signal.set_wakeup_fd(-1)
        for number in (*_IGNORED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if cwd is not None:
            os.chdir(cwd)
        execute(command[0], command, env)
    except Exception as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when ``pid`` ends; -1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(0)  # the owner is gone and nothing was started
    except (AttributeError, OSError):
        return -1


def _descendants(root: int) -> list[int]:
    """Processes below ``root``, the oldest generation first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    # The second field is the program's name in brackets and may hold anything.
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def folder_path(token: str) -> str:
    """The folder of the engine with this token.

    Of a fixed length, whatever the temporary folder: a socket's whole path has at most 107 bytes.
    """
    return f"{FOLDER_PREFIX}{token}"


def place() -> list[str]:
    """Where a pid means one process: a start of the machine, and a container on it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.readlink("/proc/self/ns/pid")]


def started_at(pid: int) -> int:
    """When it started, in ticks since the boot; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def remove_files(patterns: list[str], since_s: float) -> list[str]:
    """Removes leftovers of an engine that began then; returns what stays, for somebody holds it.

    Only files of this user that no process has open or mapped, and no older ones: the same pid is
    another process in another container.
    """
    import glob

    names = [name for pattern in patterns for name in glob.glob(pattern)]
    return [name for name in names if not remove_unused_file(name, since_s)]


def _open_files(pid: int) -> list[str]:
    """Shared memory that ``pid`` holds open.  Quick enough for the moment of a kill."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []  # it ended meanwhile
    found: list[str] = []
    for fd in fds:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith(f"{SHARED_MEMORY}/"):
            found.append(target)
    return found


def mapped_files(pid: int) -> list[str]:
    """Shared memory that ``pid`` holds open or mapped, named semaphores among it.

    A process with a GPU has tens of thousands of mappings, so this is for quiet moments.  Found
    by inode, since the C library maps a semaphore before it gives it its name.
    """
    inodes: set[int] = set()
    try:
        with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
            inodes.update(
                int(line.split(None, 5)[4]) for line in file if f"{SHARED_MEMORY}/" in line
            )
    except OSError:
        return []
    with os.scandir(SHARED_MEMORY) as entries:
        mapped = [entry.path for entry in entries if entry.inode() in inodes]
    return mapped + _open_files(pid)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def main(arguments: list[str], execute: Execute = os.execvpe) -> None:
    """Guards the engine whose order comes through the first pipe, until all of it is gone.

    Args:
        execute: makes a child of the guard the engine's program, and does not return.
    """
    command_fd, report_fd, owner_pid = map(int, arguments)
    if os.fork():
        os._exit(0)
    guard = Guard(command_fd, report_fd, owner_pid)
    guard.detach()
    received = guard.read_order()
    if received is None:
        return
    order, commands = received
    guard.cleanup, guard.name = order["cleanup"], order["name"]  # type: ignore[assignment]
    try:
        if b"k" not in commands:  # else the owner gave up before there was anything to start
            env: dict[str, str] = order["env"]  # type: ignore[assignment]
            folder = guard.make_folder()
            variable = str(order["folder_variable"])
            if folder and variable and variable not in env:
                env[variable] = folder
            guard.start(order["command"], env, order["cwd"], execute)  # type: ignore[arg-type]
            guard.watch(commands)
    finally:
        guard.end()


if __name__ == "__main__":
    main(sys.argv[1:])
