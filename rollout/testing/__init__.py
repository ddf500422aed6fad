"""Test doubles and tiny models for code that uses this library; tests here compare the doubles with
the real thing."""
