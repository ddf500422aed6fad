"""A trainer of one group: prints its terms, joins, and does what each line of its stdin names.

    group_trainer NAME SEED NUM_RANKS

``flat`` sends ``tensors(SEED)`` as one tensor of bytes, ``apart`` one by one; with the end of stdin
it leaves.
"""

from __future__ import annotations

import json
import sys

import torch

from rollout.weights.routes.trainer_groups import BroadcastRoot


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of a bucket; what has wide elements first, as a flat one must."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "wide": torch.randn(5, 3, generator=numbers, dtype=torch.float64),
        "plain": torch.randn(7, generator=numbers),
        "narrow": torch.randn(3, 1, generator=numbers).bfloat16(),
    }


def main(name: str, seed: int, num_ranks: int) -> None:
    root = BroadcastRoot(name, "gloo", join_timeout_s=30, send_timeout_s=30)
    print(json.dumps(dict(root.terms(num_ranks))), flush=True)
    root.join()
    for line in sys.stdin:
        new = list(tensors(seed).values())
        if line.strip() == "flat":
            new = [torch.cat([one.reshape(-1).view(torch.uint8) for one in new])]
        root.send(new)
    root.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
