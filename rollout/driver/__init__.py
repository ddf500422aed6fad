"""From prompts to sample groups: what a training loop calls each step."""
