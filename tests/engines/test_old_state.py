"""What would keep state of old weights is off, refused or named when an engine is launched."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

import pytest

from engines.kinds import KINDS
from engines.launch import invocation
from engines.protocol import Endpoint, WorkerType
from engines.protocol.kind import Kind
from engines.protocol.old_state import OldState, is_on, namespace
from engines.protocol.spec import EngineSpec
from tests.support.cpu_engines import installed

HERE = Endpoint("127.0.0.1", 4000)
LAUNCHED = [kind for kind in KINDS.values() if kind.invocation is not None]
REFUSED = [(kind, option) for kind in LAUNCHED for option in kind.old_state.refused]
OF_EMBEDDINGS = [
    (kind, option) for kind in LAUNCHED for option in kind.old_state.refused_for_embeddings
]
WITH_VARIABLE = [kind for kind in LAUNCHED if kind.old_state.embeddings_variable]


def start(kind: Kind, options: dict[str, Any], *inherited: str, **spec: Any) -> dict[str, str]:
    """The environment of an engine, with variables that it inherits at 100."""
    given = EngineSpec("e-0", kind.name, "/nowhere", "/e.log", options=options, **spec)
    return dict(invocation(given, HERE, {"PATH": "/bin"} | dict.fromkeys(inherited, "100")).env)


@pytest.mark.parametrize("kind", WITH_VARIABLE, ids=lambda kind: kind.name)
def test_embeddings_are_off_where_a_push_changes_what_computes_them(kind: Kind) -> None:
    variable = kind.old_state.embeddings_variable
    assert start(kind, {})[variable] == "0"
    assert variable not in start(kind, {}, keeps_embeddings=True)
    for more in ({}, {"env": {variable: "100"}}):
        with pytest.raises(ValueError, match=rf"^{variable} = 100: .*unset it, or "):
            start(kind, {}, *([] if more else [variable]), **more)


@pytest.mark.parametrize(("kind", "option"), REFUSED)
def test_a_store_that_nothing_clears_is_refused(kind: Kind, option: str) -> None:
    for keeps in (False, True):
        with pytest.raises(ValueError, match=f"^{option}: .*leave it out$"):
            start(kind, {option.replace("_", "-"): "on"}, keeps_embeddings=keeps)
    assert start(kind, {option: False})


@pytest.mark.parametrize(("kind", "option"), OF_EMBEDDINGS)
def test_a_store_of_embeddings_is_refused_where_a_push_changes_them(
    kind: Kind, option: str
) -> None:
    with pytest.raises(ValueError, match=f"^{option}: .*leave it out, or name those tensors"):
        start(kind, {option.replace("_", "-"): "on"})
    assert start(kind, {option: True}, keeps_embeddings=True)


@pytest.mark.parametrize(("kind", "option"), [REFUSED[0], OF_EMBEDDINGS[0]])
def test_without_its_row_an_option_is_not_refused(
    kind: Kind, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, kind.name, replace(kind, old_state=OldState()))
    assert start(kind, {option: "on"})


def test_an_attached_engine_has_what_its_kind_has() -> None:
    assert KINDS["attached"].old_state is KINDS["sglang"].old_state


def test_an_encoder_worker_has_no_embeddings_either() -> None:
    env = start(KINDS["sglang"], {}, worker_type=WorkerType.ENCODER)
    assert env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.parametrize(
    ("name", "options", "is_so"),
    [
        ("sglang", {}, False),
        ("sglang", {"hicache_storage_backend": "file"}, True),
        ("sglang", {"hicache_storage_backend": None}, False),
        ("sglang", {"enable_hierarchical_cache": True}, False),
        ("sglang", {"enable_lora": True}, False),
        ("vllm", {"kv_offloading_size": 4}, False),
        ("fake", {"storage_cache": "tier"}, True),
    ],
)
def test_a_store_that_no_call_clears_needs_names(
    name: str, options: dict[str, Any], is_so: bool
) -> None:
    assert KINDS[name].old_state.needs_names(options) is is_so


def test_an_option_that_is_off_adds_nothing() -> None:
    values = (None, False, 0, "", "off", "none", True, "file", 1)
    assert [value for value in values if is_on(value)] == [True, "file", 1]


def test_no_two_runs_and_no_two_versions_share_a_name() -> None:
    names = [namespace(run, version) for run in ("a", "b") for version in (None, 0, 1, 12, 2)]
    assert len(set(names)) == len(names)


# -- the source of the installed engines ----------------------------------------------------


def fields_in(files: Iterable[Path]) -> list[str]:
    """Names of the annotated fields of classes, which are the engine's options."""
    return [
        field.target.id
        for file in files
        for part in ast.walk(ast.parse(file.read_text()))
        if isinstance(part, ast.ClassDef)
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]


def unknown(kind: str, options: list[str]) -> set[str]:
    """What the row of a kind names, and this version of the engine does not have."""
    row = KINDS[kind].old_state
    named = (*row.refused, *row.refused_for_embeddings, *row.named_stores)
    return {name for name in named if not matching(options, name)}


@pytest.mark.sglang
def test_sglang_has_the_options_that_its_row_names() -> None:
    options = fields_in((installed("sglang", "sglang/srt/arg_groups/fields")).glob("*.py"))
    assert len(options) > 300
    assert unknown("sglang", options) == set()
    variable = KINDS["sglang"].old_state.embeddings_variable
    assert variable in installed("sglang", "sglang/srt/environ.py").read_text()


@pytest.mark.vllm
def test_vllm_has_the_options_that_its_row_names() -> None:
    options = fields_in([installed("vllm", "vllm/engine/arg_utils.py")])
    assert len(options) > 150
    assert unknown("vllm", options) == set()
