"""``rewards.math`` on texts that a model may write, and the processes that judge them."""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollout.core.samples import Sample, SampleStatus, all_samples
from rollout.driver import rewards
from tests.support.driving import SAMPLING, driving, engines, prompts
from tests.support.processes import program, wait_until

pytest.importorskip("math_verify")
ENDLESS = "$9^{9^{9}}$"
HOSTILE = {
    "power": ENDLESS,
    "factorial": "$100000!$",
    "digits": "7" * 2**20,
    "digits in a formula": f"${'7' * 2**20}$",
    "null bytes": "\0" * 2**16 + "$5\0$",
    "surrogates": "\ud800$5\udfff$ \ud800",
    "no text": "",
}
SLOW = {
    "boxes": r"\boxed{" * 9000,
    "power of an expression": "The answer is 9^9^9",
    "power of programs": "so 9**9**9",
    "larger factorial": "$99999999!$",
    "factorial of factorials": "$((10!)!)!$",
    "braces": f"${'{' * 60000}{'}' * 60000}$",
    "fractions": "$" + r"\frac{1}{" * 3000 + "1" + "}" * 3000 + "$",
    "brackets": f"${'(' * 5000}4{')' * 5000}$",
    "formulas that do not end": r"\(" * 30000,
    "displays that do not end": r"\[" * 30000,
    "sum": r"$\sum_{i=1}^{10^9} i^i$",
    "integral": r"$\int e^{x^x} \sin(x^x) dx$",
    "product": r"$\prod_{i=1}^{100000000} i$",
    "polynomial": "$(x+y+z+1)^{500}$",
    "terms": f"${'1+' * 60000}1$",
    "root": rf"$\sqrt[99999999]{{{'7' * 4000}}}$",
    "matrix": rf"$\begin{{pmatrix}}{'1&' * 20000}1\end{{pmatrix}}$",
    "binomial": r"$\binom{99999999}{5555555}$",
}
FOUR = r"so it is $\boxed{4}$"
PROGRAM = """
import asyncio, sys
from rollout.core.samples import Sample
from rollout.driver import rewards

async def main():
    judge = rewards.math(timeout_s=3.0)
    await judge(Sample([1], text="4", metadata={"answer": "4"}))
    print("judged", flush=True)
    for text in sys.argv[1:]:
        await judge(Sample([1], text=text, metadata={"answer": "4"}))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def said(text: str) -> Sample:
    return Sample([1], text=text, metadata={"answer": "4"})


def children(of: int | None = None) -> list[psutil.Process]:
    """The processes that judge for a process, or for this one."""
    found = []
    for child in psutil.Process(of).children():
        with suppress(psutil.Error):  # it has just ended
            if str(Path("math_judge", "child.py")) in str(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture(autouse=True)
def children_end_with_their_reward() -> Iterator[None]:
    yield
    gc.collect()
    assert wait_until(lambda: children() == [], 20)


def library(folder: Path, code: str) -> None:
    """Put a module in the place of math-verify."""
    (folder / "math_verify.py").write_text(code)


@pytest.mark.parametrize(
    "texts",
    [HOSTILE, pytest.param(SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(500)])],
    ids=["some", "all"],
)
async def test_a_hostile_text_is_judged_within_the_deadline(texts: dict[str, str], caplog) -> None:
    judge = rewards.math(timeout_s=2.0)
    for name, text in texts.items():
        before = time.monotonic()
        assert await judge(said(text)) == 0.0, name
        assert time.monotonic() - before < 2.0 + 20.0, name  # and the start of a process
    assert await judge(said(FOUR)) == 1.0
    warnings = [record.getMessage() for record in caplog.records]
    assert 1 <= len(warnings) <= 3
    assert all(warning.isprintable() and len(warning) < 400 for warning in warnings)


async def test_the_log_says_what_was_ended_and_of_which_text(caplog) -> None:
    judge = rewards.math(timeout_s=0.5)
    assert await judge(said(f"\x1b[2J{'x' * 100}\n{ENDLESS}")) == 0.0
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "rollout.driver.math_judge.judges")
    assert record.getMessage().startswith(
        "rewards.math: a judgement took longer than 0.5 s, so the reward is 0.0; "
        f"the sample's text ends in: {'x' * 60}"
    )
    assert record.getMessage().isprintable()


async def test_one_that_hangs_holds_up_no_other() -> None:
    judge = rewards.math(timeout_s=100.0)
    assert await judge(said(FOUR)) == 1.0  # so the next call has a process that has started
    hanging = asyncio.create_task(judge(said(ENDLESS)))
    for _ in range(3):
        values = await asyncio.gather(*(judge(said(text)) for text in [FOUR, "5"] * 4))
        assert values == [1.0, 0.0] * 4
    assert not hanging.done()
    assert 2 <= len(children()) <= 4
    for child in children():
        child.kill()
    assert await hanging == 0.0


async def test_a_killed_process_is_replaced(caplog) -> None:
    judge = rewards.math()
    assert await judge(said(FOUR)) == 1.0
    (first,) = children()
    first.kill()
    psutil.wait_procs([first], timeout=20)
    assert await judge(said(FOUR)) == 1.0
    (second,) = children()
    assert second.pid != first.pid
    assert await judge(said("5")) == 0.0
    assert children() == [second]
    assert caplog.records == []


async def test_its_processes_end_with_the_reward() -> None:
    judge = rewards.math()
    await asyncio.gather(*(judge(said(FOUR)) for _ in range(4)))
    assert children()
    del judge
    assert wait_until(lambda: children() == [], 20)  # a thread may hold it for a moment


@pytest.mark.parametrize("texts", [(), (ENDLESS,)], ids=["idle", "busy"])
def test_no_process_survives_a_driver_that_is_killed(texts: tuple[str, ...]) -> None:
    with program("-c", PROGRAM, *texts) as driver:
        driver.wait_for("judged", 60)
        (child,) = children(driver.process.pid)
        before = child.cpu_times().user
        assert not texts or wait_until(lambda: child.cpu_times().user > before + 0.2, 20)
        driver.process.kill()
        assert wait_until(lambda: not child.is_running(), 20)


async def test_memory_is_bounded_and_what_took_much_is_replaced(tmp_path, monkeypatch) -> None:
    library(
        tmp_path,
        "kept = []\n"
        "def parse(text, **_):\n"
        "    if text.startswith('keep'):\n"
        "        kept.append(b'x' * (int(text.split()[1]) << 20))\n"
        "    return text\n"
        "def verify(answer, text, **_):\n"
        "    return not kept and text == '4'\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = rewards.math()
    assert await judge(said("4")) == 1.0
    (first,) = children()
    assert first.rlimit(psutil.RLIMIT_AS) == (2 << 30, 2 << 30)
    assert await judge(said("keep 3000")) == 0.0  # it is refused,
    assert await judge(said("4")) == 1.0  # and nothing was kept
    assert children() == [first]
    assert await judge(said("keep 700")) == 0.0
    assert await judge(said("4")) == 1.0
    (second,) = children()
    assert second.pid != first.pid


async def test_the_memory_that_the_driver_has_had_replaces_no_process() -> None:
    judge = rewards.math()
    large = b"x" * (600 << 20)
    assert await judge(said(FOUR)) == 1.0
    del large
    (first,) = children()
    assert await judge(said(FOUR)) == 1.0
    assert children() == [first]


async def test_of_a_long_text_the_end_is_read(tmp_path, monkeypatch) -> None:
    library(
        tmp_path,
        "def parse(text, **_):\n    return text\n"
        "def verify(answer, text, **_):\n"
        "    return len(text) == 2**18 and text.endswith('end')\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = rewards.math()
    assert await judge(said("x" * 2**20 + "end")) == 1.0
    assert await judge(said("x" * 2**20)) == 0.0


async def test_a_library_that_cannot_be_loaded_fails_the_sample(tmp_path, monkeypatch) -> None:
    library(tmp_path, "raise SystemExit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    judge = rewards.math()
    with pytest.raises(RuntimeError, match="its start made its process exit with status 7"):
        await judge(said("4"))
    assert children() == []


async def test_a_judgement_that_raises_is_a_wrong_answer(tmp_path, monkeypatch, caplog) -> None:
    library(
        tmp_path,
        "def parse(text, **_):\n    return text\n"
        "def verify(answer, text, **_):\n    return 1 / (text != '$1$' and text != '5') == 1\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    judge = rewards.math()
    assert [await judge(said(text)) for text in ("4", "5", "4")] == [1.0, 0.0, 1.0]
    (record,) = caplog.records
    assert "a judgement failed, so the reward is 0.0" in record.getMessage()


async def test_a_driver_rewards_with_it_and_its_processes_end_with_the_driver() -> None:
    async with driving(engines(0.0), rewards.math("number")) as (driver, client):
        groups = await driver.rollout(0, prompts(3), group_size=2, sampling=SAMPLING)
    samples = all_samples(groups)
    assert {sample.reward for sample in samples} <= {0.0, 1.0}
    assert SampleStatus.FAILED not in {sample.status for sample in samples}
    del driver, client
    gc.collect()
    assert wait_until(lambda: children() == [], 20)


def test_a_wrong_time_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s = 0"):
        rewards.math(timeout_s=0)
