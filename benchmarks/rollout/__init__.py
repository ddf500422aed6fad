"""The driver: how busy it keeps the engines, and its CPU."""
