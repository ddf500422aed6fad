"""Commands that need no trainer: the quickstart, and SGLang on a CPU."""
