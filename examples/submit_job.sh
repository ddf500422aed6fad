#!/bin/sh
# Submit colocated GRPO as a job to a running Ray cluster:
#
#     export RAY_AUTH_MODE=token             # docs/how-to/cluster.md
#     ray start --head                       # if no cluster runs yet
#     examples/submit_job.sh --steps 100 --out "$HOME/ray_job"
#
# Ray does not upload what .gitignore names (.venv, runs). `python` is that of the environment in
# which `ray start` ran, where this package and its extras must be installed. The dashboard of the
# cluster is at RAY_API_SERVER_ADDRESS, or else at port 8265 of this machine. The output of the job
# is printed here; `ray job logs <submission id>` prints it again.
cd "$(dirname "$0")/.." || exit
exec ray job submit --working-dir . -- python examples/colocated_grpo.py "$@"
