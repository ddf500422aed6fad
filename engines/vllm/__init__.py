"""vLLM as a kind of engine: how it is started, how it is called, and what it can do.

The only place that knows vLLM's flags, variables and endpoint paths.
"""
