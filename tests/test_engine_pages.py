"""The pages of SGLang on GPUs and of mixtures of experts: their options exist, their figures are
computed, and what they call refused is refused."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import rollout
import rollout.driver
from engines.kinds import kind_of
from engines.protocol import Endpoint
from engines.protocol.spec import EngineSpec, spelled
from engines.sglang.command import build_command
from rollout.rules.gpu_memory import engine_sums
from tests.support.recipes import GPU_GIB, parts

HOW_TO = Path(__file__).parents[1] / "docs/how-to"
SGLANG, MOE = ((HOW_TO / name).read_text() for name in ("sglang.md", "moe.md"))
OPTION = re.compile(r"`(?:options: \{)?([a-z][a-z0-9]*(?:-[a-z0-9]+)+)(?:: [\w.]+)?\}?`")


def section(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_each_option_of_the_page_of_sglang_is_one_of_its_pinned_version() -> None:
    known = kind_of("sglang").known_options()
    named = OPTION.findall(SGLANG)
    assert len(named) > 40
    assert {name for name in named if spelled(name) not in known} == set()


def test_each_option_of_the_page_of_experts_is_one_of_sglangs_or_vllms() -> None:
    known = kind_of("sglang").known_options() | kind_of("vllm").known_options()
    named = OPTION.findall(MOE)
    assert len(named) > 10
    assert {name for name in named if spelled(name) not in known} == set()


ROWS = [line for line in section(SGLANG, "What you must not set").splitlines() if line[:3] == "| `"]
REFUSED = [name for row in ROWS for name in re.findall(r"`([\w-]+)`", row.split(" | ")[0])]


def why_refused(option: str) -> str:
    """Why an engine does not start with this option; empty if it does."""
    options = {option: "value"}
    spec = EngineSpec("main-0", "sglang", "/model", "engine.log", gpu_ids=(0,), options=options)
    try:
        build_command(spec, Endpoint("127.0.0.1", 20000))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_must_not_be_set_is_refused_by_its_name(option: str) -> None:
    assert f"options that cannot be set here: {spelled(option)} (" in why_refused(option)


def test_the_page_names_all_options_that_are_refused() -> None:
    known = kind_of("sglang").known_options()
    refused = {name for name in known if "cannot be set here" in why_refused(name)}
    assert refused == set(map(spelled, REFUSED)) & known


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ("tensor parallelism", {"tp-size": 8, "ep-size": 8}),
        ("DP attention", {"tp-size": 8, "attn-dp-size": 8, "ep-size": 8}),
    ],
)
def test_the_figures_of_attention_are_computed(row: str, options: dict[str, int]) -> None:
    shards = kind_of("sglang").shards(options, 8)
    assert shards is not None
    sums = engine_sums(
        parts("Qwen3-30B-A3B"),
        shards,
        gpu_bytes=int(GPU_GIB * (1 << 30)),
        gpu_share=0.3,
        element_bytes=2,
        kv_element_bytes=2,
    )
    (line,) = (line for line in MOE.splitlines() if line.startswith(f"| {row} |"))
    weights, token, tokens = line.strip("| ").split(" | ")[1:]
    assert weights == f"{sums.weights_bytes / (1 << 30):.1f} GiB"
    assert token.startswith(f"{sums.kv_token_bytes >> 10} KiB")
    assert tokens == f"{sums.kv_tokens:,}".replace(",", " ")


def test_the_code_of_the_page_of_experts_names_what_exists() -> None:
    """It is of ``how-to/moe.md``: ``routed_experts`` is an argument, and ``padded`` is there."""
    (block,) = re.findall(r"^```py\n(.*?)^```", MOE, re.MULTILINE | re.DOTALL)
    ast.parse(block)
    assert "routed_experts" in inspect.signature(rollout.Driver).parameters
    assert hasattr(rollout.driver, "padded")
