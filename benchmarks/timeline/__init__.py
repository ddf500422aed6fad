"""What recording costs, counted and measured live."""
