"""SGLang's own benchmark client, as it is, against our router."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.real_policy import RealPolicy
from tools.cpu_engines import install

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

NUM_PROMPTS = 24


@pytest.mark.parametrize("backend", ["sglang", pytest.param("sglang-oai", marks=pytest.mark.chaos)])
def test_sglangs_benchmark_runs_through_the_router(
    policy: RealPolicy, tmp_path: Path, backend: str
) -> None:
    out = tmp_path / "figures.jsonl"
    # Lengths given in tokens of made-up ids: nothing is downloaded.
    command = [
        *(str(install.python_of("sglang")), "-m", "sglang.benchmark.serving"),
        *("--backend", backend, "--base-url", policy.handle.url),
        *("--dataset-name", "random-ids", "--tokenizer", str(policy.models[0])),
        *("--num-prompts", str(NUM_PROMPTS), "--random-input-len", "32"),
        *("--random-output-len", "16", "--random-range-ratio", "1.0"),
        *("--max-concurrency", "8", "--output-file", str(out), "--disable-tqdm"),
    ]
    # It imports a library of data sets, which it uses for one that is not asked for here.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    variables = install.variables_of("sglang")
    path = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    env = os.environ | variables | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (line,) = out.read_text().splitlines()
    figures = json.loads(line)
    assert figures["completed"] == NUM_PROMPTS
    assert figures["total_output_tokens"] == 16 * NUM_PROMPTS
    assert policy.is_whole()
