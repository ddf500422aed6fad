"""What happened when: spans of phases, engines and calls; what they add up to; where they go."""
