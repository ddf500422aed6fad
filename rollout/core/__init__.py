"""What every folder uses: errors, value types, pending results, fan-out."""
