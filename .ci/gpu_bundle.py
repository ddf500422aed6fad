"""The bundle: packages for another machine, unpacked and pruned, in one file."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

_PINS = "tools/cpu_engines/sglang/pins.txt"
_HOOKS = "tests/support/gpu/without_kernels"
# The only build for CUDA 13.
_MORE = ("torch-memory-saver==0.0.10",)
# Of the tests, in the version of constraints.txt, where the machine has none.
_OF_TESTS = ("httptools", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")
# Of SGLang's pins: its own wheel comes by itself, and the rest is not needed on this path.
_NOT_BROUGHT = ("sglang", "torch", "torchvision", "zstandard")
_PRUNED = (
    "sglang/multimodal_gen/",
    "sglang/test/",
    *(f"sglang/srt/rust_extensions/_{name}." for name in ("bench", "grpc", "multimodal", "server")),
    "sglang/srt/mem_cache/rust_tree_core/mem_cache.",  # a binary for another torch
    "sglang/kernels/jit/benchmark/",
    "sglang/kernels/kda_kernels/csrc/",
    "sglang/srt/layers/moe/fused_moe_triton/configs/",
    "sglang/srt/layers/quantization/configs/",
    *(
        f"torch_memory_saver_hook_mode_{mode}{build}.abi3.so"
        for mode in ("preload", "torch")
        for build in ("", "_cu12")
    ),
)
# pip takes each number only by itself.
_GLIBC = (5, 12, 14, 17, 24, 26, 27, 28, 31, 34, 35, 39)
_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in _GLIBC), "manylinux2014_x86_64")
_SITE = "site"
_DONE = ".unpacked"


def make(root: Path, target: Path, has: Path, python: str) -> None:
    """Download what a machine lacks, and pack it.

    Args:
        has: a text that names the machine's packages.
        python: the machine's version, such as ``3.12``.
    """
    names = missing(root, packages_of(has.read_text()))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as aside:
        wheels, site = Path(aside, "wheels"), Path(aside, _SITE)
        download(root, wheels, names, python)
        unpack_wheels(wheels, site)
        shutil.copytree(root / _HOOKS, site, dirs_exist_ok=True, ignore=_no_cache)
        partial = target.with_name(f"{target.name}.partial")
        with tarfile.open(partial, "w:xz", preset=6) as archive:
            archive.add(site, arcname=_SITE)
        partial.replace(target)
        num_bytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(" ".join(names))
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB, {num_bytes >> 20} unpacked")


def packages_of(text: str) -> set[str]:
    """Names in a list of packages: lines of ``pip freeze``, or one that begins ``Packages:``.

    Raises:
        SystemExit: there is none.
    """
    found = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    for line in re.findall(r"^.*\bPackages: (.*)$", text, re.MULTILINE):
        found += line.rstrip(".").split(", ")
    if not found:
        sys.exit("--has: the text names no package: give it the output of `pip freeze` there")
    return {normal(name) for name in found}


def missing(root: Path, has: set[str]) -> list[str]:
    """What the sections import and the machine lacks, with versions."""
    pins = (root / _PINS).read_text()
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = dict(_pins(pins))
    # The library's own: where both lists have one, SGLang's pin is the narrower.
    constraints = dict(_pins((root / "constraints.txt").read_text()))
    for one in (*project["dependencies"], *_OF_TESTS):
        name = normal(re.split(r"[<>=;\[ ]", one)[0])
        wanted.setdefault(name, constraints[name])
    wanted |= dict(_pins("\n".join(_MORE)))
    of_more = {name for name, _ in _pins("\n".join(_MORE))}
    return sorted(
        pin
        for name, pin in wanted.items()
        if name not in _NOT_BROUGHT and (name in of_more or name not in has)
    )


def _pins(text: str) -> list[tuple[str, str]]:
    return [(normal(name), pin) for pin, name in re.findall(r"^(([\w.-]+)==\S+)", text, re.M)]


def normal(name: str) -> str:
    """The name of a package as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def download(root: Path, wheels: Path, names: list[str], python: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", "--python-version", python, "-d", str(wheels)]
    platforms = [part for name in _PLATFORMS for part in ("--platform", name)]
    subprocess.run([*pip, "--implementation", "cp", *platforms, *names], check=True)
    # Its wheel has a tag of its own, which pip takes only without ``--platform``.
    (sglang,) = re.findall(r"^sglang==\S+", (root / _PINS).read_text(), re.MULTILINE)
    subprocess.run([*pip, sglang], check=True)


def unpack_wheels(wheels: Path, site: Path) -> None:
    """What pip would install, without programs and without what this path does not need."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.startswith(_PRUNED):
                    archive.extract(name, site)
    for data in site.glob("*.data"):
        for libraries in data.glob("*lib"):  # ``purelib`` and ``platlib``
            shutil.copytree(libraries, site, dirs_exist_ok=True)
        shutil.rmtree(data)


def _no_cache(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def unpack(bundle: Path) -> Path:
    """The folder for ``PYTHONPATH``, beside the bundle: made once for each content.

    Raises:
        SystemExit: there is no such file.
    """
    if not bundle.is_file():
        sys.exit(f"{bundle}: no such file; `python .ci/gpu.py bundle {bundle} --has FILE` makes it")
    with bundle.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = bundle.with_name(f"unpacked-{content}")
    if not (folder / _DONE).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if shutil.which("tar") is None or not _untar(bundle, folder):
            with tarfile.open(bundle) as archive:
                archive.extractall(folder, filter="data")
        (folder / _DONE).touch()
    return folder / _SITE


def _untar(bundle: Path, folder: Path) -> bool:
    """Three times as fast as Python's, where it knows xz."""
    command = ["tar", "-xJf", str(bundle), "-C", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def compile_bulk(root: Path, target: Path) -> str:
    """Compile the copies into host memory, which a wheel would bring; what became of it."""
    source = "engines/tensors/_bulk.c"
    slower = "pushes through host memory take Python's copies, at half the speed or less"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return f"{source} is not compiled, there is no compiler: {slower}"
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    options = ["-O3", "-fvisibility=hidden", "-shared", "-fPIC"]
    command = [compiler, *options, str(root / source), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"{source} is not compiled: {slower}\n{done.stderr}"
    partial.replace(target)  # a process may have the old one open
    return f"{source} is compiled"
