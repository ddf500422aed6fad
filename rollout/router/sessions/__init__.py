"""Conversations of agents as trees of token ids (see ``docs/how-to/agents.md``)."""
