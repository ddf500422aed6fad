"""``python -m tools.fuzz [NAME ...] --seconds 600``: search for inputs that break a reader's rules.

Without names: all of them, one after the other.  Corpus and findings are under ``build/fuzz``;
``tests/tools/foreign_bytes`` keeps the findings that were repaired, and begins each search.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.fuzz.reader import Violation, check
from tools.fuzz.readers import READERS, lacks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "fuzz"
REPAIRED = ROOT / "tests" / "tools" / "foreign_bytes"
_END_S = 300.0


def search(name: str, seconds: int) -> list[str]:
    """Search for so long; returns a line for each input that breaks a rule."""
    found, corpus = FOLDER / "found", FOLDER / "corpus" / name
    for folder in (found, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    for path in REPAIRED.glob(f"{name}-*"):
        shutil.copy(path, corpus)
    log = FOLDER / f"{name}.log"
    command = [sys.executable, "-m", "tools.fuzz.target", name, str(found), str(corpus)]
    options = [f"-max_total_time={seconds}", "-print_final_stats=1"]
    with log.open("wb") as output:
        try:
            done = subprocess.run(
                [*command, *options],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds + _END_S,
            )
            ended = "" if done.returncode == 0 else f"it ended with {done.returncode}: see {log}"
        except subprocess.TimeoutExpired:
            ended = f"it did not end: see {log}"
    text = log.read_text(errors="replace")
    units = re.findall(r"number_of_executed_units: *(\d+)", text)
    covered = re.findall(r"ft: (\d+)", text)
    print(
        f"{name}: {seconds} s, {units[-1] if units else '?'} inputs, "
        f"{covered[-1] if covered else '?'} features of code, {len(list(corpus.iterdir()))} kept",
        flush=True,
    )
    broken = [f"{name}: {ended}"] if ended else []
    return broken + replay(name, sorted(found.glob(f"{name}-*")))


def replay(name: str, paths: list[Path]) -> list[str]:
    """Read these inputs without instrumentation; a line for each that breaks a rule."""
    broken = []
    for path in paths:
        try:
            check(READERS[name], path.read_bytes())
        except Violation as error:
            broken.append(f"{path.relative_to(ROOT)}: {error}")
        else:
            path.unlink()
    return broken


def main() -> int:
    """Returns 1 if an input breaks a rule."""
    parser = argparse.ArgumentParser(prog="tools.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help=", ".join(READERS))
    parser.add_argument("--seconds", type=int, default=600, help="for each reader")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in READERS]:
        parser.error(f"no reader {unknown[0]!r}; there are {', '.join(READERS)}")
    broken = []
    for name in options.names or READERS:
        if missing := lacks(READERS[name]):
            print(f"{name}: not read, {missing} is not installed")
            continue
        found = search(name, options.seconds)
        print(*found, sep="\n", end="\n" if found else "", flush=True)
        broken += found
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
