"""The turns of sessions as token ids."""
