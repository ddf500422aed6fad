"""All ranks of a trainer push adapters, a full base, and weights that check the push path."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.protocol.lora_config import rank_and_scale
from rollout import DeploymentHandle, launch
from rollout.weights.tensors import bytes_fingerprint
from tests.support.engine_keys import request_to
from tests.support.lora import drawn_adapter, split_by_adapter
from tests.support.rank_processes import Ranks, drawn, errors, served_seed, tiny_policy

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(180)]
# Engines have one rank for all modules, so that the other is padded.
CONFIG = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "up_proj"],
    "rank_pattern": {"up_proj": 8},
    "alpha_pattern": {"up_proj": 16},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    options = {"enable-lora": True, "max-lora-rank": 8}
    groups = {"main": {"engine": {"kind": "embedded", "options": options}}}
    folder = tmp_path_factory.mktemp("run")
    with launch(tiny_policy(folder, groups=groups, weights={"update": "lora"})) as deployment:
        yield deployment


def held(run: DeploymentHandle) -> tuple[dict[str, str], dict[str, str]]:
    """Fingerprints of base and adapter, by the engine's own account."""
    (engine,) = run["policy"].status().result(30).groups[0].engines
    body = json.dumps({"action": "checksum"}).encode()
    with urllib.request.urlopen(request_to(engine, "/weights_checker", body), timeout=30) as reply:
        found: dict[str, str] = json.load(reply)["ranks"][0]["checksums"]
    return split_by_adapter(found)


def padded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    rank, _ = rank_and_scale(CONFIG, name.partition(".lora_")[0].removeprefix("base_model.model."))
    added = (0, 0, 0, 8 - rank) if "lora_A" in name else (0, 8 - rank)
    return torch.nn.functional.pad(tensor, added)


@pytest.mark.slow
def test_an_adapter_and_a_base_whose_shards_all_ranks_have(
    run: DeploymentHandle, tmp_path: Path
) -> None:
    model_path = Path(run.config.servers["policy"].model_path)
    before = held(run)[0]
    ranks = Ranks(run, tmp_path, 2)

    def adapter_prints(seed: int) -> dict[str, str]:
        named = drawn_adapter(model_path, seed, CONFIG)
        return {name: bytes_fingerprint(name, padded(name, one)) for name, one in named.items()}

    def done(version: int, said: list[dict[str, Any]]) -> None:
        assert [one.get("version") for one in said] == [version] * 2, said

    try:
        done(1, ranks.do("adapter", seed=1, config=CONFIG))
        assert held(run) == (before, adapter_prints(1))
        run["policy"].offload().result(60)
        done(2, ranks.do("adapter", seed=2, config=CONFIG))
        assert held(run) == (before, adapter_prints(2))
        # All base weights end the adapter, as from one process.
        done(3, ranks.do("push", seed=3, is_base=True))
        assert held(run)[0] == drawn(model_path, 3)
        assert run["policy"].status().result(30).groups[0].engines[0].weight_version == 3
        done(4, ranks.do("adapter", seed=4, config=CONFIG))
        assert held(run) == (drawn(model_path, 3), adapter_prints(4))
        refused = ranks.do("adapter", seed=5, config={**CONFIG, "r": 8, "use_dora": True})
        assert len(errors(refused)) == 1
        assert "use_dora = True is not supported by any engine" in str(errors(refused))
        assert held(run) == (drawn(model_path, 3), adapter_prints(4))
    finally:
        ranks.end()


@pytest.mark.slow
def test_all_ranks_check_the_push_path_before_the_first_push(tmp_path: Path) -> None:
    with launch(tiny_policy(tmp_path, health={"recover": False})) as run:
        ranks = Ranks(run, tmp_path, 2)
        try:
            said = ranks.do("check_path")
            assert [one.get("version") for one in said] == [1, 1], said
            assert "snapshot" in said[1]["phases"]
            assert run["policy"].status().result(30).gate == "open"
            said = ranks.do("check_path")
            (error,) = errors(said)
            assert "the engines hold pushed weights, version 1" in error
            assert [one.get("version") for one in ranks.do("push", seed=2)] == [2, 2]
            served_seed(run, 2)
        finally:
            ranks.end()
