"""A deployment over fake engines, for tests of a training loop: no GPU, no cluster, no torch."""

from __future__ import annotations

from typing import Literal

from engines.fake import FakeTensor, pack_tensors
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import RolloutConfig
from rollout.runtime.handle import DeploymentHandle
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.push import Push
from rollout.weights.push.weight_push import WeightPush


def launch_fakes(
    config: RolloutConfig, *, backend: Literal["local", "ray"] = "local"
) -> DeploymentHandle:
    """``rollout.launch`` with fake engines in this process, which listen as real ones do.

    Args:
        config: its servers; a ``model_path`` is a folder of ``fake_checkpoint``.
        backend: ``ray`` inside ``stub_ray.installed()`` runs the classes of the actors without Ray.

    Raises:
        ConfigError: a setting is wrong.
        PhaseFailed: an engine did not start.
    """
    if backend == "ray":
        from rollout.runtime.ray.launch import launch_ray

        return launch_ray(config, launcher=HttpFakeLauncher())
    from rollout.runtime.local import launch_local

    return launch_local(config, launcher=HttpFakeLauncher())


def fake_push(version: int) -> Push:
    """New weights for a model of ``fake_checkpoint``, as ``make_push`` makes them with torch.

    Args:
        version: of the weights; two versions have different values.
    """
    payload = pack_tensors(
        {tensor.name: FakeTensor(tensor.shape, version) for tensor in DEFAULT_TENSORS}
    )
    manifest = Manifest.of(
        TensorSpec(tensor.name, tensor.dtype, tensor.shape) for tensor in DEFAULT_TENSORS
    )
    return Push(WeightPush(version, manifest, [payload]))
