"""Prints the oldest and the newest Python of this machine that pyproject.toml supports.

    python .ci/pythons.py

Without the one that runs this: `make test` has run on it.  Standard error lists what was found.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

Version = tuple[int, ...]

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
# A Python without ensurepip (Debian's, without python3-venv) cannot make an environment.
ASK = "import sys, ensurepip; print(*sys.version_info[:3])"
NAME = re.compile(r"python3(\.\d+)?")


def supported() -> tuple[Version, set[Version]]:
    """The oldest version that may be installed on, and the minor versions that are named."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    return version_of(project["requires-python"].removeprefix(">=")), set(map(version_of, named))


def version_of(text: str) -> Version:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def candidates(environment: dict[str, str]) -> list[Path]:
    """Interpreters on PATH, and those that pyenv keeps beside it."""
    folders = [Path(folder) for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(environment.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))
    return [
        path
        for folder in folders
        if folder.is_dir()
        for path in sorted(folder.glob("python3*"))
        if NAME.fullmatch(path.name)
    ]


def ask_version(python: Path) -> Version:
    """Its version; empty if it does not run, as pyenv's shim of a version that is not chosen."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return version_of(done.stdout) if done.returncode == 0 else ()


def usable(versions: Iterable[Version]) -> list[Version]:
    """Those that are supported, oldest first."""
    oldest, named = supported()
    return sorted({one for one in versions if one >= oldest and one[:2] in named})


def to_run(found: list[Version], done: Version) -> list[Version]:
    """The oldest and the newest, without the one that is done."""
    return sorted({found[0], found[-1]} - {done}) if found else []


def main() -> None:
    paths: dict[Version, Path] = {}
    for path in candidates(dict(os.environ)):
        if version := ask_version(path):
            paths.setdefault(version, path)
    done = sys.version_info[:3]
    found = usable({*paths, done})
    rest = to_run(found, done)
    tell("Pythons here", found)
    tell("not supported", sorted(paths.keys() - found))
    tell("this environment has", [done])
    tell("the fast tests run on", rest)
    for version in rest:
        print(paths[version])


def tell(what: str, versions: list[Version]) -> None:
    names = ", ".join(".".join(map(str, version)) for version in versions)
    print(f"{what}: {names or 'none'}", file=sys.stderr)


if __name__ == "__main__":
    main()
