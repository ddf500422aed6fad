"""A batch of numpy arrays as torch tensors that share their memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rollout.driver.data.batch import Array


def to_torch(batch: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Tensors with the same keys, shapes and dtypes; nothing is copied.

    Args:
        batch: arrays, as ``padded`` and ``packed`` make them.
    """
    return {key: torch.from_numpy(array) for key, array in batch.items()}
