"""What CI runs besides the tests: the sum of the runs, the audit of the pins, the Pythons."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement

from rollout.weights.store.node.base_folder import base_folder
from tests import conftest
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[1]


def closing_lines(folder: Path, status: int = 0) -> list[str]:
    """What CI prints about the suites in a folder, without the time they took."""
    command = [sys.executable, str(ROOT / ".ci/closing_line.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return [re.sub(r"^== | in [\d.]+s ==$", "", line) for line in done.stdout.splitlines()]


OUTCOMES = """
import psutil
import pytest
def test_a(): ...
def test_b(): assert 0
@pytest.mark.skip
def test_c(): ...
@pytest.mark.xfail
def test_d(): assert 0
@pytest.fixture
def wrong(): assert 0
def test_e(wrong): ...
@pytest.mark.parametrize("text", ["<&", "\\x00 \\u00e9"])
def test_f(text): ...
"""


def test_the_counts_of_all_runs_are_added_up_as_pytest_counts(tmp_path: Path) -> None:
    first = tmp_path / "test-fast/first/3.11"
    first.mkdir(parents=True)
    (first / "test_one.py").write_text(OUTCOMES)
    (first / "test_two.py").write_text("import absent")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--continue-on-collection-errors", "--junitxml=test.xml"],
        cwd=first,
        capture_output=True,
        text=True,
        timeout=60,
    )
    counts = "1 failed, 3 passed, 1 skipped, 1 xfailed, 2 errors"
    assert f"= {counts} in " in done.stdout.splitlines()[-1]
    assert closing_lines(tmp_path) == [counts]
    shutil.copytree(first, first.with_name("3.13"))
    assert closing_lines(tmp_path) == ["2 failed, 6 passed, 2 skipped, 2 xfailed, 4 errors"]


def report(run: Path, **tests: str) -> None:
    """Write the report of a run with these tests; each has an element, or passes."""
    run.mkdir(parents=True)
    cases = (
        f'<testcase file="tests/test_one.py" name="{name}">{element}</testcase>'
        for name, element in tests.items()
    )
    (run / "test.xml").write_text(f'<testsuite time="2">{"".join(cases)}</testsuite>')


def test_what_failed_counts_as_it_ended_when_run_again(tmp_path: Path) -> None:
    report(tmp_path / "test/first", test_a="", test_b="<failure/>", test_c="<error/>")
    report(tmp_path / "test/again", test_b="", test_c="<error/>")
    assert closing_lines(tmp_path) == [
        "failed once, and passed when run again:",
        "tests/test_one.py::test_b",
        "2 passed, 1 error",
    ]


def test_what_ended_without_a_report_when_run_again_has_failed(tmp_path: Path) -> None:
    report(tmp_path / "test/first", test_a="<failure/>")
    (tmp_path / "test/again").mkdir()
    assert closing_lines(tmp_path) == ["1 failed"]


def test_without_a_run_nothing_is_claimed_and_it_fails(tmp_path: Path) -> None:
    assert closing_lines(tmp_path / "absent", status=1) == []


def test_each_suite_writes_a_report_with_its_name() -> None:
    suites = ["test", "test-text", "test-slow", "test-fast", "test-vllm", "test-sglang"]
    command = ["make", "-n", *suites, "JUNIT=folder"]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert re.findall(r"--junitxml=(\S+) ", shown) == [f"folder/{suite}.xml" for suite in suites]


MAKE = """#!/bin/sh
printf '%s\\n' "$*" >>calls
printf '%s %s\\n' "$2" "$TEST_LAST_START" >>ends
[ "$1" != system ] || exit 2
case $2 in
$SLOW) sleep ${SLOW_S-2};;
esac
echo "this is $2"
report() {
    mkdir -p "$JUNIT"
    echo "<testsuite time='$1'>" >"$JUNIT/$2.xml"
    for name in $3; do
        echo "<testcase file='tests/test_one.py' name='$name'>$4</testcase>" >>"$JUNIT/$2.xml"
    done
    echo '</testsuite>' >>"$JUNIT/$2.xml"
}
case $2 in
.venv-ci/.installed-dev) mkdir -p .venv-ci/bin; ln -s "$PYTHON" .venv-ci/bin/python; exit;;
lint) [ TARGET != lint ]; exit;;
TARGET)
    case "$*$TWICE" in
    *PYTEST_ARGS*twice) report 1 test test_it '<failure/>'; exit 2;;
    *PYTEST_ARGS*) report 1 test test_it; exit;;
    esac
    report 1 test test_it '<failure/>'; report 1 other '1 2 3 4'; exit 2;;
