"""Where the parts run: in this process, or as Ray actors."""
