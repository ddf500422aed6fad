"""The figures of the page on the cost of a step: copied from the benchmarks, or computed."""

import re
from pathlib import Path

import pytest

from tests.support.step_cost import table, works

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/step-cost.md").read_text()
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()


def test_the_figures_of_cpus_are_those_of_the_benchmarks() -> None:
    figures = set(re.findall(r"\d+(?:\.\d+)?", BENCHMARKS))
    table_of_cpus = PAGE.partition("## What this library adds, on CPUs")[2].partition("\n## ")[0]
    measured = [line for line in table_of_cpus.splitlines() if "`python -m " in line]
    assert len(measured) == 7
    for line in measured:
        cell = line.split(" | ")[-1]
        (module,) = re.findall(r"`python -m (benchmarks\.\w+)`", cell)
        assert (ROOT / module.replace(".", "/")).is_dir()
        shown = set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"`[^`]*`", "", cell)))
        assert shown, line
        assert shown <= figures, f"benchmarks/README.md has other figures: {shown - figures}"
    (share,) = re.findall(r"was ([\d.]+) of one memcpy for dense", PAGE)
    assert re.search(rf"^\| `shared_memory_copied` .*\| {share} \|", BENCHMARKS, re.MULTILINE)


def test_the_table_of_gpus_is_computed() -> None:
    assert table() in PAGE, "run: python -m tests.support.step_cost"


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        # 16.38 GB of bfloat16, by hand: over 450 GB/s, 3350 GB/s, 64 GB/s and 50 GB/s.
        ("push: gather the shards of FSDP2", 7 / 8 * 16.381 / 450),
        ("push by `cuda_ipc`: flatten, load", 4 * 16.381 / 3350),
        ("push by `shared_memory`: to the host, from it", 2 * 16.381 / 64),
        ("push by `distributed` to another host", 16.381 / 50),
        ("verify: read all weights once", 16.381 / 3350),
    ],
)
def test_the_least_seconds_of_a_part(name: str, seconds: float) -> None:
    (work,) = (work for work in works() if work.name == name)
    assert work.seconds == pytest.approx(seconds, rel=1e-3)