*) report 3 test '1 2 3 4 5 6 7 8 9 10';;
esac
"""


SUITES = {"test", "test-slow", "test-pythons", "test-text", "test-vllm", "test-sglang"}


def start_ci(folder: Path, failing: str, **env: str) -> subprocess.Popen[str]:
    """A CI run in which one test of this target fails, or the target itself."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    make = folder / "bin" / "make"
    make.parent.mkdir()
    # ``a|b)`` is a pattern of the shell; in a variable it would be text.
    text = MAKE.replace("TARGET", failing).replace("$SLOW)", env.get("SLOW", "none") + ")")
    make.write_text(text)
    make.chmod(0o755)
    path = f"{make.parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [str(folder / ".ci" / "run")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PATH": path, "PYTHON": sys.executable, "TWICE": "", **env},
    )


def ci_run(
    folder: Path, failing: str, twice: bool = False, **env: str
) -> tuple[int, list[str], list[str]]:
    """Its status and output, and its calls of `make`."""
    running = start_ci(folder, failing, TWICE="twice" * twice, **env)
    output, _ = running.communicate(timeout=60)
    calls = (folder / "calls").read_text().splitlines()
    return running.returncode, output.splitlines(), calls


def begun(calls: list[str]) -> set[str]:
    """The targets, without that of the packages of the system."""
    return {call.split()[1] for call in calls[1:]}


def sleepers(folder: Path) -> list[int]:
    """What the slow suites of a CI run wait for."""
    return [
        process.pid
        for process in psutil.process_iter(["cwd", "name"])
        if process.info["name"] == "sleep" and process.info["cwd"] == str(folder)
    ]


def test_a_test_that_fails_once_in_ci_runs_again_alone_and_is_listed(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path, "test-slow")
    assert status == 0, output
    assert "== the tests that need these packages are skipped" in output
    again = [call for call in calls if "PYTEST_ARGS" in call]
    assert again == [
        "VENV=.venv-ci test-slow PYTEST_ARGS=--last-failed --last-failed-no-failures none"
    ]
    at = output.index("== failed once, and passed when run again:")
    assert output[at + 1 :] == ["tests/test_one.py::test_it", "== 55 passed in 18.00s =="]


def test_a_test_that_fails_twice_fails_ci_after_the_other_suites(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path, "test", twice=True)
    assert status == 1
    assert begun(calls) >= SUITES
    assert output[-2:] == ["== failed: test", "== 1 failed, 54 passed in 18.00s =="]


def test_what_lint_finds_fails_ci_after_the_suites(tmp_path: Path) -> None:
    status, output, calls = ci_run(tmp_path, "lint")
    assert status == 1
    assert begun(calls) >= SUITES
    assert output[-2:] == ["== failed: lint docs", "== 60 passed in 18.00s =="]


def test_the_output_of_the_second_lane_is_whole_and_comes_after_the_first(tmp_path: Path) -> None:
    _, output, _ = ci_run(tmp_path, "none")
    lines = [line for line in output if line.startswith(("this is lint", "this is test"))]
    first, second = ["test", "test-slow", "test-vllm", "test-sglang"], ["test-text", "test-pythons"]
    assert lines == [f"this is {suite}" for suite in (*first, "lint", *second)]


def test_an_interrupted_ci_interrupts_both_lanes(tmp_path: Path) -> None:
    """Ctrl-C reaches the first by the terminal."""
    running = start_ci(tmp_path, "none", SLOW="test-slow|test-text", SLOW_S="100")
    assert wait_until(lambda: len(sleepers(tmp_path)) == 2, 30)
    both = sleepers(tmp_path)
    os.killpg(running.pid, signal.SIGINT)
    output, _ = running.communicate(timeout=30)
    assert running.returncode != 0
    assert "this is lint" in output
    assert not any(map(psutil.pid_exists, both))


def test_a_suite_that_would_begin_too_late_in_ci_is_named_and_not_run(tmp_path: Path) -> None:
    status, output, calls = ci_run(
        tmp_path, "none", CI_LAST_START_S="1", SLOW="test-slow|test-text"
    )
    assert status == 0
    assert begun(calls) & SUITES == SUITES - {"test-pythons", "test-vllm", "test-sglang"}
    (line,) = (line for line in output if "not begun" in line)
    assert line.startswith("== after 0 minutes these were not begun: ")
    assert set(line.partition(": ")[2].split()) == {"test-pythons", "test-vllm", "test-sglang"}
    assert output[-1] == "== 30 passed in 9.00s =="


