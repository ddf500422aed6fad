"""``rollout bench``."""
