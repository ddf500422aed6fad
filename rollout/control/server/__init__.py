"""A rollout server: its groups, its router, its journal."""
