"""Python imports this at each start, also in SGLang's child processes: it adds the import hook."""

import _rollout_sglang_cpu  # noqa: F401
