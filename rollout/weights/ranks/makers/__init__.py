"""What a rank makes of each bucket of a push."""
