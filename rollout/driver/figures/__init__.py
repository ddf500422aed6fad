"""The figures of steps: their names, and their way to callbacks, trackers and the server's page."""
