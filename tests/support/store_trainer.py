"""A trainer that pushes once and is never needed again: ``python -m tests.support.store_trainer``.

Prints one line of JSON when what it pushed is kept by the store, and ends at the end of its input.
"""

import json
import sys
from pathlib import Path

from tests.support.processes import wait_until


def main() -> None:
    import ray
    from safetensors.torch import load_file

    from rollout import RolloutConfig, launch

    address, run_id, model_path, log_dir, engine = sys.argv[1:]
    if address != "local":
        ray.init(address=address, log_to_driver=False, namespace="rollout")
    config = RolloutConfig.from_dict(
        {
            "run_id": run_id,
            "log_dir": log_dir,
            "servers": {
                "policy": {
                    "model_path": model_path,
                    "groups": {"main": {"num_engines": 1, "engine": json.loads(engine)}},
                    "health": {"probe_interval_s": 0.5, "probe_timeout_s": 2.0},
                    "weights": {"store": {"spare_bytes": 0}},
                }
            },
        }
    )
    weights = load_file(Path(model_path) / "model.safetensors")
    with launch(config, backend="ray") as deployment:
        policy = deployment["policy"]
        policy.push({name: 1.5 * tensor for name, tensor in weights.items()}).result(120)

        def is_stored() -> bool:
            return policy.status().result(30).store.version == policy.weight_version

        assert wait_until(is_stored, 60), policy.status().result(30).store
        (group,) = policy.status().result(30).groups
        state = {"url": policy.url, "pid": group.engines[0].pid, "version": policy.weight_version}
        print(json.dumps(state), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
