"""Timelines: spans of phases, engines and calls, their analysis, files and exports."""
