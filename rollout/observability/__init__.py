"""What users see of a run: timeline, metrics, page."""
