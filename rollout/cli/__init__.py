"""The commands of ``rollout``, one file each."""
