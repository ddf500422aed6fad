"""Kill one of two ranks in every function of a push: ``python -m tests.support.killed_ranks``.

    python -m tests.support.killed_ranks FOLDER ROUTE

A separate program, because it forks the ranks from a process that has imported torch.  Several
trainers, each with the same engines over all its pushes, share the functions: most of the time, a
rank waits for one that is silent.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rollout.core.pending import LoopThread
from rollout.weights.ranks.link import link_ranks
from tests.support.killed_push import TIMEOUT_S, Killer, Trainer
from tests.support.processes import wait_until

NUM_TRAINERS = 4
# Ranks wait so long for one that was killed.
SILENT_S = 1.0


def run_rank(pipe: Connection, folder: Path, route: str, rank: int, num_ranks: int) -> None:
    """One rank of a trainer, a process that pushes at each request; None ends it.

    A request is the function in which this push is killed here, empty for none; and how long the
    ranks wait for one that is silent.  The answer: the functions that it has called, whether it was
    killed, its error, and what is open after it.
    """
    threading.excepthook = lambda arguments: None
    torch.set_num_threads(1)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=num_ranks)
    loop = LoopThread("engines")
    trainer = Trainer(loop, folder, "all ranks", route, link_ranks("127.0.0.1"))
    trainer.push()
    num_files = psutil.Process().num_fds()
    while (request := pipe.recv()) is not None:
        victim, trainer.pusher._timeout_s = request
        failed = is_open = ""
        with Killer(victim) as killer:
            try:
                trainer.push()
            except Exception as error:
                failed = repr(error)
        try:
            trainer.check()
            assert wait_until(lambda: psutil.Process().num_fds() <= num_files, 10), "files"
        except AssertionError as error:
            is_open = repr(error)
        pipe.send((list(killer.functions), killer.has_killed, failed, is_open))
    trainer.close()
    dist.destroy_process_group()
    loop.close()


class RankProcesses:
    """Two processes that push together."""

    def __init__(self, folder: Path, route: str) -> None:
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(2)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(target=run_rank, args=(theirs, folder, route, rank, 2), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def push(self, *victims: str) -> list[Any]:
        """What both ranks answer; with victims, a rank soon takes the other one for dead."""
        timeout_s = SILENT_S if victims else TIMEOUT_S
        for pipe, victim in zip(self._pipes, victims or ("", ""), strict=True):
            pipe.send((victim, timeout_s))
        return [pipe.recv() for pipe in self._pipes]

    def kill_all(self, functions: Sequence[tuple[str, str]]) -> int:
        """Kill a push in each of these; how often that was done."""
        num_killed = 0
        for victims in functions:
            answers = self.push(*victims)
            assert [is_open for *_, is_open in answers] == ["", ""], victims
            num_killed += any(has_killed for _, has_killed, *_ in answers)
            after = self.push()
            assert [one[2:] for one in after] == [("", ""), ("", "")], victims
        return num_killed

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0


def main(folder: str, route: str) -> None:
    trainers = [RankProcesses(Path(folder) / str(number), route) for number in range(NUM_TRAINERS)]
    first, second = trainers[0].push()
    victims = [(name, "") for name in first[0]] + [("", name) for name in second[0]]
    parts = [victims[number::NUM_TRAINERS] for number in range(NUM_TRAINERS)]
    with ThreadPoolExecutor(NUM_TRAINERS) as threads:
        num_killed = sum(threads.map(RankProcesses.kill_all, trainers, parts))
    for trainer in trainers:
        trainer.close()
    print(f"killed in {num_killed} of {len(victims)} functions", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
