"""The example on real SGLang and vLLM: the quickstart's loop, with engines of other projects."""

import json
from pathlib import Path

import pytest

from tests.support.processes import program, wait_until
from tools.cpu_engines import install

pytestmark = [pytest.mark.timeout(900)]
FEW = ("--steps", "4", "--engines", "1")
OPTIONS = {"sglang": {}, "vllm": {"max-num-seqs": 128}}


def learns(out: Path, kind: str, *more: str) -> tuple[float, float]:
    """Accuracy before and after, of a run in which each step pushes and frees memory."""
    engine = out / "engine.yaml"
    engine.write_text(json.dumps(install.engine(kind, options=OPTIONS[kind])))
    how = ("--engine", str(engine), "--backend", "local", "--out", str(out), *more)
    with program("examples/colocated_grpo.py", *how) as example:
        assert example.finish(850) == 0, example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    figures = json.loads((out / "colocated_grpo.json").read_text())
    versions = [step["weight_version"] for step in figures["steps"]]
    assert versions == list(range(1, len(versions) + 1))
    assert all(step["freed_bytes"] > 10 * 2**20 for step in figures["steps"])
    return figures["before"]["eval/addition"], figures["eval"]["eval/addition"]


@pytest.mark.sglang
def test_accuracy_climbs_on_real_sglang(warm_started: Path, tmp_path: Path) -> None:
    before, after = learns(tmp_path, "sglang", "--model", str(warm_started), *FEW)
    assert before < 0.5
    assert after > before + 0.2


@pytest.mark.vllm
def test_accuracy_climbs_on_real_vllm(tmp_path: Path) -> None:
    """With the model that the example makes for it, whose heads are large enough."""
    before, after = learns(tmp_path, "vllm", *FEW)
    assert before < 0.5
    assert after > before + 0.2


@pytest.mark.vllm
@pytest.mark.chaos
def test_two_engines_of_real_vllm_learn_to_add(tmp_path: Path) -> None:
    before, after = learns(tmp_path, "vllm", "--steps", "8")
    assert before < 0.5
    assert after > 0.8
