"""Kill an engine during a rollout while the trainer is stopped, and watch the recovery.

The trainer runs in another process.  It starts two engines under Ray with ``weights.store`` on,
pushes new weights, and is then stopped with SIGSTOP.  An engine is killed with SIGKILL while it
generates.  The Ray actors restart it and load the pushed weights from the memory of the node.  The
program prints the timeline until the engine serves again, and only then continues the trainer.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import rollout
from rollout.testing import make_tiny_model

without_proxy = build_opener(ProxyHandler({}))
SPAN_NAMES = (
    "fence",
    "boot",
    "admit",
    "readmit",
    "assemble",
    "update_weights_from_disk",
    "weights_checker",
)


def train(folder: Path) -> None:
    """The trainer: start the engines, push once, and wait for the end of the input."""
    from safetensors.torch import load_file

    model_path = make_tiny_model(folder / "model")
    server = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded", "cpus": 0.5}}},
        "health": {"probe_interval_s": 0.5},
        "weights": {"store": True},
    }
    config = {"run_id": "kill", "log_dir": str(folder / "logs"), "servers": {"policy": server}}
    weights = load_file(model_path / "model.safetensors")
    with rollout.launch(rollout.RolloutConfig.from_dict(config), backend="ray") as deployment:
        policy = deployment["policy"]
        policy.push({name: 1.5 * tensor for name, tensor in weights.items()}).result()
        wait_for(lambda: policy.status().result().store.version == policy.weight_version)
        engines = policy.status().result().groups[0].engines
        print(json.dumps({"url": policy.url, "pid": engines[0].pid}), flush=True)
        sys.stdin.read()


def generate(url: str, is_over: threading.Event, statuses: list[int]) -> None:
    """Send requests until the end of the example; collect the status of each reply."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    request = Request(f"{url}/generate", json.dumps(body).encode())
    while not is_over.is_set():
        try:
            with without_proxy.open(request, timeout=60) as reply:
                reply.read()
                statuses.append(reply.status)
        except HTTPError as error:
            statuses.append(error.code)


def spans_since(folder: Path, since_s: float) -> list[dict[str, Any]]:
    """Spans of the engines that began after ``since_s``, in order."""
    lines = [line for file in folder.glob("logs/kill/*/*.jsonl") for line in file.open()]
    spans = [json.loads(line) for line in lines if line.endswith("\n")]
    spans = [one for one in spans if one["start_s"] >= since_s and one["name"] in SPAN_NAMES]
    return sorted(spans, key=lambda span: float(span["start_s"]))


def serves(url: str, engine_id: str) -> bool:
    with without_proxy.open(f"{url}/engines", timeout=60) as reply:
        engines = json.load(reply)["engines"]
    states = {engine["engine_id"]: engine["state"] for engine in engines}
    return states.get(engine_id) == "serving"


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"condition not met within {timeout_s:g} s")
        time.sleep(0.02)


def watch(folder: Path) -> None:
    command = [sys.executable, __file__, "--trainer", str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        try:
            started = json.loads(trainer.stdout.readline())  # type: ignore[union-attr]
            url, statuses, is_over = started["url"], [], threading.Event()
            clients = threading.Thread(target=generate, args=(url, is_over, statuses), daemon=True)
            clients.start()
            wait_for(lambda: len(statuses) > 3)
            trainer.send_signal(signal.SIGSTOP)
            os.kill(started["pid"], signal.SIGKILL)
            killed_s = time.time()
            print("  0.00 s  trainer stopped, engine main-0 killed with requests on it", flush=True)
            wait_for(lambda: not serves(url, "main-0"))
            wait_for(lambda: serves(url, "main-0"))
            recovered_s = time.time() - killed_s
            wait_for(
                lambda: any(span["name"] == "readmit" for span in spans_since(folder, killed_s))
            )
            for span in spans_since(folder, killed_s):
                after_s, took_s = span["start_s"] - killed_s, span["elapsed_s"]
                print(
                    f"{after_s:6.2f} s  {span['name']} took {took_s:.2f} s  {span.get('said', '')}"
                )
            print(f"{recovered_s:6.2f} s  main-0 serves the pushed weights; the trainer is stopped")
            is_over.set()
            clients.join()
            print(f"meanwhile {statuses.count(200)} of {len(statuses)} requests got a reply")
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
