"""TRL's trainers on engines of this library.

``RolloutFunction`` is for ``GRPOTrainer``; ``RolloutWorker`` and ``WeightTransfer`` are for
``AsyncGRPOTrainer``.  Neither needs vLLM.
"""

from __future__ import annotations

from rollout.adapters.trl.rollout_function import RolloutFunction
from rollout.adapters.trl.rollout_worker import RolloutWorker
from rollout.adapters.trl.weight_transfer import WeightTransfer

__all__ = ["RolloutFunction", "RolloutWorker", "WeightTransfer"]
