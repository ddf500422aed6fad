"""Where the values of a configuration come from: files, overrides, references, the Hub."""
