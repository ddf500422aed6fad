"""The journal of a server: whole at every moment, and refused when it is not understood."""

import asyncio
import json
import os
import pickle
import stat
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from engines.process.process_identity import identify
from engines.protocol import ProcessIdentity
from rollout.config.run_dir import RunFolder
from rollout.control.server.crash_cleanup import (
    ProcessState,
    clean_up,
    inspect,
    process_state,
)
from rollout.control.server.journal import (
    EngineEntry,
    JournalRecord,
    ServerJournal,
    _replace,
    read,
)
from rollout.core.errors import ConfigError, RolloutError
from tests.support.builders import push
from tests.support.line_kills import killed_at_each_line
from tests.support.served_fakes import config

HERE = identify(os.getpid())
assert HERE is not None
GONE = replace(HERE, started=HERE.started - 1)
EARLIER = replace(HERE, boot_id="00000000-0000-0000-0000-000000000000")
ELSEWHERE = replace(HERE, host="another-machine")
IN_ANOTHER_CONTAINER = replace(HERE, namespace="pid:[1]")
ENTRY = EngineEntry("main-0", "main", "http://127.0.0.1:9", "local", 3)
RECORD = JournalRecord(
    "run",
    "policy",
    "local",
    GONE,
    GONE,
    phases={"main": "serving"},
    gate="open",
    weight_version=3,
    engines=(ENTRY,),
)


def journal(folder: Path) -> ServerJournal:
    return ServerJournal.of(folder / "journal.json", "run", "policy", "local")


async def test_what_is_written_is_read_and_nothing_else_is_left_in_the_folder(
    tmp_path: Path,
) -> None:
    entry = replace(ENTRY, processes=(HERE,))
    await journal(tmp_path).write(phases={"main": "paused"}, doing="flush_cache", engines=(entry,))
    found = read(tmp_path / "journal.json")
    assert (found.phases, found.doing, found.engines) == (
        {"main": "paused"},
        "flush_cache",
        (entry,),
    )
    assert found.driver == HERE
    assert os.listdir(tmp_path) == ["journal.json"]


async def test_a_reader_finds_a_whole_record_at_every_moment_and_the_newest_at_last(
    tmp_path: Path,
) -> None:
    written = journal(tmp_path)
    await written.write(weight_version=0)
    stop = asyncio.Event()
    seen = []

    async def watch() -> None:
        while not stop.is_set():
            seen.append((await asyncio.to_thread(read, written.path)).weight_version)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(written.write(weight_version=one) for one in range(1, 60)))
    stop.set()
    await watching
    assert seen == sorted(seen)
    assert read(written.path).weight_version == 59


