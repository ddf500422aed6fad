"""The files of a driver's journal: what is read again, their bounds, and a disk that fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollout.core.errors import ConfigError
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.stream import journal
from rollout.driver.stream.journal import JournalFiles
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, always, driving, engines, numbers, prompts, source
from tests.support.waits import forever, until

pytestmark = pytest.mark.clock

BATCH: dict[str, Any] = {"num_groups": 2, "group_size": 2, "sampling": SAMPLING}
AHEAD = RolloutOptions(mode="async")
LOST = "rollout/journal_lost_s"


@pytest.fixture
def files(tmp_path: Path) -> Iterator[JournalFiles]:
    files = JournalFiles(tmp_path / "0")
    yield files
    files.close()


def line(serial: int, **more: Any) -> bytes:
    """A line in which this many prompts were taken and dropped."""
    empty = {"works": [], "next_serial": serial, "source": {"at": serial}}
    return orjson.dumps(empty | more) + b"\n"


def first(serial: int, step: int = -1) -> bytes:
    audit = {"num_taken": serial, "delivered": list(range(serial)), "dropped": []}
    return line(serial, step=step, audit=audit, name="0")


def test_a_line_that_a_crash_cut_short_is_ignored(files: JournalFiles, tmp_path: Path) -> None:
    files.write([(first(0), True), (line(1), False), (line(2)[:20], False)])
    assert files.read(0).state()["next_serial"] == 1


def test_a_line_that_is_damaged_in_front_of_others_is_an_error(files: JournalFiles) -> None:
    files.write([(first(0), True), (b"{\n", False), (line(2), False)])
    with pytest.raises(ConfigError, match=r"line 2 of 00000000.jsonl is damaged; choose another"):
        files.read(0)


def test_two_files_are_left_and_read_in_order(files: JournalFiles, tmp_path: Path) -> None:
    for number in range(4):
        files.write([(first(number, step=number), True)])
    assert files.numbers() == [2, 3]
    saved = files.read(4)
    assert (saved.step, saved.state()["next_serial"]) == (2, 3)


def test_another_process_cannot_have_the_same_folder(files: JournalFiles) -> None:
    program = (
        "import sys; from pathlib import Path; from rollout.driver.stream.journal import *\n"
        "JournalFiles(Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program, str(files.folder)], capture_output=True, text=True
    )
    assert "another driver has it; choose another folder" in other.stderr


def test_another_driver_of_this_process_cannot_have_it_either(tmp_path: Path) -> None:
    first = JournalFiles(tmp_path / "0")
    with pytest.raises(ConfigError, match="another driver has it"):
        JournalFiles(tmp_path / "0")
    first.close()
    JournalFiles(tmp_path / "0").close()


def files_in(folder: Path) -> list[Path]:
    return list(folder.glob("*/*.jsonl"))


class Disk:
    """What the disk does to writes: full, or not answering until it is freed."""

    def __init__(self) -> None:
        self.is_full = False
        self.answers = threading.Event()
        self.answers.set()
        self._write = JournalFiles.write

    def write(self, files: JournalFiles, lines: Any) -> None:
        assert self.answers.wait(10)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(files, lines)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(JournalFiles, "write", lambda files, lines: disk.write(files, lines))
    monkeypatch.setattr(journal, "SWEEP_S", 0.02)
    monkeypatch.setattr("rollout.driver.stream.stream.SWEEP_S", 0.02)
    monkeypatch.setattr(journal, "_WITHIN_S", 0.1)
    monkeypatch.setattr(journal, "_AGAIN_S", 0.05)
    yield disk
    disk.answers.set()


def losses(client: Any) -> list[float]:
    return [one["metrics"][LOST] for one in client.reports if LOST in one["metrics"]]


async def until_reported(client: Any, num: int) -> None:
    await until(lambda: len(losses(client)) >= num)


@pytest.mark.parametrize("what", ["full", "silent"])
async def test_a_disk_that_fails_delays_no_sample_and_is_reported_once(
    tmp_path: Path,
    disk: Disk,
    what: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    if what == "full":
        # It answers; on a loaded host not within the patience for one that is silent.
        monkeypatch.setattr(journal, "_WITHIN_S", 60.0)
    of_driver: dict[str, Any] = {"journal": tmp_path, "reward": always(1.0)}
    async with driving(engines(0.001), **of_driver) as (driver, client):
        data = source(40, num_epochs=1)
        trained = numbers(await driver.rollout(0, data, options=AHEAD, **BATCH))
        if what == "full":
            disk.is_full = True
        else:
            disk.answers.clear()
        for step in range(1, 4):
            trained += numbers(await driver.rollout(step, data, options=AHEAD, **BATCH))
        await until_reported(client, 1)
        await asyncio.sleep(0.3)
        assert len(losses(client)) == 1
        assert losses(client)[0] > 0
        # From here on only a loaded host is slow, and that is no loss.
        monkeypatch.setattr(journal, "_WITHIN_S", 60.0)
        disk.is_full = False
        disk.answers.set()
        await until_reported(client, 2)
        assert losses(client)[1] == 0
        trained += numbers(await driver.rollout(4, data, options=AHEAD, **BATCH))
    errors = [one for one in caplog.messages if "generation goes on" in one]
    assert len(errors) == 1
    assert ("No space left" if what == "full" else "has not taken it within") in errors[0]
    assert "everything is on disk again" in caplog.text
    async with driving(engines(0.001), **of_driver) as (driver, _):
        trained += numbers(await driver.rollout(5, source(40, num_epochs=1), **BATCH))
    assert trained == list(range(1, 13))


# Values that JSON has not, or that a writer of JSON refuses for all that is in the same line.
ODD: dict[Any, Any] = {
    1: "a key that is a number",
    "pair": (1, (2.5, None)),
    "nan": [math.nan, math.inf, -math.inf],
    "large": [1 << 64, -(1 << 80)],
    "half": "\ud800",
    "bytes": b"\0\xff",
    ("a", 1): {"$python": "tuple"},
    "day": datetime(2026, 2, 3, tzinfo=UTC),
}


def odd_source(num: int, **more: Any) -> PromptData:
    rows = [{"input_ids": [n], "number": n, "odd": ODD, **more} for n in range(1, num + 1)]
    return PromptData(rows, seed=None, name="odd")


async def test_what_is_offered_again_has_the_same_metadata(tmp_path: Path, disk: Disk) -> None:
    """Of prompts and of samples, finished or not, delivered or not; and texts of any kind."""

    def reward(sample: Any) -> float:
        sample.metadata["judged"] = ODD
        sample.text = "\udfff"
        return 1.0

    seen = []
    for _ in range(2):
        async with driving(engines(0.001), reward, journal=tmp_path) as (driver, client):
            groups = await driver.rollout(0, odd_source(8), options=AHEAD, **BATCH)
            seen.append((repr(groups), len(client.requests)))
    assert seen[0][0] == seen[1][0], "delivered in step 0, and offered again"
    assert repr(ODD) in seen[0][0]
    async with driving(engines(0.001), reward, journal=tmp_path) as (driver, _):
        data = odd_source(8)
        assert numbers(await driver.rollout(1, data, **BATCH)) == [3, 4]
        state = orjson.loads(orjson.dumps(driver.state_of(data)))
    async with driving(engines(0.001), reward) as (driver, _):
        data = odd_source(8)
        driver.restore(data, state, **BATCH)
        (first, _) = await driver.rollout(2, data, **BATCH)
        assert repr(first.metadata["odd"]) == repr(ODD)


async def test_samples_that_are_no_json_are_generated_again_and_others_are_kept(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(sample: Any) -> float:
        if sample.prompt_ids == [2]:
            sample.metadata["at"] = {"deep": [object()]}
        return 1.0

    async with driving(engines(0.001), reward, journal=tmp_path) as (driver, client):
        assert numbers(await driver.rollout(0, source(8), **BATCH)) == [1, 2]
        assert not [report for report in client.reports if LOST in report["metrics"]]
    why = "the samples of group 1 are not kept: metadata['at']['deep'][0] is a object, which is not"
    assert why in caplog.text
    async with driving(engines(0.001), reward, journal=tmp_path) as (driver, client):
        assert numbers(await driver.rollout(0, source(8), **BATCH)) == [1, 2]
        assert [request.input_ids for request in client.requests] == [[2], [2]]


async def test_a_prompt_that_is_no_json_is_dropped_after_a_restart_and_no_other_is(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def rows() -> PromptData:
        of = [{"input_ids": [n], "number": n} for n in range(1, 7)]
        of[1]["image"] = object()  # type: ignore[assignment]
        return PromptData(of, seed=None, name="images", num_epochs=1)

    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        assert numbers(await driver.rollout(0, rows(), **BATCH)) == [1, 2]
    assert "group 1 is not kept: its prompt's metadata['image'] is a object" in caplog.text
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        data = rows()
        assert numbers(await driver.rollout(0, data, **BATCH)) == [1, 3]
        stream = driver.stream_of(data)
        assert stream.auditor.dropped == {1: "not in the journal"}
        assert stream.auditor.findings(stream.pending) == []
        assert numbers(await driver.rollout(1, data, **BATCH)) == [4, 5]


async def test_the_files_stay_within_their_bound(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MAX_BYTES", 20_000)
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        data = source(400)
        for step in range(40):
            await driver.rollout(step, data, **BATCH)
        sizes = [path.stat().st_size for path in files_in(tmp_path)]
    assert len(sizes) == 2
    assert max(sizes) < 30_000
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        with pytest.raises(ConfigError, match=r"up to step \d+ were delivered and are not in it"):
            await driver.rollout(1, source(400), **BATCH)


def newest(folder: Path) -> Path:
    return max(files_in(folder))


async def test_a_state_that_was_saved_is_used_where_the_journal_does_not_reach_back(
    tmp_path: Path, disk: Disk
) -> None:
    of_driver: dict[str, Any] = {"journal": tmp_path, "reward": always(1.0)}
    async with driving(engines(0.001), **of_driver) as (driver, _):
        data, states = source(40), []
        for step in range(4):
            await driver.rollout(step, data, **BATCH)
            before = newest(tmp_path)
            states.append(driver.state_of(data))  # which begins a file
            await until(lambda before=before: newest(tmp_path) > before)
    async with driving(engines(0.001), **of_driver) as (driver, _):
        again = source(40)
        driver.restore(again, states[0], **BATCH)
        assert numbers(await driver.rollout(1, again, **BATCH)) == [3, 4]


async def test_what_the_trainer_has_still_before_it_is_delivered_again_and_not_generated(
    tmp_path: Path,
) -> None:
    of_driver: dict[str, Any] = {"journal": tmp_path, "reward": always(1.0)}
    async with driving(engines(0.001), **of_driver) as (driver, _):
        data = source(40)
        made = [await driver.rollout(step, data, **BATCH) for step in range(3)]
    async with driving(engines(0.001), **of_driver) as (driver, client):
        data = source(40)
        again = [await driver.rollout(step, data, **BATCH) for step in (1, 2)]
        assert not client.requests
        assert numbers(await driver.rollout(3, data, **BATCH)) == [7, 8]
    assert again == made[1:]


async def test_a_finished_group_is_kept_and_the_others_begin_again(tmp_path: Path) -> None:
    async def reward(sample: Any) -> float:
        return 1.0 if sample.metadata["number"] == 1 else await forever()

    async with driving(engines(0.001), reward, journal=tmp_path) as (driver, _):
        call = asyncio.create_task(driver.rollout(0, source(2, num_epochs=1), **BATCH))
        await until(lambda: any(b'"text"' in path.read_bytes() for path in files_in(tmp_path)))
        call.cancel()
        await asyncio.wait([call])
    async with driving(engines(0.001), always(2.0), journal=tmp_path) as (driver, client):
        groups = await driver.rollout(0, source(2, num_epochs=1), **BATCH)
    assert numbers(groups) == [1, 2]
    assert [group.rewards for group in groups] == [[1.0, 1.0], [2.0, 2.0]]
    assert len(client.requests) == 2


# -- several data sets ----------------------------------------------------------------------------


def rows(kind: str, num: int = 40) -> list[dict[str, Any]]:
    return [{"input_ids": [index], "number": f"{kind}-{index}"} for index in range(1, num + 1)]


def data(kind: str, **settings: Any) -> PromptData:
    return PromptData(rows(kind), seed=None, **settings)


@pytest.mark.parametrize("is_named", [True, False])
async def test_data_sets_that_are_used_in_another_order_after_a_restart_go_on_each(
    tmp_path: Path, is_named: bool
) -> None:
    of_driver: dict[str, Any] = {"journal": tmp_path, "reward": always(1.0)}

    async def train(steps: range) -> list[list[int]]:
        kinds = ("math", "code")
        sources = [data(kind, **({"name": kind} if is_named else {})) for kind in kinds]
        async with driving(engines(0.001), **of_driver) as (driver, _):
            return [
                numbers(await driver.rollout(step, sources[step % 2], **BATCH)) for step in steps
            ]

    first = await train(range(3))
    assert first == [["math-1", "math-2"], ["code-1", "code-2"], ["math-3", "math-4"]]
    # The trainer has step 0 and begins again with step 1, so with the other data set.
    again = await train(range(1, 5))
    assert again == [*first[1:], ["code-3", "code-4"], ["math-5", "math-6"]]
    assert await train(range(5, 6)) == [["code-5", "code-6"]]


async def test_a_second_data_set_of_the_same_name_is_refused(tmp_path: Path) -> None:
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        for name in ("math", None):
            await driver.rollout(0, data("math", name=name), **BATCH)
            with pytest.raises(ValueError, match=r"has a data set '(math|rows-\w+)' already: use"):
                await driver.rollout(1, data("math", name=name, num_epochs=1), **BATCH)


async def test_files_of_another_name_are_refused_with_both_names(tmp_path: Path) -> None:
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        await driver.rollout(0, data("math", name="math"), **BATCH)
    (tmp_path / "math").rename(tmp_path / "code")
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        with pytest.raises(ConfigError, match=r"is of data set 'math', not of 'code'"):
            await driver.rollout(1, data("code", name="code"), **BATCH)


class Counted:
    """A source of the user's own."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self) -> Prompt:
        self.num_taken += 1
        return Prompt((self.num_taken,), {"number": self.num_taken})

    def state_dict(self) -> dict[str, Any]:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: Any) -> None:
        self.num_taken = state["num_taken"]


