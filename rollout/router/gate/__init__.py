"""Who is admitted, and to which engine (pure)."""