async def test_a_server_that_cannot_write_goes_on_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    broken = journal(tmp_path / "file")
    await broken.write()
    await broken.write()
    assert [one.levelname for one in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("removes", [False, True])
async def test_no_server_continues_from_a_record_after_which_one_could_not_be_written(
    tmp_path: Path, removes: bool
) -> None:
    written = journal(tmp_path)
    written.keep(page="http://127.0.0.1:2")
    await written.write(phases={"main": "serving"}, gate="open", engines=(ENTRY,))
    assert not read(written.path).why_lost
    part = tmp_path / ".journal.json.part"
    (part / "full").mkdir(parents=True)  # no file can be made, as on a full disk
    if removes:  # a record of another form
        written.path.write_bytes(written.path.read_bytes().replace(b'"is_behind": false,', b""))
    await written.write(phases={"main": "offloaded"}, gate="holding", engines=(ENTRY,))
    if removes:
        assert not written.path.exists()
    else:
        found = read(written.path)
        assert found.why_lost == "commands ran after its journal could not be written"
        # People still find what runs.
        assert (found.page, found.engines) == ("http://127.0.0.1:2", (ENTRY,))
    (part / "full").rmdir()
    part.rmdir()
    await written.write(phases={"main": "offloaded"}, gate="holding", engines=(ENTRY,))
    assert not read(written.path).why_lost
    assert read(written.path).phases == {"main": "offloaded"}


async def test_a_text_in_a_record_is_not_taken_for_its_mark(tmp_path: Path) -> None:
    written = journal(tmp_path)
    text = '"is_behind": false'
    await written.write(engines=(replace(ENTRY, fence_reason=text),))
    (tmp_path / ".journal.json.part").mkdir()
    await written.write()
    found = read(written.path)
    assert found.is_behind
    assert found.engines[0].fence_reason == text


async def test_a_value_that_json_cannot_have_stops_no_command(tmp_path: Path) -> None:
    written = journal(tmp_path)
    await written.write(weight_version=2**70)
    await written.write(weight_version=3)
    assert read(written.path).weight_version == 3


async def test_a_journal_that_is_sent_to_an_actor_names_the_process_that_launched(
    tmp_path: Path,
) -> None:
    sent = pickle.loads(pickle.dumps(journal(tmp_path)))
    await sent.write()
    assert read(tmp_path / "journal.json").driver == HERE


async def test_what_is_kept_is_in_every_record_until_the_end(tmp_path: Path) -> None:
    written = journal(tmp_path)
    written.keep(control="127.0.0.1:1", key="secret", page="http://127.0.0.1:2")
    await written.write(weight_version=3)
    found = read(written.path)
    assert (found.control, found.key, found.page) == (
        "127.0.0.1:1",
        "secret",
        "http://127.0.0.1:2",
    )
    await written.end()
    found = read(written.path)
    assert (found.control, found.key, found.page, found.is_ended) == ("", "", "", True)


@pytest.mark.parametrize("durable", [True, False])
def test_a_kill_at_any_line_of_a_write_leaves_the_old_record_or_the_new_one(
    tmp_path: Path, durable: bool
) -> None:
    written = journal(tmp_path)
    asyncio.run(written.write(weight_version=0))
    records = [
        orjson.dumps(replace(RECORD, key="secret", weight_version=version)) for version in (1, 2)
    ]
    seen = set()
    _replace(written.path, records[0], durable)
    for _ in killed_at_each_line(_replace, lambda: _replace(written.path, records[1], durable)):
        seen.add(read(written.path).weight_version)
        assert written.path.read_bytes() in records
        for file in tmp_path.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        _replace(written.path, records[0], durable)
    assert seen == {1, 2}
    _replace(written.path, records[1], durable)  # the rest of a killed write does not stop it
    assert os.listdir(tmp_path) == ["journal.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 2, "engines": 3}'])
def test_what_is_no_journal_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.json").write_text(text)
    with pytest.raises(RolloutError, match=r"journal .*journal\.json cannot be read"):
        read(tmp_path / "journal.json")


def test_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text(json.dumps({"format": 7}))
    with pytest.raises(RolloutError, match="has format 7, not 2"):
        read(tmp_path / "journal.json")


@pytest.mark.parametrize(
    ("identity", "state"),
    [
        (HERE, ProcessState.RUNS),
        (GONE, ProcessState.ENDED),
        (EARLIER, ProcessState.EARLIER_BOOT),
        (IN_ANOTHER_CONTAINER, ProcessState.ELSEWHERE),
        (ELSEWHERE, ProcessState.ELSEWHERE),
    ],
)
def test_a_process_is_known_by_host_boot_and_start(
    identity: ProcessIdentity, state: ProcessState
) -> None:
    assert process_state(identity) is state


async def test_of_another_boot_nothing_is_left_and_nothing_is_ended() -> None:
    stale = replace(RECORD, driver=EARLIER, engines=(replace(ENTRY, processes=(EARLIER,)),))
    found = await inspect(stale)
    assert found.driver is ProcessState.EARLIER_BOOT
    assert found.engines[0].state is ProcessState.EARLIER_BOOT
    assert await clean_up([found]) == []


@pytest.mark.parametrize(
    ("driver", "said"),
    [(HERE, "still runs and drives these engines"), (ELSEWHERE, "was driven on another-machine")],
)
async def test_a_run_that_may_still_be_driven_is_not_touched(
    driver: ProcessIdentity, said: str
) -> None:
    found = await inspect(replace(RECORD, driver=driver))
    with pytest.raises(RolloutError, match=said):
        await clean_up([found])


async def test_a_run_that_was_stopped_in_order_has_left_nothing() -> None:
    assert (await inspect(replace(RECORD, is_ended=True))).engines == ()


def test_a_server_writes_down_every_phase_before_it_begins(tmp_path: Path) -> None:
    import rollout

    groups = {"main": {"engine": {"kind": "fake"}}}
    whole = config(tmp_path, groups)
    (path,) = [RunFolder.of(whole).of_server("policy") / "journal.json"]
    with rollout.launch(whole, backend="local") as deployment:
        policy = deployment["policy"]
        started = read(path)
        assert (started.phases, started.gate, started.doing) == ({"main": "serving"}, "open", "")
        (engine,) = started.engines
        assert process_state(engine.processes[0]) is ProcessState.RUNS
        policy.offload().result(30)
        assert (read(path).phases, read(path).gate) == ({"main": "offloaded"}, "holding")
        policy.push(push(1)).result(30)
        assert (read(path).weight_version, read(path).gate) == (1, "open")
    assert read(path).is_ended
    assert read(path).engines == ()


def test_a_folder_without_a_journal_is_named() -> None:
    from rollout.cli.attach import records_of

    with pytest.raises(ConfigError, match=r"no journal\.json in nowhere or runs/nowhere"):
        records_of("nowhere")
