"""What the store keeps, and where: placement, records, commits."""
