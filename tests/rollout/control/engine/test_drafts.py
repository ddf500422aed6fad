"""Drafted tokens that are right: what is counted, and when fewer of them are a finding."""

import logging
from itertools import pairwise

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.launcher import make_engine
from engines.protocol import Loads
from engines.protocol.errors import EngineUnreachable
from rollout.control.engine.drafts import FEWEST_DRAFTED, DraftRecord, has_fallen
from rollout.control.group.server_group import ServerGroup
from rollout.core.types import DraftFigures, StepReport
from rollout.rules.lifecycle import Command
from tests.support.builders import make_group, push

WHOLE, MANY, FEW = 1.0, FEWEST_DRAFTED, FEWEST_DRAFTED - 1


@pytest.mark.parametrize(
    ("windows", "falls"),
    [
        pytest.param([(440, 440), (1236, 3)], [False, True], id="lost in an offload"),
        pytest.param([(440, 440), (1236, 619)], [False, False], id="just over half"),
        pytest.param([(440, 440), (1236, 617)], [False, True], id="just under half"),
        pytest.param([(440, 440), (FEW, 0)], [False, False], id="too few after"),
        pytest.param([(FEW, FEW), (1236, 3)], [False, False], id="too few before"),
        pytest.param([(440, 440), (FEW, 0), (1, 0)], [False, False, True], id="enough in two"),
        pytest.param([(440, 3), (440, 440)], [False, False], id="a rise"),
        pytest.param([(440, 0), (440, 0)], [False, False], id="never any"),
        pytest.param([(440, 440), (440, 2), (440, 2)], [False, True, True], id="it stays"),
        pytest.param([(440, 440), (440, 2), (440, 400)], [False, True, False], id="it ends"),
        pytest.param(
            [(1000, 800), (1000, 650), (1000, 500), (1000, 390)],
            [False, False, False, True],
            id="a bit less with each push",
        ),
    ],
)
def test_a_fall_to_under_half_of_the_highest_share_is_found(
    windows: list[tuple[int, int]], falls: list[bool]
) -> None:
    record, drafted, accepted, found = DraftRecord("/draft", 0), 0, 0, []
    record.note(Loads(0, 0, num_drafted=0))
    for version, (more, right) in enumerate(windows, 1):
        drafted, accepted = drafted + more, accepted + right
        record.note(Loads(0, 0, num_drafted=drafted, num_accepted=accepted))
        found.append(bool(record.figures().fall))
        record.begin(version)
    assert found == falls


@pytest.mark.parametrize(
    ("highest", "share", "expected"),
    [(None, 0.1, False), (0.9, None, False), (0.9, 0.45, False), (0.9, 0.449, True), (0, 0, False)],
)
def test_the_rule(highest: float | None, share: float | None, expected: bool) -> None:
    assert has_fallen(highest, share) is expected


def test_what_an_engine_had_counted_before_it_was_attached_is_of_no_window() -> None:
    record = DraftRecord("/draft", 7)
    record.note(Loads(0, 0, num_drafted=10_000, num_accepted=10_000))
    assert record.figures() == DraftFigures("/draft", weight_version=7)
    record.note(Loads(0, 0, num_drafted=10_400, num_accepted=10_100))
    assert record.figures() == DraftFigures("/draft", 0.25, 400, 7)


def test_a_count_that_comes_late_changes_nothing() -> None:
    record = DraftRecord("/draft", 0)
    for drafted in (0, 400, 300, 500):
        record.note(Loads(0, 0, num_drafted=drafted, num_accepted=drafted))
    assert (record.figures().num_drafted, record.figures().share) == (500, WHOLE)


def test_of_sglang_each_new_interval_of_a_window_counts_but_its_first() -> None:
    record = DraftRecord("/draft", 0)
    names = [str(number // 2) for number in range(14)]
    for name in names:
        record.note(Loads(0, 0, accepted_share=0.8, interval=name))
    num_new = sum(one != other for one, other in pairwise(names))
    assert record.figures() == DraftFigures("/draft", pytest.approx(0.8), 40 * num_new, 0)
    record.begin(1)
    for name in ("half of it is old", *names):
        share = 0.8 if name.startswith("half") else 0.1
        record.note(Loads(0, 0, accepted_share=share, interval=name))
    found = record.figures()
    assert (found.share, found.highest_share) == pytest.approx((0.1, 0.8))
    assert found.fall == (
        "of the tokens that its draft /draft proposes, 10.0% are right since weight version 1, and "
        "80.0% were at version 0"
    )


async def drafting_group() -> tuple[ServerGroup, FakeEngine]:
    launcher = FakeLauncher(lambda spec, at: make_engine(spec, at, draft="/draft"))
    group, _ = make_group(1, launcher=launcher, needs_offload=False)
    await group.start()
    return group, launcher.processes["main-0"].engine


async def figures_of(group: ServerGroup) -> DraftFigures | None:
    (engine,) = (await group.status()).engines
    return engine.drafts


async def pushed(group: ServerGroup, version: int) -> StepReport:
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    await group.run(Command.UPDATE_WEIGHTS, push=push(version))
    await group.run(Command.VERIFY, version=version)
    return StepReport(reports=(await group.run(Command.CONTINUE_GENERATION),))


async def test_a_group_counts_drafts_until_each_push_and_logs_a_fall_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    group, engine = await drafting_group()
    engine.num_drafted = engine.num_accepted = 440
    assert (await pushed(group, 1)).drafts == {"main-0": DraftFigures("/draft", WHOLE, 440, 0)}
    assert await figures_of(group) == DraftFigures("/draft", None, 0, 1, WHOLE, 0)
    engine.num_drafted, engine.num_accepted = 440 + MANY, 442
    for _ in range(3):
        await group.probe(1.0)
    found = await figures_of(group)
    assert found is not None
    assert (found.share, found.fall) == (0.01, found.fall)
    assert "1.0% are right since weight version 1, and 100.0% were at version 0" in found.fall
    (logged,) = [one.message for one in caplog.records if "proposes" in one.message]
    assert logged.startswith(f"engine main-0: {found.fall}. no push trains a draft")
    assert (await pushed(group, 2)).drafts == {"main-0": found}


async def test_drafts_that_cannot_be_read_disturb_no_probe_and_no_push() -> None:
    group, engine = await drafting_group()
    engine.num_drafted = 400
    engine.fail_next("loads", EngineUnreachable("no answer"))
    (probe,) = (await group.probe(1.0)).engines
    assert probe.result == "answered"
    engine.fail_next("loads", EngineUnreachable("no answer"))
    report = await pushed(group, 1)
    assert report.drafts == {"main-0": DraftFigures("/draft", weight_version=0)}


async def test_an_engine_without_a_draft_is_not_read() -> None:
    group, launcher = make_group(1, needs_offload=False)
    await group.start()
    await group.probe(1.0)
    assert "loads" not in launcher.processes["main-0"].engine.operations()
    assert await figures_of(group) is None
    assert (await pushed(group, 1)).drafts == {}
