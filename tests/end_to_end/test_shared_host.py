"""Two containers with one ``/dev/shm``: neither loses a file, a process or a version."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout.testing.tiny_model import make_tiny_model

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TENANT = [sys.executable, "-m", "tests.support.tenant"]
# A proc of its own, so that pids are those of this container, and the same few in both.
CONTAINER = ["unshare", "--pid", "--ipc", "--mount", "--mount-proc", "--fork", "--kill-child"]
ROUNDS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def run(before: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, *TENANT, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        input="",
    )


def rounds_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


# A /dev/shm for this test alone, in which two containers begin at once.
HOST = """
mount -t tmpfs -o size=1g,mode=1777 none /dev/shm || exit 77
"$@" "$FOLDER/one" one "$ROUNDS" 1.5 > "$FOLDER/one.out" & first=$!
"$@" "$FOLDER/two" two "$ROUNDS" 0.5 > "$FOLDER/two.out" & second=$!
wait $first && wait $second && ls -A /dev/shm > "$FOLDER/left"
"""


def test_two_containers_push_kill_recover_and_clean_up(model: Path, tmp_path: Path) -> None:
    if subprocess.run([*CONTAINER, "true"], check=False).returncode:
        pytest.skip("this user may make no namespaces")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", HOST, "sh", *CONTAINER, *TENANT, str(model)],
        cwd=ROOT,
        env=os.environ | {"FOLDER": str(tmp_path), "ROUNDS": str(ROUNDS)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this user may mount nothing")
    assert done.returncode == 0, done.stderr[-3000:]
    found = [rounds_of((tmp_path / f"{name}.out").read_text()) for name in ("one", "two")]
    assert [len(rounds) for rounds in found] == [ROUNDS, ROUNDS]
    for rounds in found:
        for each in rounds:
            assert (each["state"], each["version"]) == ("serving", 3)
            assert each["engines"] == 2, "an engine was lost that its own run did not kill"
            assert each["served"][1] == each["served"][2], "it came back with other weights"
            assert each["served"] == rounds[0]["served"]
    one, two = (rounds[0]["served"] for rounds in found)
    assert not set(one) & set(two)
    # The last round of both ended in order; nothing is left of those that were killed either.
    assert (tmp_path / "left").read_text() == ""


# -- every name that a run uses ---------------------------------------------------------------

_CALLS = "open,openat,openat2,creat,mkdir,mkdirat,unlink,unlinkat,rmdir,rename,renameat,renameat2,"
_CALLS += "link,linkat,symlink,symlinkat,mknod,mknodat,chmod,fchmodat,truncate"
_LINE = re.compile(r"^\d+ +(\w+)\((.*)\) = (-?\d+)")
_TEXT = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
# What Python, Ray's and torch's libraries make and remove for themselves.
THEIRS = re.compile(
    r"/(proc|sys|dev/(null|tty|urandom|pts|ptmx|nvidia[^/]*))(/|$)"
    r"|/__pycache__/|^/dev/shm/(sem\.|psm_|torch_|__KMP)|\.cache/|^/tmp/[\w-]*$"
)
_READ_ONLY = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC")


def changes(trace: Path, cwd: str) -> list[tuple[str, str, str]]:
    """The calls that change a name or write a file: name of the call, path, all of it."""
    found = []
    for line in trace.read_text(errors="replace").splitlines():
        matched = _LINE.match(line)
        if matched is None:
            continue
        call, arguments, result = matched.groups()
        if int(result) < 0:
            continue
        if call.startswith("open") and not any(flag in arguments for flag in _READ_ONLY):
            continue
        for folder, name in _TEXT.findall(arguments):
            path = os.path.normpath(os.path.join(folder or cwd, name))
            found.append((call, path, arguments))
            if call.startswith("symlink"):  # the first is what the link says
                found.pop()
                path = os.path.normpath(os.path.join(cwd, _TEXT.findall(arguments)[-1][1]))
                found.append((call, path, arguments))
                break
    return found


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_outside_of_its_folder_a_run_uses_names_of_its_own_alone(
    model: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "400", "-e", f"trace={_CALLS}"]
    if subprocess.run([*strace, "-o", os.devnull, "true"], check=False).returncode:
        pytest.skip("this user may trace nothing")
    runs = tmp_path / "runs"
    done = run([*strace, "-o", str(trace)], "drive", model, runs, "traced", 1.5)
    assert done.returncode == 0, done.stderr[-3000:]
    assert rounds_of(done.stdout)[0]["version"] == 3
    made = changes(trace, str(ROOT))
    inside = [change for change in made if change[1].startswith(f"{runs}/")]
    assert len(inside) > 10
    outside = [change for change in made if change not in inside and not THEIRS.search(change[1])]
    base = f"/dev/shm/rollout-store-{os.getuid()}"
    own = re.compile(rf"/dev/shm/rollout-(engine|push)-[^/]+(/|$)|{base}(/|$)")
    strangers = Counter(
        (call, path) for call, path, _ in outside if not own.match(path) and path != str(runs)
    )
    assert strangers == Counter()
    kinds = {own.match(path).group(0).split("-")[1] for _, path, _ in outside if own.match(path)}  # type: ignore[union-attr]
    assert kinds == {"engine", "push", "store"}
    for call, path, arguments in outside:
        is_at_top = path.count("/") == 3
        if call.startswith("mkdir"):
            assert "0700" in arguments, (path, arguments)
        elif call.startswith("open"):
            assert not is_at_top, (path, arguments)
            assert "O_CREAT" not in arguments or "0600" in arguments, (path, arguments)
        else:
            assert call in {
                "unlink",
                "unlinkat",
                "rmdir",
                "rename",
                "renameat",
                "link",
                "linkat",
            } or ("symlink" in call and not is_at_top), (call, path, arguments)
