"""What every folder uses: errors, value types, pending results, fan-out."""

VERSION = "0.1.0"
