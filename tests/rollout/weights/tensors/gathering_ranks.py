"""Ranks of a trainer, in processes of their own, that gather shards together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.forking.starts import ROOT, STARTS

WORKER = Path(__file__).with_name("fsdp_worker.py")


def gather_by_ranks(
    folder: Path, *arguments: str, num_ranks: int = 2, worker: Path = WORKER
) -> list[dict[str, Any]]:
    """What each rank says of the gathers that all took part in."""
    module = ".".join(worker.relative_to(ROOT).with_suffix("").parts)
    ranks = [
        STARTS.start_module(module, rank, folder, *arguments, stderr=True)
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(num_ranks)]
