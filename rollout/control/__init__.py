"""The lifecycle of engines, groups and servers.  Imports go engine < group < recovery < server."""
