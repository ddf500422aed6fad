"""Every reader of foreign bytes, over its seeds, over parts of them, and over changed ones.

What ``make fuzz`` has found and was repaired is in ``foreign_bytes``, a file for each input.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.fuzz.reader import (
    MOST_BYTES,
    Reader,
    Refused,
    Violation,
    check,
    mutations,
    outcome,
    whole,
)
from tools.fuzz.readers import READERS, lacks

ROOT = Path(__file__).parents[2]
FOUND = Path(__file__).with_name("foreign_bytes")
MOST_FOUND_BYTES = 300 << 10
MOST_SEEDS = 250
NUM_TRUNCATED = 48
SECONDS = 0.5

pytestmark = pytest.mark.torch


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest) -> Reader:
    found: Reader = READERS[request.param]
    if missing := lacks(found):
        pytest.skip(f"{missing} is not installed")
    return found


def inputs(reader: Reader) -> list[bytes]:
    """The first seeds, some of the many others, and what was found."""
    seeds = [seed[:MOST_BYTES] for seed in reader.seeds()]
    chosen = seeds[:20] + seeds[20 :: 1 + len(seeds) // MOST_SEEDS]
    return chosen + [path.read_bytes() for path in sorted(FOUND.glob(f"{reader.name}-*"))]


def test_it_accepts_some_seeds_and_refuses_others(reader: Reader) -> None:
    found = [
        check(reader, data, memory=number % 4 == 0).is_accepted
        for number, data in enumerate(inputs(reader))
    ]
    assert any(found)
    assert not all(found)


def test_it_keeps_its_rules_for_parts_of_an_input_and_for_changed_ones(reader: Reader) -> None:
    """As many as there is time for, always in the same order."""
    seeds = inputs(reader)
    accepted = [data for data in seeds[:20] if outcome(reader, [data]).is_accepted][:2]
    ends = [(data, end) for data in accepted for end in _ends(len(data))]
    until_s = time.thread_time() + SECONDS
    num = 0
    for changed in (*(data[:end] for data, end in ends), *_changed(seeds)):
        check(reader, changed, memory=num % 8 == 0, splits=num % 4 == 0)
        num += 1
        if time.thread_time() > until_s:
            break
    assert num


def _ends(length: int) -> Sequence[int]:
    return range(0, length, max(1, length // NUM_TRUNCATED))


def _changed(seeds: Sequence[bytes]) -> Sequence[bytes]:
    """Changed copies: of the first seeds more, and some of each."""
    few = [changed for data in seeds[:4] for changed in mutations(data, 20, seeds)]
    step = max(1, len(seeds) // 100)
    return few + [changed for data in seeds[4::step] for changed in mutations(data, 2, seeds)]


def test_what_was_found_is_small_and_of_a_reader() -> None:
    paths = list(FOUND.glob("*"))
    assert sum(path.stat().st_size for path in paths) < MOST_FOUND_BYTES
    assert all(path.name.rpartition("-")[0] in READERS for path in paths)


READ_BY = {
    "engines/embedded/__main__.py": "its own start: a config.json that it cannot read ends it",
    "engines/embedded/core/model_config.py": "model_config",
    "engines/embedded/weights/disk_update.py": "the file of checkpoint_index: every error is one",
    "engines/embedded/weights/lora_adapters.py": "adapter_config",
    "engines/http/call.py": "engine_answer",
    "engines/http/chat_template.py": "a template is a program: every error is one",
    "engines/http/client.py": "engine_answer",
    "engines/kinds.py": "engine_loads",
    "engines/process/engine_records.py": "engine_record",
    "engines/vllm/features.py": "an option of the user's own command line",
    "rollout/cli/lib/find_run.py": "the page of a run that the user has named",
    "rollout/config/run_dir.py": "launch_file",
    "engines/process/locks.py": "file_lock",
    "rollout/control/server/journal.py": "server_journal",
    "rollout/driver/data/saved_groups.py": "rows of the user: every error is one",
    "rollout/core/wire.py": "wire_frames",
    "rollout/driver/client/http_client.py": "driver_stream",
    "rollout/observability/page/runs.py": "the page of another run in the same folder",
    "rollout/observability/step_reports.py": "recorded",
    "rollout/router/control_api.py": "step_figures",
    "rollout/router/engine_queries.py": "abort_order",
    "rollout/agents/worker/settings.py": "its own start: settings that it cannot read end it",
    "rollout/agents/turns/files.py": "session_file",
    "rollout/runtime/agents_actor.py": "its own address: without it, it takes another one",
    "rollout/agents/model/families.py": "it orders what is tried: every error is none",
    "rollout/weights/format/checkpoint_config.py": "checkpoint_config",
    "rollout/weights/format/checkpoint_files.py": "checkpoint_index",
    "rollout/weights/store/layout/record.py": "store_record",
}
"""Who reads JSON of others, and the reader of the table that does, or why none has to."""


def test_who_reads_json_of_others_is_in_the_table() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("rollout", "engines")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"from engines.plain_json import .*(read_json|object_in)", path.read_text())
    }
    assert found == READ_BY.keys()
    assert all(name in READERS or " " in name for name in READ_BY.values())


# -- the rules themselves -----------------------------------------------------------------------


def one_reader(read, **more) -> Reader:
    return Reader("toy", read, (ValueError,), lambda: [b"a"], **more)


def test_an_error_that_is_not_documented_breaks_a_rule() -> None:
    with pytest.raises(Violation, match="toy raised TypeError, and it documents ValueError"):
        check(one_reader(whole(lambda data: data + "a")), b"x")
    assert not check(one_reader(whole(lambda data: int(data))), b"x").is_accepted


def test_a_value_may_say_that_an_input_is_refused() -> None:
    def read(data: bytes) -> None:
        raise Refused

    assert not check(one_reader(whole(read)), b"x").is_accepted


def test_an_input_that_takes_long_breaks_a_rule() -> None:
    def read(data: bytes) -> None:
        until_s = time.thread_time() + 0.06
        while time.thread_time() < until_s:
            pass

    with pytest.raises(Violation, match=r"toy took \d+ ms for 1 bytes"):
        check(one_reader(whole(read)), b"x")


def test_an_input_that_takes_much_memory_breaks_a_rule() -> None:
    with pytest.raises(Violation, match=r"toy made 40000\d\d bytes of 1; its bound is"):
        check(one_reader(whole(lambda data: bytes(4_000_000))), b"x")


def test_a_result_that_depends_on_where_an_input_was_cut_breaks_a_rule() -> None:
    with pytest.raises(Violation, match="cut as"):
        check(one_reader(lambda parts: parts[0], is_split=True), b"xyz")
    assert check(one_reader(lambda parts: b"".join(parts), is_split=True), b"xyz").is_accepted


def test_changed_copies_are_always_the_same() -> None:
    assert list(mutations(b"abc", 9)) == list(mutations(b"abc", 9)) != list(mutations(b"abd", 9))
