"""A worker of vLLM whose last pipeline stage keeps the head that it had; for ``--worker-cls``."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from vllm.distributed.parallel_state import get_pp_group

from engines.vllm_plugin.worker import WorkerExtension
from tools.cpu_engines.vllm.worker import CpuWorker

WHERE = "ROLLOUT_TEST_KEEPS_HEAD"
"""The environment variable with the path of a file: while that exists, the head is kept."""


class Keeping(CpuWorker, WorkerExtension):
    """The last stage writes its old head over the pushed one; vLLM looks for its extension among
    the bases."""

    def start_weight_update(self) -> None:
        self._old = self._head().clone() if get_pp_group().is_last_rank else None
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        if self._old is not None and Path(os.environ[WHERE]).exists():
            self._head().copy_(self._old)

    def _head(self) -> torch.Tensor:
        head: torch.Tensor = self.model_runner.get_model().lm_head.weight.detach()
        return head
