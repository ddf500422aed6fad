"""The table of the fake's README: each switch breaks its phase with the error it shows."""

import re
from pathlib import Path

import pytest

from engines.fake.engine.faults import parse_fault
from rollout.core.errors import PhaseFailed
from tests.support.builders import push, started_server
from tests.support.virtual_time import virtual_time

README = Path(__file__).parents[3] / "engines/fake/README.md"
ROWS = re.findall(
    r"^\| ([\w ]+) \| `(\w+[#\d]*:\S+)` \| `([^`]+)`", README.read_text(), re.MULTILINE
)
DOWN = ("pause", "flush", "release")


def test_every_phase_is_in_the_table() -> None:
    phases = ["pause", "flush", "release", "resume weights", "update", "verify"]
    assert list(dict.fromkeys(phase for phase, _, _ in ROWS)) == [*phases, "resume KV", "continue"]


@pytest.mark.parametrize(("phase", "switch", "says"), ROWS)
@virtual_time
async def test_a_switch_breaks_its_phase_as_the_table_says(
    phase: str, switch: str, says: str, tmp_path: Path
) -> None:
    bench = await started_server(tmp_path, {"policy": {"num_engines": 1}})
    if phase not in DOWN:
        await bench.server.give_memory()
    parse_fault(switch).add_to(bench.engines[0].faults)
    with pytest.raises(PhaseFailed) as caught:
        await (bench.server.give_memory() if phase in DOWN else bench.server.serve_weights(push(1)))
    assert str(caught.value).startswith("group policy: ")
    assert says in str(caught.value)
    await bench.server.stop()
