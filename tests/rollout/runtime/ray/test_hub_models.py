"""Models of the Hub on the nodes of a real cluster: each gets the files of the same commit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub_double import COMMIT, serving
from tests.support.processes import ROOT
from tests.support.ray_worlds import RAY_SETTINGS

pytest.importorskip("ray")
pytest.importorskip("huggingface_hub")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

# The cluster's workers have the variables of this process when it starts.
SCRIPT = """
import sys, ray
ray.init(address="local", num_cpus=1, include_dashboard=False)
from rollout.runtime.ray.launch import fetch_models
(node,) = (node["NodeID"] for node in ray.nodes())
for folder in sys.argv[1:]:
    try:
        fetch_models([folder, "/models/other"], [node])
        print("has it")
    except Exception as error:
        print(str(error).replace(node, "NODE"))
"""


def test_a_node_downloads_the_commit_or_names_what_is_in_the_way(tmp_path: Path) -> None:
    snapshot = f"models--tiny--model/snapshots/{COMMIT}"
    folders = [f"{tmp_path}/hub/{snapshot}", f"/elsewhere/{snapshot}"]
    folders.append(folders[0].replace("tiny", "wrong"))
    with serving("tiny/model", {"config.json": b"{}"}) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *folders],
            cwd=ROOT,
            env=os.environ | RAY_SETTINGS | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
    assert (Path(folders[0]) / "config.json").read_bytes() == b"{}"
    first, second, third = (line for line in done.stdout.splitlines() if "(" not in line[:1])
    assert first == "has it"
    assert second.startswith(
        f"model_path = {folders[1]!r}: node NODE: its cache of the Hub has the"
    )
    assert third.startswith(f"model_path = {folders[2]!r}: node NODE: is neither a folder nor a")
