"""Loads the hooks of this folder where a process asks for them; costs nothing elsewhere."""

import os

if os.environ.get("SGLANG_WITHOUT_KERNELS") == "1":
    import rollout_without_kernels  # noqa: F401
