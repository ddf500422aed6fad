"""The table of kinds, and that no other code names a kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engines.kinds import KINDS, kind_of
from engines.launch import check_spec
from engines.protocol import Endpoint
from engines.protocol.kind import Kind
from engines.protocol.spec import EngineSpec
from rollout.config import EngineKind

ROOT = Path(__file__).parents[2]
HERE = Endpoint("127.0.0.1", 4000)
ROWS = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def spec_of(kind: Kind) -> EngineSpec:
    return EngineSpec(engine_id="one", kind=kind.name, model_path="/models/one", log_path="")


@ROWS
async def test_each_kind_has_a_client_that_takes_what_callers_give(kind: Kind) -> None:
    client: Any = kind.client(HERE, engine_id="one", weights_cpu_backup=True)
    assert client.endpoint == HERE
    await client.aclose()


@ROWS
def test_each_kind_that_can_be_launched_has_a_command(kind: Kind) -> None:
    if kind.invocation is None:
        with pytest.raises(ValueError, match="give its url"):
            check_spec(spec_of(kind))
    else:
        assert kind.invocation(spec_of(kind), HERE, {"PATH": "/bin"}).command


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"'toy' is not known; known: embedded, sglang, attached"):
        kind_of("toy")


def test_the_settings_name_the_kinds_of_the_table() -> None:
    assert {kind.value for kind in EngineKind} == set(KINDS)


_NAMES = "vllm|sglang|embedded|fake|attached"
BY_NAME = re.compile(
    r"\b(?:is_vllm|has_vllm|is_mixed|is_sglang|is_for_vllm|VLLM_CPU|SGLANG_CPU)\b"
    r"|(?<!: EngineKind = )\bEngineKind\.[A-Z]|^(?:from|import) engines\.(?:sglang|vllm)\b"
    rf"|[=!]= [\"'](?:{_NAMES})[\"']"
)
"""A question for one kind by its name, where a column of the table has the answer."""
OF_KINDS = ("kinds.py", "embedded", "fake", "sglang", "vllm", "vllm_plugin")
DIALECTS = ROOT / "rollout" / "router" / "continuation" / "dialects"
"""What a kind speaks is in a row of the router's own table."""


def test_nobody_else_asks_for_a_kind_by_its_name() -> None:
    engines, rollout = ROOT / "engines", ROOT / "rollout"
    places = [one for one in engines.iterdir() if one.name not in OF_KINDS] + [rollout]
    files = [file for one in places for file in ([one] if one.suffix else one.rglob("*.py"))]
    found = {
        str(file.relative_to(ROOT)): sum(
            bool(BY_NAME.search(line)) for line in file.read_text().splitlines()
        )
        for file in files
        if file.suffix == ".py" and file.parent != DIALECTS
    }
    assert not {file: number for file, number in found.items() if number}, (
        "ask a column of engines.kinds, with a name that says which question it answers"
    )
