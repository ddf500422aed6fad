"""Decisions as plain functions over values: no clock, no socket, no await."""