def test_a_ci_that_begins_no_suite_fails(tmp_path: Path) -> None:
    """As after an hour of installations."""
    status, output, calls = ci_run(tmp_path, "none", CI_LAST_START_S="-1")
    assert status == 1
    installed = "VENV=.venv-ci .venv-ci/.installed-dev .venv-ci/.installed-docs"
    assert calls == ["system", installed, "VENV=.venv-ci lint docs"]
    assert output[-1] == "no suite of tests has run"


@pytest.mark.parametrize(("left_s", "counts"), [(60, "1 passed"), (-1, "1 skipped")])
def test_a_test_that_would_begin_too_late_is_skipped_before_its_fixtures(
    tmp_path: Path, left_s: float, counts: str
) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_setup\n")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef made(): print('made')\n\ndef test_it(made): ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsP", str(tmp_path)]
    env = {**os.environ, "TEST_LAST_START": str(time.time() + left_s)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert f"= {counts} in" in done.stdout
    assert ("no time left" in done.stdout, "made" in done.stdout) == (left_s < 0, left_s > 0)


def test_ci_ends_its_tests_and_not_those_that_run_again(tmp_path: Path) -> None:
    began_s = time.time()
    ci_run(tmp_path, "test-slow", CI_LAST_START_S="100")
    ends = (tmp_path / "ends").read_text().splitlines()
    assert sorted(end.partition(" ")[0] for end in ends if not end[-1].isdigit()) == [
        "",
        ".venv-ci/.installed-dev",
        "lint",
        "test-slow",
    ]
    last = [float(end.partition(" ")[2]) - began_s for end in ends if end[-1].isdigit()]
    assert len(last) == 6
    assert all(98 < one < 130 for one in last)


LIBRARIES = ("libibverbs.so.1", "libnuma.so.1", "libcurl.so.4")
PROGRAMS = ("chromium", "prometheus")


def install_system(folder: Path, there: tuple[str, ...], *, apt_status: int = 0) -> Any:
    """A run of .ci/system.sh on a machine that has these programs and libraries, and its calls."""
    folder.mkdir()
    commands = {
        "apt-get": f'echo "apt-get $*" >>{folder}/calls; exit {apt_status}',
        "sudo": 'shift; exec "$@"',
        "ldconfig": f"echo {' '.join(there)}",
        **{name: "" for name in PROGRAMS if name in there},
    }
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "grep", "id", "sh"):
        (folder / name).symlink_to(str(shutil.which(name)))
    script = (ROOT / ".ci/system.sh").read_text().replace(":/usr/sbin:/sbin", "")
    done = subprocess.run(
        [str(folder / "bash"), "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(folder)},
    )
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_packages_of_the_system_are_installed_only_where_they_are_missing(tmp_path: Path) -> None:
    done, calls = install_system(tmp_path / "whole", PROGRAMS + LIBRARIES)
    assert (done.returncode, done.stdout, calls) == (0, "", [])
    done, calls = install_system(tmp_path / "bare", ("prometheus", *LIBRARIES[1:]))
    assert done.returncode == 0, done.stderr
    install = "apt-get install -q -y --no-install-recommends chromium libibverbs1"
    assert [call.split(" -o ")[0] for call in calls] == ["apt-get update -q", install]


def test_where_they_cannot_be_installed_a_line_names_them(tmp_path: Path) -> None:
    done, _ = install_system(tmp_path / "bare", LIBRARIES, apt_status=100)
    assert done.returncode == 1
    assert "apt-get update && apt-get install" in done.stderr
    assert "chromium prometheus" in done.stderr


def audited(folder: Path, answers: dict[str, Any], **more: str) -> tuple[int, str]:
    """Status and output of an audit whose pip-audit answers so, by service."""
    tool = folder / "pip-audit"
    tool.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"answer = {answers!r}.get(sys.argv[sys.argv.index('--vulnerability-service') + 1])\n"
        "sys.exit('no such host') if answer is None else print(json.dumps(answer))\n"
    )
    tool.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"}
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/audit.py"), str(tool), "constraints.txt"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, **more},
    )
    return done.returncode, done.stdout


WELL = {"name": "a", "version": "1", "vulns": []}
ILL = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def test_an_audit_that_could_look_nothing_up_neither_fails_nor_passes_in_silence(
    tmp_path: Path,
) -> None:
    silent = {"pypi": {"dependencies": [UNKNOWN, UNKNOWN]}}
    status, told = audited(tmp_path, silent)
    assert (status, told.splitlines()[-1].startswith("audit: NOTHING WAS AUDITED")) == (0, True)
    assert audited(tmp_path, silent, GITHUB_ACTIONS="true")[1].startswith("::warning title=audit::")


