"""``python -m rollout`` is the command ``rollout``."""

from rollout.cli.main import main

main()
