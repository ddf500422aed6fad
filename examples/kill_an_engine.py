"""Kill an engine in mid-rollout while the trainer is stopped, and watch the policy come back.

The trainer is a process of its own: it starts two engines under Ray with ``weights.store`` on,
pushes new weights, and is then frozen with SIGSTOP.  One engine is killed with SIGKILL while it
generates.  Ray's actors start it again and give it the pushed weights out of the node's memory; the
timeline is printed until it serves them, and only then the trainer may go on.

    python examples/kill_an_engine.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import rollout
from engines.embedded.tiny import make_tiny_model
from rollout.timeline.span import Span, read_lines

TOLD = ("fence", "restart", "adopt", "assemble", "update_weights_from_disk", "weights_checker")


def train(folder: Path) -> None:
    """The trainer: one push, then nothing more is wanted of it."""
    from safetensors.torch import load_file

    model_path = make_tiny_model(folder / "model")
    server = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": 2, "engine": {"cpus": 0.5}}},
        "health": {"probe_interval_s": 0.5},
        "weights": {"store": True},
    }
    config = {"run_id": "kill", "log_dir": str(folder / "logs"), "servers": {"policy": server}}
    weights = load_file(model_path / "model.safetensors")
    with rollout.launch(rollout.RolloutConfig.from_dict(config), backend="ray") as deployment:
        policy = deployment["policy"]
        policy.sync_weights({name: 1.5 * tensor for name, tensor in weights.items()}).result()
        while (status := policy.status().result()).store.version != policy.weight_version:
            time.sleep(0.05)
        engines = status.groups[0].engines
        print(json.dumps({"url": policy.url, "pid": engines[0].pid}), flush=True)
        sys.stdin.read()


def generate(url: str, until: threading.Event, answers: list[int]) -> None:
    """A rollout that never ends; a request that its engine loses is simply asked again."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    with httpx.Client(trust_env=False, timeout=60) as client:
        while not until.is_set():
            answers.append(client.post(f"{url}/generate", json=body).status_code)


def spans_since(folder: Path, since_s: float) -> list[Span]:
    """What the run has recorded of its engines since a moment."""
    lines = [line for file in folder.glob("logs/kill/*/*.jsonl") for line in file.open()]
    spans = [one for one in read_lines(lines) if one.start_s >= since_s and one.name in TOLD]
    return sorted(spans, key=lambda one: one.start_s)


def serves(url: str, engine_id: str) -> bool:
    engines = httpx.get(f"{url}/engines", trust_env=False).json()["engines"]
    return any(one["engine_id"] == engine_id and one["state"] == "serving" for one in engines)


def wait_for(is_so: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)


def watch(folder: Path) -> None:
    command = [sys.executable, __file__, "--trainer", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        try:
            told = json.loads(trainer.stdout.readline())  # type: ignore[union-attr]
            url, answers, until = told["url"], [], threading.Event()
            load = threading.Thread(target=generate, args=(url, until, answers))
            load.start()
            wait_for(lambda: len(answers) > 3)
            trainer.send_signal(signal.SIGSTOP)
            os.kill(told["pid"], signal.SIGKILL)
            killed_s = time.time()
            print("  0.00 s  trainer stopped, engine main-0 killed with requests on it", flush=True)
            wait_for(lambda: not serves(url, "main-0"))
            wait_for(lambda: serves(url, "main-0"))
            back_s = time.time() - killed_s
            wait_for(lambda: any(one.name == "adopt" for one in spans_since(folder, killed_s)))
            for span in spans_since(folder, killed_s):
                at = span.start_s - killed_s
                print(f"{at:6.2f} s  {span.name} took {span.elapsed_s:.2f} s  {span.said}")
            print(
                f"{back_s:6.2f} s  main-0 serves the pushed weights; the trainer is still stopped"
            )
            until.set()
            load.join()
            print(f"meanwhile {answers.count(200)} of {len(answers)} requests were answered")
        finally:
            trainer.send_signal(signal.SIGCONT)
            trainer.stdin.close()  # type: ignore[union-attr]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer:
        train(arguments.trainer)
        return
    with tempfile.TemporaryDirectory() as folder:
        watch(Path(folder))


if __name__ == "__main__":
    main()