def test_a_vulnerable_pin_fails_the_audit_with_what_mends_it(tmp_path: Path) -> None:
    status, told = audited(tmp_path, {"pypi": {"dependencies": [WELL, ILL]}})
    assert status == 1
    assert "b 2: CVE-1; fixed in 3" in told
    assert "2 of 2 pins looked up in pypi: 1 vulnerable" in told


def test_pins_that_could_not_be_looked_up_are_named(tmp_path: Path) -> None:
    status, told = audited(tmp_path, {"pypi": {"dependencies": [WELL, UNKNOWN]}})
    assert status == 0
    assert "1 pins are not in pypi, and were not audited: c" in told
    assert "1 of 2 pins looked up" in told


def test_another_database_is_asked_where_the_first_knows_nothing(tmp_path: Path) -> None:
    answers = {"pypi": {"dependencies": [UNKNOWN]}, "osv": {"dependencies": [ILL]}}
    status, told = audited(tmp_path, answers)
    assert status == 1
    assert "looked up in osv" in told


def supported() -> tuple[str, list[str]]:
    """The oldest version and the named minor versions of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    return project["requires-python"].removeprefix(">="), named


def install(folder: Path, name: str, version: str) -> Path:
    """A program that says it is this Python; without a version it does not run."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / name
    numbers = version.replace(".", " ")
    # ``sys.exit(...)``, make's question, is answered by a real interpreter with this version.
    python.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.version_info = tuple(map(int, '{numbers}'.split()))\n"
        "if not sys.version_info: sys.exit('command not found')\n"
        "if sys.argv[1] == '--version': sys.exit('Python of a test')\n"
        "exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    return python


