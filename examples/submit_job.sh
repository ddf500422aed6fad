#!/bin/sh
# Colocated GRPO as a job on a Ray cluster that is already running:
#
#     ray start --head                       # a cluster of this machine, if there is none
#     examples/submit_job.sh --steps 4 --out /a/folder/that/outlives/the/job
#
# What .gitignore names (.venv, runs) is not packed. `python` is the cluster's: the environment
# `ray start` was run from, with this package and its extras installed. RAY_API_SERVER_ADDRESS says
# where the cluster's dashboard is; without it, port 8265 of this machine. The job's output follows
# here and stays readable: ray job logs <submission id>.
cd "$(dirname "$0")/.." || exit
exec ray job submit --working-dir . -- python examples/colocated_grpo.py "$@"
