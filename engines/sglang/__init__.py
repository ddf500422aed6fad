"""SGLang as a kind of engine: how it is started, and what the one that answers can do.

The only place that knows SGLang's flags and variables.  Nothing here starts or calls
anything.
"""