def pythons(folder: Path) -> tuple[list[str], str]:
    """What CI would run on, and what it prints about it, with these folders only."""
    done = subprocess.run(
        [sys.executable, str(ROOT / ".ci/pythons.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": str(folder / "bin"), "PYENV_ROOT": str(folder / "pyenv")},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def collected(folder: Path, line: str) -> str:
    """What pytest reports of a module with this line, where torch is not installed."""
    (folder / "conftest.py").write_text("import sys\nsys.modules['torch'] = None\n")
    (folder / "test_one.py").write_text(f"{line}\n\ndef test_nothing(): ...\n")
    plugin = ("-p", "tests.support.optional_packages")
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout


SEMAPHORE = """import multiprocessing as mp, sys
lock = mp.get_context("spawn").Lock()
print("sem." + lock._semlock.name[1:], flush=True)
sys.stdin.read()
"""


def test_a_semaphore_of_another_run_is_not_what_the_tests_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", SEMAPHORE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        name = other.stdout.readline().strip()
        assert (conftest.SHARED_MEMORY / name).exists()
        assert not conftest.used_by_others(name, os.environ[conftest.MARK])  # it is a child
        monkeypatch.setattr(conftest, "processes_of", lambda run_id: {})
        assert conftest.used_by_others(name, "")
        other.stdin.close()
        assert other.wait(30) == 0


def test_the_folder_of_the_store_may_be_of_another_run_while_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_id = os.environ[conftest.MARK]
    name = base_folder("/dev/shm").name
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    env = {**os.environ, conftest.MARK: "another"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout
        other.stdout.readline()
        found = [psutil.Process()]
        monkeypatch.setattr(psutil, "process_iter", lambda: found)
        assert not conftest.used_by_others(name, run_id)
        found.append(psutil.Process(other.pid))
        assert conftest.used_by_others(name, run_id)
        other.kill()


LEFT_OUT = "left out: 1 tests and test modules, torch is not installed"


def test_modules_that_need_a_missing_package_are_counted_and_other_errors_stay(
    tmp_path: Path,
) -> None:
    output = collected(tmp_path, "import torch")
    assert LEFT_OUT in output
    assert "= 1 deselected in" in output
    assert "= 1 error in" in collected(tmp_path, "import torhc")


def test_only_what_lacks_an_optional_package_is_left_out_and_not_skipped(tmp_path: Path) -> None:
    output = collected(tmp_path, "import pytest; torch = pytest.importorskip('torch')")
    assert LEFT_OUT in output
    assert "= 1 deselected in" in output
    other = collected(tmp_path, "import pytest; pytest.skip('no GPU', allow_module_level=True)")
    assert "= 1 skipped in" in other


def test_the_fast_tests_install_neither_torch_nor_ray() -> None:
    """Else each of their environments has gigabytes of CUDA."""
    (extras,) = re.findall(r"^FAST_EXTRAS := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [project["optional-dependencies"][extra] for extra in extras.split(",")]
    found, new = set[str](), [*project["dependencies"], *itertools.chain(*parts)]
    while new:
        one = Requirement(new.pop())
        if one.name.lower() in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name.lower())
        with suppress(metadata.PackageNotFoundError):
            new += metadata.requires(one.name) or []
    assert {"pytest", "pyarrow", "pygments"} <= found
    assert not {"torch", "ray", "transformers"} & found


def test_the_lowest_and_highest_versions_of_all_extras_are_tested_weekly() -> None:
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text()
    assert "resolution: [lowest-direct, highest]" in weekly
    assert re.search(r"run: make test-versions .*RESOLUTION=\$\{\{ matrix.resolution }}", weekly)
    command = ["make", "-n", "test-versions", "PYTEST_ARGS="]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_pip = {*project["optional-dependencies"]} - {
        "all",
        "sglang",
        "vllm",
        "fuzz",
    }  # a sum; CUDA; a tool
    assert set(re.findall(r"--extra (\w+)", shown)) == of_pip
    folders = re.findall(r" ((?:tests|examples)\S*)", shown.partition(" -m pytest ")[2])
    assert "tests/engines/embedded" in folders
    assert [name for name in folders if not (ROOT / name).exists()] == []


OF_KINDS = """
import psutil
import pytest
from tests.support.kinds import not_for

@not_for("fake", 2)
@pytest.mark.parametrize("kind", ["fake", "real", 2, 3])
def test_it(kind): ...
"""


def test_what_is_not_for_a_kind_is_left_out_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.support.kinds import leave_out\n"
        "def pytest_collection_modifyitems(config, items): leave_out(config, items)\n"
    )
    (tmp_path / "test_kinds.py").write_text(OF_KINDS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r"test_it\[(\w+)\] PASSED", output) == ["real", "3"]
    assert "= 2 passed, 2 deselected" in output


HERE = ".".join(map(str, sys.version_info[:3]))


def test_the_fast_tests_run_on_the_oldest_and_the_newest_python(tmp_path: Path) -> None:
    oldest, (_, middle, newest) = supported()
    first = install(tmp_path / "bin", "python3", oldest)
    install(tmp_path / "bin", "python3.12", middle + ".99")
    last = install(tmp_path / "pyenv/versions/x/bin", "python3.13", newest + ".99")
    # Not tried: too old, newer than the named ones, and a shim that does not run.
    install(tmp_path / "pyenv/versions/y/bin", "python3.11", "3.11.0")
    install(tmp_path / "pyenv/versions/z/bin", "python3", "3.99.0")
    install(tmp_path / "bin", "python3.13", "")
    run_on, told = pythons(tmp_path)
    assert run_on == [str(first), str(last)]
    found = {oldest, middle + ".99", newest + ".99", HERE}
    assert set(told.splitlines()[0].removeprefix("Pythons here: ").split(", ")) == found
    assert "not supported: 3.11.0, 3.99.0\n" in told
    assert f"the fast tests run on: {oldest}, {newest}.99\n" in told


def test_where_there_is_one_python_no_other_run_is_made(tmp_path: Path) -> None:
    run_on, told = pythons(tmp_path)
    assert run_on == []
    assert f"Pythons here: {HERE}\n" in told
    assert "the fast tests run on: none\n" in told


def test_make_takes_no_python_that_pip_would_refuse(tmp_path: Path) -> None:
    oldest, _ = supported()
    *before, patch = map(int, oldest.split("."))
    too_old = install(tmp_path / "bin", "python3", ".".join(map(str, (*before, patch - 1))))
    done = subprocess.run(
        ["make", f"VENV={tmp_path}/venv", f"PYTHON={too_old}", f"{tmp_path}/venv/bin/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert f"ray-rollout needs Python {oldest} or newer. Tried:\n  {too_old}" in done.stderr
    assert not (tmp_path / "venv").exists()


async def test_a_timeout_in_the_clean_up_of_a_cancelled_task_is_a_timeout_error() -> None:
    """Before 3.11.3 it is a CancelledError (CPython gh-102780), and the clean-up ends there."""
    expired = asyncio.Event()

    async def clean_up_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                expired.set()

    task = asyncio.create_task(clean_up_late())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert expired.is_set()


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/installation.md"])
def test_the_words_name_the_oldest_python_of_the_metadata(page: str) -> None:
    named = re.findall(r"Python (3[.\d]*\d) or newer", (ROOT / page).read_text())
    assert named == [supported()[0]]
