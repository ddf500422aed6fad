"""CPU of recording the timeline, counted and measured live."""
