"""What holds for the whole run: it leaves no process and no shared memory behind."""

import gc
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from engines.process import guarded_process
from rollout.weights.store.node.base_folder import base_folder
from tests.support import kinds, optional_packages
from tests.support.cpu_property import (  # hooks of pytest
    pytest_runtest_logstart,
    pytest_runtest_makereport,
)
from tests.support.forking.starts import STARTS
from tests.support.longest_first import longest_first, read_durations
from tests.support.optional_packages import (
    pytest_make_collect_report,
    pytest_terminal_summary,
)
from tests.support.processes import wait_until
from tests.support.ray_worlds import RayWorld, actors_of_runs, ray_world
from tests.support.runs import FOLDER_OF_A_TEST, MARK

__all__ = [
    "pytest_make_collect_report",
    "pytest_runtest_logstart",
    "pytest_runtest_makereport",
    "pytest_terminal_summary",
]

# A shell ignores these for what it starts in the background, and whatever we start inherits it: no
# test could then end anything as Ctrl-C does.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

# Hypothesis fails an example that takes 0.2 s, and examples that are made slowly, which is a matter
# of what else this machine does.
_SLOW = [HealthCheck.too_slow]
settings.register_profile("few", max_examples=50, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("many", settings.get_profile("few"), max_examples=2000)
settings.load_profile("few")  # docs/testing.md has the command for the other one

SHARED_MEMORY = Path("/dev/shm")
# Their engines and ranks are started by exec, as in production.
NOT_FORKING = ("exec", "gpu")
# A process that the last test stopped may still be exiting.
GRACE_S = 20.0


def processes_of(run_id: str) -> dict[int, str]:
    """What the run that set ``run_id`` started, at any remove: pid and command line."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        try:
            is_ours = process.pid in children or process.environ().get(MARK) == run_id
            command = " ".join(process.cmdline())
            is_over = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        # The tracker serves multiprocessing inside this process, and ends with it.
        is_tracker = "multiprocessing.resource_tracker" in command
        if is_ours and not is_tracker and not is_over and process.pid != os.getpid():
            found[process.pid] = command
    return found


def is_another_run_there(run_id: str) -> bool:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK, run_id) != run_id:
                return True
    return False


def used_by_others(name: str, run_id: str) -> bool:
    """Whether a process that is not of this run has the shared memory open or mapped.

    Of a folder: something in it, or a test of another run made it or may have made it.
    """
    if name.startswith(FOLDER_OF_A_TEST):
        return not name.startswith(f"{FOLDER_OF_A_TEST}{run_id}")
    # Of all runs of this user; who uses it last removes it.
    if name == base_folder("").name:
        return is_another_run_there(run_id)
    ours = {os.getpid(), *processes_of(run_id)}
    path = str(SHARED_MEMORY / name)
    try:
        # A mapped semaphore has another name in its process, but this number.
        number = f" {os.stat(path).st_ino} "
    except FileNotFoundError:
        return True
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            mapped = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            if any(number in line and f" {SHARED_MEMORY}/" in line for line in mapped):
                return True
            descriptors = Path(f"/proc/{process.pid}/fd").iterdir()
            opened = [f"{os.path.realpath(descriptor)}/" for descriptor in descriptors]
            if any(f"{path}/" in line for line in [*mapped, *opened]):
                return True
        except OSError:
            continue
    return False


def left_behind(run_id: str, shared_memory_before: set[str]) -> list[str]:
    """What this run started or made and is still there, each with its name."""
    left = [f"process {pid}: {line[:200]}" for pid, line in processes_of(run_id).items()]
    if SHARED_MEMORY.is_dir():
        new = sorted(set(os.listdir(SHARED_MEMORY)) - shared_memory_before)
        left += [f"{SHARED_MEMORY / name}" for name in new if not used_by_others(name, run_id)]
    return left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    optional_packages.pytest_collection_modifyitems(items)
    kinds.leave_out(config, items)
    longest_first(items, read_durations())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that would begin after this time, in seconds since 1970, is skipped: CI has to end."""
    is_exec = os.environ.get("TEST_EXEC") or any(map(item.get_closest_marker, NOT_FORKING))
    STARTS.is_forking = not is_exec
    if time.time() > float(os.environ.get("TEST_LAST_START", "inf")):
        pytest.skip("there is no time left to begin it")


def pytest_collection_finish() -> None:
    """No garbage collection in a test looks at what the modules made, which takes 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail the run, naming them, if processes or shared memory of its own outlive it."""
    run_id = uuid.uuid4().hex
    os.environ[MARK] = run_id
    before = set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
    yield
    left = left_behind(run_id, before)

    def nothing_is_left() -> bool:
        # Only what was there at once can be ours: another run on this machine makes files too.
        still = left_behind(run_id, before)
        left[:] = [name for name in left if name in still]
        return not left

    if left and not wait_until(nothing_is_left, GRACE_S):
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def forked_starts(nothing_is_left_behind: None) -> Iterator[None]:
    """Engines are forked where that gives what ``exec`` gives: ``tests/support/forking``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded_process, "start_guard", STARTS.start_guard)
        yield
    STARTS.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayWorld]:
    """One cluster for all tests of this process: a second one in it is not possible."""
    with ray_world() as world:
        yield world


@pytest.fixture(scope="module", autouse=True)
def no_actor_is_left() -> Iterator[None]:
    """Fail the file that leaves actors, which the next one finds in their common cluster."""
    before = set(actors_of_runs())
    yield

    def left() -> list[str]:
        return sorted(set(actors_of_runs()) - before)

    if left() and not wait_until(lambda: not left(), GRACE_S):
        pytest.fail(f"actors of this file's runs are left: {left()}", pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Save what ``make coverage`` measured: xdist ends a worker that takes ten seconds to exit."""
    if (coverage := sys.modules.get("coverage")) and (measured := coverage.Coverage.current()):
        measured.save()
