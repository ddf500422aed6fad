"""vLLM's worker of GPUs with our checks, for ``--worker-cls``.  Not tested on a GPU."""

from vllm.v1.worker.gpu_worker import Worker

from engines.vllm_plugin.worker import CheckedWorker, WorkerExtension


class GpuWorker(CheckedWorker, WorkerExtension, Worker):  # type: ignore[misc]
    """One rank on a GPU."""
