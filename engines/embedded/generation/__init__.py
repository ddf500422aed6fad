"""The generation thread: batching, sampling, pauses; from prompts to tokens."""
