"""SGLang and vLLM on machines without a GPU, for tests and trials."""
