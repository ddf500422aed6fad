"""Test doubles for code that uses this library; its tests compare them with the real thing."""
