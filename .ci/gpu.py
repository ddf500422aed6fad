"""``make test-gpu`` on a machine without a network: wheels, an environment of them, and the tests.

    python .ci/gpu.py download FOLDER [PYTHON_VERSION]
    python .ci/gpu.py environment FOLDER VENV
    VENV/bin/python .ci/gpu.py tests PART [PYTEST_ARGUMENT...]

The machine has torch with CUDA, which is too large to bring, and transformers, often older than the
embedded engine needs.  The environment has all packages of the interpreter that makes it; what is
missing, or too old, comes from the folder.  The tests are in parts, each of which ends where a
command may take ten minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 60 << 20
TESTS = ("httpx", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
SAVER = "torch-memory-saver>=0.0.9"
# Large, and every version that can be there will do.
NOT_BROUGHT = ("numpy",)
# Of SGLang, whose wheel is large: with these its own code opens our payloads.
SGLANG_FILES = ("utils/common.py", "utils/patch_torch.py", "weight_sync/tensor_bucket.py")
MOST_SECONDS = 470
_SHORT = ("facts", "saver", "ipc_format", "fingerprint", "ranks")
PARTS = {
    "1": (
        *(f"tests/gpu/test_{name}.py" for name in _SHORT),
        "tests/engines/tensors/test_torch_fingerprint.py",
        "tests/engines/embedded/weights/test_broadcast_receiver.py",
        "tests/rollout/weights/tensors/test_flat_buffers.py",
    ),
    "2": ("tests/gpu/test_embedded.py", "tests/gpu/test_environment.py"),
    "3": ("tests/gpu/test_push.py",),
}
_BULK = "engines/tensors/_bulk"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def requirements() -> list[str]:
    """What the tests import and the machine may lack."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_extras = [
        one
        for one in (*extras["dev"], *extras["embedded"])
        if re.split(r"[<>=]", one)[0] in (*TESTS, "transformers")
    ]
    return [*project["dependencies"], *of_extras, SAVER]


def download(folder: Path, python_version: str) -> int:
    """Fill the folder; its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ["download", "--only-binary=:all:"]
    if python_version:
        wanted += ["--python-version", python_version]
    into = [*_PIP, *wanted, "-d", str(folder), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*into, *requirements()], check=True)
    for name in NOT_BROUGHT:
        for wheel in folder.glob(f"{name}-*.whl"):
            wheel.unlink()
    pins = (ROOT / "engines/cpu/sglang/pins.txt").read_text()
    (sglang,) = re.findall(r"^sglang==\S+", pins, re.MULTILINE)
    with tempfile.TemporaryDirectory() as aside:
        subprocess.run([*_PIP, *wanted, "--no-deps", "-d", aside, sglang], check=True)
        (sources,) = Path(aside).glob("sglang-*.whl")
        with zipfile.ZipFile(sources) as archive:
            for file in SGLANG_FILES:
                path = folder / "sglang" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(f"sglang/srt/{file}"))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def make_environment(wheels: Path, target: Path) -> None:
    """An environment over this interpreter's packages, with what is missing from ``wheels``."""
    if not wheels.is_dir():
        sys.exit(f"{wheels}: no such folder; `make gpu-wheels WHEELS={wheels}` makes it")
    # Without pip of its own: some interpreters have no ensurepip, and this one's pip can do it.
    venv.create(target, system_site_packages=True, with_pip=False, symlinks=True)
    python = target / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    # By name: this interpreter's packages may be in an environment of their own.
    below = "\n".join(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    Path(found.stdout.strip(), "below.pth").write_text(below + "\n")
    offline = ["install", "--no-index", "--find-links", str(wheels)]
    command = [*_PIP, "--python", str(python), *offline, *requirements()]
    subprocess.run(command, check=True)
    if (wheels / "sglang").is_dir():
        shutil.copytree(wheels / "sglang", target / "sglang", dirs_exist_ok=True)
    print(compile_bulk(ROOT / f"{_BULK}.abi3.so"))


def compile_bulk(target: Path) -> str:
    """Compile the copies into host memory, which a wheel would bring; what became of it."""
    slower = "pushes through host memory take Python's copies, at half the speed or less"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return f"{_BULK}.c is not compiled, there is no compiler: {slower}"
    options = ["-O3", "-fvisibility=hidden", "-shared", "-fPIC"]
    partial = target.with_name(f"{target.name}.partial")
    command = [compiler, *options, str(ROOT / f"{_BULK}.c"), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{_BULK}.c is not compiled: {slower}\n{done.stderr}"
    partial.replace(target)  # a process may have the old one open
    return f"{_BULK}.c is compiled"


def run_tests(part: str, arguments: list[str]) -> int:
    """Run one part; its exit status, 124 where it was ended because it took too long."""
    if part not in PARTS:
        sys.exit(f"there is no part {part}; the parts are {', '.join(PARTS)}")
    env = {"PYTHONPATH": str(ROOT), **os.environ}
    if (sources := Path(sys.prefix, "sglang")).is_dir():
        env.setdefault("SGLANG_SOURCES", str(sources))
    # What a version of torch calls deprecated that CI has not seen is no error there.
    options = ["-s", "-m", "gpu", "-W", "default", *PARTS[part], *arguments]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=env, timeout=MOST_SECONDS
        )
    except subprocess.TimeoutExpired:
        print(f"part {part} was ended after {MOST_SECONDS} s", file=sys.stderr)
        return 124
    return done.returncode


def main() -> None:
    action, folder, *rest = sys.argv[1:]
    if action == "environment":
        make_environment(Path(folder), Path(rest[0]))
        return
    if action == "tests":
        sys.exit(run_tests(folder, rest))
    num_bytes = download(Path(folder), rest[0] if rest else "")
    print(f"{folder}: {num_bytes / 2**20:.1f} MiB")
    if num_bytes > MOST_BYTES:
        sys.exit(f"{folder} has more than {MOST_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
