"""The fingerprints that a push takes: by the method of its engines, or none.  Needs torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.tensors.fingerprint import BYTES, SUMS
from rollout.config import Transport, WeightsConfig
from rollout.weights.push.shm_buffers import ShmBufferPool

torch = pytest.importorskip("torch")
from engines.embedded.weights import torch_fingerprint  # noqa: E402
from rollout.weights.tensors import PushSender, TrainerWeights, bucket_writer  # noqa: E402

pytestmark = pytest.mark.embedded
MAKE = {BYTES: torch_fingerprint.bytes_fingerprint, SUMS: torch_fingerprint.device_fingerprint}


@pytest.mark.parametrize("method", [BYTES, SUMS, ""])
@pytest.mark.parametrize("transport", [Transport.SHARED_MEMORY, Transport.TENSOR, Transport.DISK])
def test_a_push_has_the_fingerprints_that_its_engines_make(
    transport: Transport, method: str, tmp_path: Path
) -> None:
    tensors = {"a": torch.randn(64, 8), "b": torch.randn(5).to(torch.bfloat16)}
    pool = ShmBufferPool(str(tmp_path))
    settings = WeightsConfig(disk_path=str(tmp_path / "{version}"))
    sender = PushSender(settings, pool, model_path=str(tmp_path), fingerprints=method)
    outgoing = sender.send(
        TrainerWeights(tensors, bucket_bytes=1 << 20), 1, transport, may_stream=False
    )
    try:
        make = MAKE.get(method)
        expected = {name: make(name, one) for name, one in tensors.items() if make}
        assert outgoing.push.manifest.fingerprints == expected
    finally:
        outgoing.close()
        pool.close()


def test_sums_never_copy_a_tensor_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A double of a tensor on a GPU: what is copied to the host is counted."""
    copied: list[int] = []
    original = torch_fingerprint._host_bytes
    monkeypatch.setattr(
        torch_fingerprint,
        "_host_bytes",
        lambda content: copied.append(content.nbytes) or original(content),
    )
    tensor = torch.randn(8 << 20)
    bucket_writer.fingerprints_of([("a", tensor)], SUMS)
    assert 0 < sum(copied) < tensor.nbytes / 16
