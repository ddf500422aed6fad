"""The census: each entry has its treatment, and without the treatment a test here fails."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.cpu.sglang.recipe import RECIPE as SGLANG
from engines.cpu.vllm.recipe import RECIPE as VLLM
from engines.kinds import KINDS
from engines.launch import invocation
from engines.process.cached_environment import CachedEnvironment, Recipe
from engines.protocol import Endpoint, WorkerType
from engines.protocol.census.embedded import CENSUS as EMBEDDED
from engines.protocol.census.entries import Cache, Census, Sign, Treatment, is_on, namespace
from engines.protocol.kind import Kind
from engines.protocol.spec import EngineSpec

WITH_WEIGHTS_ELSEWHERE = {
    "cpu_offload_gb",
    "offload_group_size",
    "offload_num_in_group",
    "offload_prefetch_step",
}
"""Options that place weights in host memory: not in a census, because no push to such was tried."""
HERE = Endpoint("127.0.0.1", 4000)
ROOT = Path(__file__).parents[2]
ENTRIES = [(kind, cache) for kind in KINDS.values() for cache in kind.census.caches]
IDS = [f"{kind.name}-{cache.name}" for kind, cache in ENTRIES]
IN_EACH = pytest.mark.parametrize(("kind", "cache"), ENTRIES, ids=IDS)


def start(kind: Kind, options: dict[str, Any], *inherited: str, **spec: Any) -> dict[str, str]:
    """The environment of an engine, with variables that it inherits at 100."""
    given = EngineSpec("e-0", kind.name, "/nowhere", "/e.log", options=options, **spec)
    return dict(invocation(given, HERE, {"PATH": "/bin"} | dict.fromkeys(inherited, "100")).env)


def check_disabled(kind: Kind, cache: Cache) -> None:
    assert start(kind, {})[cache.variable] == "0"
    assert cache.variable not in start(kind, {}, keeps_embeddings=True)
    for more in ({}, {"env": {cache.variable: "100"}}):
        with pytest.raises(ValueError, match=rf"^{cache.variable} = 100: .*unset it, or "):
            start(kind, {}, *([] if more else [cache.variable]), **more)


def check_refused(kind: Kind, cache: Cache) -> None:
    options = [option for option in cache.options if not set("*?[") & set(option)]
    assert options
    for option in options:
        with pytest.raises(ValueError, match=f"^{option}: .*leave it out"):
            start(kind, {option.replace("_", "-"): "on"})
        assert start(kind, {option: False}) is not None
        if cache.is_of_encoder:
            assert start(kind, {option: True}, keeps_embeddings=True) is not None


CHECKS: dict[Treatment, Callable[[Kind, Cache], None]] = {
    Treatment.DISABLED: check_disabled,
    Treatment.REFUSED: check_refused,
}
TREATED = [
    pytest.param(kind, cache, id=name)
    for (kind, cache), name in zip(ENTRIES, IDS, strict=True)
    if cache.treatment in CHECKS and kind.invocation is not None
]


@pytest.mark.parametrize(("kind", "cache"), TREATED)
def test_what_is_disabled_or_refused_is_so_when_an_engine_is_launched(
    kind: Kind, cache: Cache
) -> None:
    CHECKS[cache.treatment](kind, cache)


@pytest.mark.parametrize(("kind", "cache"), TREATED)
def test_an_entry_without_its_treatment_fails_the_check(
    kind: Kind, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(one for one in kind.census.caches if one is not cache)
    without = replace(kind, census=replace(kind.census, caches=others))
    monkeypatch.setitem(KINDS, kind.name, without)
    with pytest.raises((pytest.fail.Exception, KeyError)):
        CHECKS[cache.treatment](without, cache)


FAILS_WITHOUT = {
    "/flush_cache": [
        "tests/rollout/control/engine/test_drain.py::"
        "test_a_flush_that_is_refused_aborts_and_asks_again",
        "tests/rollout/weights/routes/test_contract.py::"
        "test_the_last_bucket_alone_clears_what_old_weights_computed",
    ],
    "/pause": [
        "tests/engines/vllm/test_client.py::test_a_push_without_a_pause_has_one_of_its_own",
        "tests/rollout/control/group/test_vllm_steps.py::"
        "test_a_step_pauses_again_before_it_continues",
    ],
    "/finish_weight_update": [
        "tests/engines/vllm/test_client.py::test_a_version_is_published_when_the_update_is_finished"
    ],
    "extra_key": [
        "tests/rollout/router/http/test_request.py::"
        "test_each_send_has_an_id_of_its_own_and_the_new_weight_version",
        "tests/rollout/control/engine/test_sentinel.py::"
        "test_two_runs_with_one_storage_tier_never_share_a_page",
    ],
    "a salt in the tokens": [
        "tests/engines/embedded/weights/test_lora_adapters.py::"
        "test_a_prompt_cached_without_the_adapter_is_not_read_with_it"
    ],
    "a request for them takes no prefix": [
        "tests/engines/embedded/generation/test_routed_experts.py::"
        "test_each_token_has_the_experts_of_a_forward_pass"
    ],
    "the end of each update": [
        "tests/rollout/control/engine/test_sentinel.py::"
        "test_without_its_treatment_a_stale_entry_is_fenced_by_name"
    ],
}
"""What carries a treatment out -> tests that fail without it, as mutations by hand have shown."""
OF_THE_ENGINE = (
    "lora_id, which is new with each load",
    "process_weights_after_loading",
    "the model computes each token",
    "they read the weights",
    "a move copies the weights",
    "each request computes them",
    "no weight is in them",
)
"""What engines do without a call of ours, which nothing here could leave out."""


@IN_EACH
def test_each_other_treatment_has_a_test_that_fails_without_it(kind: Kind, cache: Cache) -> None:
    if cache.treatment in CHECKS or cache.by.startswith(OF_THE_ENGINE):
        return
    (named,) = [tests for by, tests in FAILS_WITHOUT.items() if cache.by.startswith(by)]
    for test in named:
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text()


@IN_EACH
def test_each_entry_says_what_is_done_and_where_the_source_has_it(kind: Kind, cache: Cache) -> None:
    assert cache.by
    assert cache.source
    assert (cache.treatment is Treatment.DISABLED) == bool(cache.variable)
    assert len({one.name for one in kind.census.caches}) == len(kind.census.caches)


def test_each_kind_has_a_census_and_versions_that_were_read() -> None:
    assert all(kind.census.caches and kind.census.versions for kind in KINDS.values())
    assert KINDS["attached"].census is KINDS["sglang"].census


def test_sources_of_our_own_engines_exist() -> None:
    for name in ("embedded", "fake"):
        for cache in KINDS[name].census.caches:
            file, _, function = cache.source.partition(": ")
            tree = ast.parse((ROOT / "engines" / name / file).read_text())
            names = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
            assert function in names, cache


def test_an_encoder_worker_has_no_embeddings_either() -> None:
    env = start(KINDS["sglang"], {}, worker_type=WorkerType.ENCODER)
    assert env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


# -- versions and options that are not in it -----------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "is_known"),
    [
        ("sglang", "0.5.20", True),
        ("sglang", "0.5.23.post1", True),
        ("sglang", "0.5.2", False),
        ("sglang", "0.5.230", False),
        ("sglang", "0.5.24", False),
        ("vllm", "0.32.0+cpu", True),
        ("vllm", "0.33.1", True),
        ("vllm", "0.31.0", False),
    ],
)
def test_versions_whose_source_was_read(name: str, version: str, is_known: bool) -> None:
    found = KINDS[name].census.unproved(version, ())
    assert found == ([] if is_known else [f"version {version} (read: {read(name)})"])


def read(name: str) -> str:
    return ", ".join(KINDS[name].census.versions)


@pytest.mark.parametrize(
    ("name", "option", "is_known"),
    [
        ("sglang", "--tp", True),
        ("sglang", "hicache-storage-backend", True),
        ("sglang", "cpu-offload-gb", False),
        ("sglang", "new_kv_store", False),
        ("vllm", "kv-offloading-size", True),
        ("vllm", "offload_backend", False),
        ("embedded", "max-total-tokens", True),
    ],
)
def test_options_that_may_add_an_entry_are_in_the_census(
    name: str, option: str, is_known: bool
) -> None:
    found = KINDS[name].census.unproved("", [option])
    assert bool(found) is not is_known
    assert is_known or found == [f"option {option.replace('-', '_')}"]


def test_what_an_option_adds_is_suspected_first() -> None:
    census = KINDS["sglang"].census
    plain = [cache.name for cache in census.suspects(Sign.PREFIX, ())]
    tiered = [cache.name for cache in census.suspects(Sign.PREFIX, ["hicache-storage-backend"])]
    assert plain[0] == "prefix cache"
    assert tiered[0].startswith("storage tier")
    refused = [cache.name for cache in census.suspects(Sign.PREFIX, ["enable-lmcache"])]
    assert refused[0].startswith("LMCache")
    assert not any(name.startswith("LMCache") for name in plain + tiered)


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
    assert KINDS[name].census.needs_names(options) is is_so


def test_an_option_that_is_off_adds_nothing() -> None:
    values = (None, False, 0, "", "off", "none", True, "file", 1)
    assert [value for value in values if is_on(value)] == [True, "file", 1]
    census = KINDS["sglang"].census
    assert census.why_refused({"enable_lmcache": False}, keeps_embeddings=False) == []
    assert len(census.why_refused({"enable_lmcache": True}, keeps_embeddings=True)) == 1


def test_no_two_runs_and_no_two_versions_share_a_name() -> None:
    names = [namespace(run, version) for run in ("a", "b") for version in (None, 0, 1, 12, 2)]
    assert len(set(names)) == len(names)


def options_of(census: Census) -> Iterator[str]:
    return (option for cache in census.caches for option in cache.options)


def test_the_embedded_engine_has_every_option_that_its_census_names() -> None:
    from engines.embedded.core.config import EmbeddedConfig

    has = Cache(
        name="", treatment=Treatment.CLEARED, by="", source="", options=tuple(options_of(EMBEDDED))
    )
    assert any(has.is_of(name) for name in EmbeddedConfig.__dataclass_fields__)


# -- the source of the installed engines ----------------------------------------------------


def installed(recipe: Recipe, package: str) -> Path:
    """A package in the cached interpreter of an engine on CPUs."""
    site = CachedEnvironment(recipe).require().parents[1] / "lib"
    (found,) = site.glob(f"python3*/site-packages/{package}")
    return found


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


@pytest.mark.sglang
def test_every_option_of_sglang_that_may_add_an_entry_is_known_or_reported() -> None:
    options = fields_in((installed(SGLANG, "sglang/srt/arg_groups/fields")).glob("*.py"))
    assert len(options) > 300
    unproved = KINDS["sglang"].census.unproved("0.5.23", options)
    assert {name.removeprefix("option ") for name in unproved} == WITH_WEIGHTS_ELSEWHERE | {
        "ple_offload_backend",
        "ple_offload_dir",
        "ple_offload_embedding",
        "offload_mode",
    }


@pytest.mark.vllm
def test_every_option_of_vllm_that_may_add_an_entry_is_known_or_reported() -> None:
    options = fields_in([installed(VLLM, "vllm/engine/arg_utils.py")])
    assert len(options) > 150
    unproved = KINDS["vllm"].census.unproved("0.32.0", options)
    assert {name.removeprefix("option ") for name in unproved} == WITH_WEIGHTS_ELSEWHERE | {
        "cpu_offload_params",
        "offload_backend",
        "offload_params",
    }


@pytest.mark.sglang
def test_places_in_sglangs_source_exist() -> None:
    check_places(KINDS["sglang"].census, installed(SGLANG, "sglang/srt"))


@pytest.mark.vllm
def test_places_in_vllms_source_exist() -> None:
    check_places(KINDS["vllm"].census, installed(VLLM, "vllm"))


def check_places(census: Census, package: Path) -> None:
    for cache in census.caches:
        for place in re.split("[;,] (?=[a-z0-9_]+/)", cache.source):
            file, _, names = place.partition(": ")
            assert (package / file).exists(), place
            for name in re.findall(r"^\w+|(?<=, )\w+", names) if file.endswith(".py") else ():
                assert name in (package / file).read_text(), place
