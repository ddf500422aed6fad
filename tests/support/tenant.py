"""A run that shares its host: ``python -m tests.support.tenant MODEL FOLDER RUN_ID ROUNDS SCALE``.

In each round a driver launches an engine, pushes, kills the engine and waits until it is back with
the pushed version, and pushes again.  Then it ends in order, or is killed together with the guard
of its engine, so that the next round finds leftovers.  The weights are the model's times ``SCALE``.
Prints one line of JSON for each round.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.support.processes import wait_until

_VERSIONS = 3


def main() -> None:
    if sys.argv[1] == "drive":
        drive(*sys.argv[2:])
        return
    *where, rounds, scale = sys.argv[1:]
    for number in range(int(rounds)):
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.tenant", "drive", *where, scale],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert driver.stdout is not None
        line = driver.stdout.readline()
        assert line, f"round {number}: the driver ended with {driver.wait(30)}"
        found: dict[str, Any] = json.loads(line)
        if number % 2 == 0 and number + 1 < int(rounds):
            kill_with_guard(driver, found["pid"])
            found["is_killed"] = True
        else:
            driver.communicate(timeout=60)
            assert driver.returncode == 0
        print(json.dumps(found), flush=True)


def kill_with_guard(driver: subprocess.Popen[bytes], engine: int) -> None:
    """A guard that is stopped does not see the driver end."""
    guard = psutil.Process(engine).parent()
    assert guard is not None
    guard.suspend()
    driver.kill()
    driver.wait(10)
    guard.kill()
    assert wait_until(lambda: not guard.is_running() or guard.status() == "zombie", 20)


def drive(model: str, folder: str, run_id: str, scale: str) -> None:
    import httpx
    from safetensors.torch import load_file

    from rollout import RolloutConfig, launch

    config = RolloutConfig.from_dict(
        {
            "run_id": run_id,
            "log_dir": folder,
            "servers": {
                "policy": {
                    "model_path": model,
                    "groups": {
                        "main": {"num_engines": 1, "engine": {"kind": "embedded", "cpus": 0.5}}
                    },
                    "health": {"probe_interval_s": 0.5, "probe_timeout_s": 5.0},
                    "weights": {
                        "store": {"spare_bytes": 0, "unit_bytes": 20_000},
                        "transport": "shared_memory",
                    },
                }
            },
        }
    )
    weights = load_file(Path(model) / "model.safetensors")
    with launch(config, backend="local") as deployment:
        policy = deployment["policy"]

        def engine() -> Any:
            return policy.status().result(60).groups[0].engines[0]

        def logprob() -> float:
            body = {
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
            }
            reply = httpx.post(f"{policy.url}/generate", json=body, trust_env=False, timeout=120)
            reply.raise_for_status()
            assert reply.headers["x-weight-version"] == str(policy.weight_version)
            return float(reply.json()["meta_info"]["output_token_logprobs"][0][0])

        served, pids = [], set()
        for version in range(1, _VERSIONS + 1):
            factor = float(scale) + version / 10
            policy.push({name: factor * tensor for name, tensor in weights.items()}).result(120)
            served.append(logprob())
            pids.add(engine().pid)
            if version == 2:
                assert wait_until(
                    lambda: policy.status().result(60).store.version == policy.weight_version, 60
                )
                before = engine().pid
                os.kill(before, signal.SIGKILL)
                assert wait_until(
                    lambda b=before: (e := engine()).pid not in (b, None) and e.state == "serving",
                    120,
                )
                served.append(logprob())
        now = engine()
        pids.add(now.pid)
        left = policy.status().result(60)
        print(
            json.dumps(
                {
                    "pid": now.pid,
                    "engine": now.engine_id,
                    "state": now.state,
                    "version": policy.weight_version,
                    "store": left.store.version,
                    "served": served,
                    "engines": len(pids),
                }
            ),
            flush=True,
        )
        sys.stdin.read()


if __name__ == "__main__":
    main()
