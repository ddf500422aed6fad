"""Rollout orchestration for colocated RL post-training."""
