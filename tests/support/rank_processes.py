"""The processes of a trainer that pushes from every rank, and what its engines hold then."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rollout import DeploymentHandle, RolloutConfig
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.routes.buffers import remove_leftovers
from rollout.weights.tensors import bytes_fingerprint
from tests.support.engine_keys import request_to
from tests.support.forking.starts import STARTS

TRAINER = "tests.end_to_end.rank_trainer"

# A tiny model has several of these.
BUCKET_BYTES = 100_000


def tiny_policy(
    folder: Path, *, tie_embeddings: bool = True, num_engines: int = 1, **server: Any
) -> RolloutConfig:
    """A policy of embedded engines with a tiny model, which is made in this folder."""
    model_path = make_tiny_model(
        folder / "tiny", architecture="qwen3", tie_embeddings=tie_embeddings
    )
    policy = {
        "model_path": str(model_path),
        "groups": {"main": {"num_engines": num_engines, "engine": {"kind": "embedded"}}},
        "weights": {"bucket_bytes": BUCKET_BYTES},
        **server,
    }
    return RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})


class Ranks:
    """The processes of a trainer.

    Args:
        run: a deployment; only its ``config`` is read.
        folder: a new one, where the ranks meet.
    """

    def __init__(self, run: Any, folder: Path, num_ranks: int) -> None:
        self._run = run
        self._num_ranks = num_ranks
        self._start(folder)

    def _start(self, folder: Path) -> None:
        config, num_ranks = self._run.config, self._num_ranks
        model_path = config.servers["policy"].model_path
        run_folder = Path(config.log_dir) / config.run_id
        self.processes = [
            STARTS.start_module(
                *(TRAINER, run_folder, model_path, folder / "meet", rank, num_ranks),
                stdin=True,
                stdout=True,
            )
            for rank in range(num_ranks)
        ]
        self.writers = self.read()[0]["writers"]

    def do(self, command: str, **arguments: Any) -> list[dict[str, Any]]:
        """What each rank says of a command; of one that died, nothing."""
        self._tell(command, arguments)
        return self.read()

    def do_without(
        self, rank: int, command: str, release: Callable[[], Any] | None = None, /, **arguments: Any
    ) -> list[dict[str, Any]]:
        """``do``; one rank, which waits in it, is released after the others have answered.

        Args:
            release: None sends it the line that it waits for.
        """
        self._tell(command, arguments)
        said = {
            number: self._read(process)
            for number, process in enumerate(self.processes)
            if number != rank
        }
        (release or (lambda: self._write(self.processes[rank], "\n")))()
        said[rank] = self._read(self.processes[rank])
        return [said[number] for number in range(len(said))]

    def _tell(self, command: str, arguments: dict[str, Any]) -> None:
        for process in self.processes:
            self._write(process, json.dumps({"do": command, **arguments}) + "\n")

    def _write(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        return dict(json.loads(line)) if line else {}

    def read(self) -> list[dict[str, Any]]:
        return [self._read(process) for process in self.processes]

    def restart(self, folder: Path) -> None:
        """The trainer begins again with new processes, which meet in this new folder."""
        self.end()
        self._start(folder)

    def end(self) -> None:
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
            process.communicate()
        remove_leftovers(Path("/dev/shm"))  # of ranks that were killed


def drawn(model_path: Path | str, seed: int) -> dict[str, str]:
    """Fingerprints of what every rank draws from this seed."""
    manifest = read_checkpoint_manifest(model_path)
    assert manifest is not None
    torch.manual_seed(seed)
    return {
        name: bytes_fingerprint(name, torch.randn(spec.shape).to(getattr(torch, spec.dtype)))
        for name, spec in manifest.tensors.items()
    }


def served_seed(run: DeploymentHandle, seed: int) -> None:
    """Check that every engine holds what every rank draws from this seed."""
    wanted = drawn(run.config.servers["policy"].model_path, seed)
    for engine in run["policy"].status().result(30).groups[0].engines:
        body = json.dumps({"action": "checksum"}).encode()
        request = request_to(engine, "/weights_checker", body)
        with urllib.request.urlopen(request, timeout=30) as reply:
            found = json.load(reply)["ranks"][0]["checksums"]
        assert found == wanted


def errors(said: list[dict[str, Any]]) -> set[str]:
    return {f"{one.get('type')}: {one.get('error')}" for one in said}
