"""What the workers of vLLM do for us besides their own work: they report and check weights.

``WorkerExtension`` is for ``--worker-extension-cls``: ``/collective_rpc`` calls its methods.
``CheckedWorker`` is for a class of ``--worker-cls``, before vLLM's own worker.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engines.tensors.fingerprint import BYTES, SUMS
from engines.tensors.torch_fingerprint import device_fingerprints, dtype_name, fingerprints
from engines.vllm_plugin.checkpoint_names import packed_elsewhere, parts_of, tied_names

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_LOSES_WEIGHTS = 2


class WorkerExtension:
    """Reports the weights of a worker, under the names of the checkpoint where that is possible."""

    def rollout_fingerprints(self) -> dict[str, Any]:
        """Fingerprints of what the model computes with, and its bytes; made on a GPU they are sums,
        so that the weights are not copied to the host."""
        tensors = {part.name: part.tensor for part in _parts(self)}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        is_on_gpu = _method(self) == SUMS
        digests = device_fingerprints(tensors.items()) if is_on_gpu else fingerprints(tensors)
        return {"checksums": digests, "num_bytes": num_bytes}

    def rollout_manifest(self) -> list[dict[str, Any]]:
        """Name, dtype and shape of each tensor of the checkpoint, or empty where the names or
        shapes here are vLLM's own, so that a push is checked against the checkpoint's files
        alone."""
        parts = _parts(self)
        if not all(part.is_known for part in parts):
            return []
        tensors = {part.name: part.tensor for part in parts}
        tied = {
            name: tensors[same]
            for name, same in tied_names(_model(self)).items()
            if same in tensors
        }
        return [
            {
                "name": name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "is_tied": name not in tensors,
            }
            for name, tensor in (tensors | tied).items()
        ]

    def rollout_state(self) -> dict[str, Any]:
        """What is released, how many bytes each tag holds, where the worker counts them, the method
        of the fingerprints, where they are of tensors of the checkpoint, whether the worker can
        open CUDA IPC handles, the encodings it applies, and the broadcast groups that it is in."""
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {
            "released": sorted(getattr(self, "released_tags", ())),
            "resident_bytes": dict(getattr(self, "resident_bytes", dict)()),
            "fingerprints": _method(self) if all(part.is_known for part in _parts(self)) else "",
            "encodings": list(getattr(transfer, "encodings", ())),
            "opens_handles": _device(self).type == "cuda",
            "groups": _groups(self).names(),
        }

    def rollout_join_group(self, *, rank_offset: int, **group: Any) -> dict[str, str]:
        """Join a group that a trainer broadcasts through; returns the error when all have joined,
        or not all in time.

        Args:
            rank_offset: the rank of this server's first worker in it.
            group: the other arguments of ``UpdateGroups.join``.
        """
        rank = rank_offset + self.vllm_config.parallel_config.rank  # type: ignore[attr-defined]
        return _tried(lambda: _groups(self).join(rank=rank, **group))

    def rollout_receive_bucket(self, *, base: str = "", **bucket: Any) -> dict[str, str]:
        """vLLM's ``update_weights`` with a bucket that is broadcast; returns the error."""
        info = {"broadcast": bucket, "base": base}
        return _tried(lambda: self.update_weights(info))  # type: ignore[attr-defined]

    def rollout_leave_group(self, *, group_name: str) -> dict[str, str]:
        """Leave one; returns the error."""
        return _tried(lambda: _groups(self).leave(group_name))


def _model(worker: Any) -> Any:
    return worker.model_runner.get_model()


def _device(worker: Any) -> Any:
    return worker.device


def _method(worker: Any) -> str:
    return SUMS if _device(worker).type == "cuda" else BYTES


def _groups(worker: Any) -> Any:
    return worker.weight_transfer_engine.broadcasts.groups


def _tried(act: Callable[[], object]) -> dict[str, str]:
    """The error as an answer, empty for none.

    If one of several workers raises, vLLM 0.32 leaves the answers of those after it in their
    queues, and takes them for those to the next call.
    """
    try:
        act()
    except Exception as error:
        logger.exception("a call of this worker failed")
        return {"error": str(error) or repr(error)}
    return {"error": ""}


def _parts(worker: Any) -> Sequence[Any]:
    return parts_of(_model(worker), worker.vllm_config)


class CheckedWorker:
    """Refuses what vLLM would take and do wrong.

    - an update while the weights are released: vLLM 0.32 writes to memory that is not there;
    - an update of weights that a kernel keeps for itself: vLLM 0.32 then computes with memory that
      was freed;
    - the end of a session that lacks tensors after a release without a backup.

    A session whose end fails is closed; vLLM would leave it open and refuse the next one.
    """

    released_tags: frozenset[str] = frozenset()

    def __init__(self, *args: Any, distributed_init_method: str, **kwargs: Any) -> None:
        method = beside_sockets(distributed_init_method, os.environ.get("VLLM_RPC_BASE_PATH", ""))
        super().__init__(*args, distributed_init_method=method, **kwargs)  # type: ignore[call-arg]

    def sleep(self, level: int = 1) -> None:
        _above(self).sleep(level)
        self.released_tags |= {WEIGHTS, KV_CACHE}
        self._note_loss(level == _LOSES_WEIGHTS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        _above(self).wake_up(tags)
        self.released_tags -= frozenset(tags) if tags else self.released_tags

    def discard(self, tags: tuple[str, ...]) -> None:
        _above(self).discard(tags)
        self.released_tags |= frozenset(tags)
        self._note_loss(WEIGHTS in tags)

    def start_weight_update(self) -> None:
        if WEIGHTS in self.released_tags:
            raise RuntimeError("the weights are released; call /wake_up?tags=weights first")
        if layer := packed_elsewhere(_model(self)):
            raise RuntimeError(
                f"vLLM packs the weight of {layer} where no update reaches it; serve a checkpoint "
                "of another quantisation, or of none"
            )
        _above(self).start_weight_update()

    def finish_weight_update(self) -> None:
        try:
            _above(self).finish_weight_update()
        except BaseException:
            self._weight_update_active = False
            raise

    def _note_loss(self, is_lost: bool) -> None:
        engine = getattr(self, "weight_transfer_engine", None)
        if is_lost and engine is not None:
            engine.is_lost = True


def beside_sockets(init_method: str, folder: str) -> str:
    """How ranks meet, with a file that they meet by in this folder, which ends with the engine.

    vLLM's own choice is the temporary folder, where the file remains.
    """
    scheme, _, path = init_method.partition("://")
    return f"file://{folder}/{Path(path).name}" if folder and scheme == "file" else init_method


def _above(worker: CheckedWorker) -> Any:
    """The methods of the class that follows ``CheckedWorker``, which is vLLM's own."""
    return super(CheckedWorker, worker)