async def test_a_source_needs_a_name_only_for_a_journal(tmp_path: Path) -> None:
    async with driving(engines(0.001), always(1.0)) as (driver, _):
        assert numbers(await driver.rollout(0, Counted(), **BATCH)) == [1, 2]
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        with pytest.raises(ConfigError, match=r"Counted has no name .* attribute `name`"):
            await driver.rollout(0, Counted(), **BATCH)
        for name in ("", "a/b", "..", 3):
            counted = Counted()
            counted.name = name  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match=r"name = .*: must be 1 to 100 letters"):
                await driver.rollout(0, counted, **BATCH)
        counted.name = "counted"  # type: ignore[attr-defined]
        assert numbers(await driver.rollout(0, counted, **BATCH)) == [1, 2]
    assert {path.parent.name for path in files_in(tmp_path)} == {"counted"}


async def test_data_that_the_journal_does_not_know_at_a_later_step_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        await driver.rollout(0, data("math", name="math"), **BATCH)
        await driver.rollout(1, data("code", name="code"), **BATCH)
    assert not caplog.messages
    async with driving(engines(0.001), always(1.0), journal=tmp_path) as (driver, _):
        assert numbers(await driver.rollout(2, data("meth", name="meth"), **BATCH)) == [
            "meth-1",
            "meth-2",
        ]
    assert "knows code, math, and nothing of data set meth, which begins" in caplog.text


async def test_a_list_of_prompts_is_refused(tmp_path: Path) -> None:
    async with driving(engines(0.001), journal=tmp_path) as (driver, _):
        with pytest.raises(ValueError, match=r"a journal is of sources: give PromptData"):
            await driver.rollout(0, prompts(2), group_size=2, sampling=SAMPLING)
