"""Checks what an iterator pushes, bucket by bucket."""

from __future__ import annotations

from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec, check_contents
from rollout.weights.tensors.sources import Pairs


class BucketCheck:
    """Checks the buckets of an iterator one by one against the model's tensors.

    Its tensors are known only when they come.  The last bucket makes the engines publish the
    version, so it is sent only if the push is complete.
    """

    def __init__(
        self, config: WeightsConfig, expected: Manifest | None, contents: WeightUpdate
    ) -> None:
        self._expected = expected
        self._config = config
        self._contents = contents
        self.seen: dict[str, TensorSpec] = {}

    def __call__(self, pairs: Pairs, is_last: bool) -> None:
        """Check a bucket.

        Raises:
            WeightMismatch: a tensor does not fit, comes twice, or is missing at the end.
        """
        for spec in pairs.specs:
            if spec.name in self.seen:
                raise WeightMismatch(f"tensor {spec.name!r} is pushed twice", tensor=spec.name)
            self.seen[spec.name] = spec
        if is_last:
            checked, contents = Manifest(self.seen), self._contents
        else:
            checked, contents = Manifest.of(pairs.specs), WeightUpdate.PARTIAL
        check_contents(checked, self._expected, self._config, contents)
