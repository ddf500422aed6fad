"""What runs inside vLLM: it takes pushed weights, reports fingerprints, and on CPUs frees memory.

vLLM finds it by the entry point ``vllm.general_plugins``.  Nothing else imports this package, for
it needs vLLM and torch.  Tested with vLLM 0.32.0 on CPUs; not tested on a GPU.
"""
