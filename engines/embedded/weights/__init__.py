"""The model's weights: loaded, updated, broadcast, fingerprinted; LoRA adapters."""
