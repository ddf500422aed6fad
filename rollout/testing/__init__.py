"""For tests of what is built on this library: shipped, and held to the real thing by its tests."""
