"""The pages of FSDP2 and Megatron begin with code that runs: here over fakes, on one rank.

The pages of TRL, verl, SkyRL and OpenRLHF run in ``tests/end_to_end``, slime's in
``tests/rollout/driver/test_slime_page.py``, and ``docs/trainers.md`` in ``tests/test_docs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import rollout
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import RolloutConfig
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.pages import DOCS, code_of, run_code
from tests.support.served_fakes import TIMEOUT_S, config, launched

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.embedded
GROUPS = {"main": {"num_engines": 2}}


def tensors() -> dict[str, Any]:
    return {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """torch.distributed with a single rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_loop_of_fsdp2_trains_and_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[DeploymentHandle] = []
    phases: list[str] = []

    def launch(given: RolloutConfig) -> DeploymentHandle:
        launches.append(launch_local(given, launcher=HttpFakeLauncher()))
        return launches[-1]

    def train(model: Any, groups: list[rollout.SampleGroup]) -> None:
        assert all(sample.reward == 1.0 for group in groups for sample in group)
        phases.append(launches[0]["policy"].status().result(TIMEOUT_S).phase)

    monkeypatch.setattr(rollout, "launch", launch)
    chosen = config(tmp_path, GROUPS)
    names = {
        "config": chosen,
        "run_folder": Path(chosen.log_dir) / chosen.run_id,
        "judge": lambda sample: 1.0,
        "my_share": [rollout.Prompt((1, 2))],
        "sampling": rollout.SamplingParams(max_new_tokens=2),
        "train": train,
        "model": SimpleNamespace(state_dict=tensors),
    }
    steps = "range(1, 101)"
    code = code_of("how-to/fsdp2.md")
    assert steps in code
    try:
        exec(compile(code.replace(steps, "range(1, 3)"), "fsdp2.md", "exec"), names)
        status = launches[0]["policy"].status().result(TIMEOUT_S)
    finally:
        for one in (names.get("pusher"), names.get("policy")):
            if one is not None:
                one.close()  # type: ignore[attr-defined]
        for deployment in launches:
            deployment.stop()
    assert (phases, status.phase, status.weight_version) == (["offloaded"] * 2, "serving", 2)


def test_the_page_of_megatron_pushes_what_a_generator_yields(tmp_path: Path) -> None:
    bridge = SimpleNamespace(export_hf_weights=lambda model: iter(model.items()))
    with launched(launch_local, tmp_path, GROUPS) as deployment:
        policy = deployment["policy"]
        made = run_code("how-to/megatron.md", policy=policy, bridge=bridge, model=tensors(), step=7)
        made["pusher"].close()
        status = policy.status().result(TIMEOUT_S)
    assert made["report"].weight_version == 7
    assert (status.phase, status.weight_version) == ("serving", 7)


def test_trainers_are_the_second_page_and_link_to_each_trainers_page() -> None:
    lines = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert yaml.safe_load(lines)[1] == "trainers.md"
    text = (DOCS / "trainers.md").read_text()
    pages = ("how-to/trl.md", "how-to/fsdp2.md", "how-to/megatron.md", "how-to/verl.md")
    pages += ("how-to/skyrl.md", "how-to/names.md#slime", "how-to/names.md#openrlhf")
    assert [page for page in pages if f"]({page})" not in text] == []
