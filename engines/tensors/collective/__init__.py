"""Buckets that a trainer broadcasts with torch: groups, memory, and what lies where."""
