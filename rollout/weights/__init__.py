"""New weights for engines: what a push contains, and how it reaches them."""
