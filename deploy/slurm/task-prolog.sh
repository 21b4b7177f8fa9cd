#!/bin/sh
# TaskProlog: tells the tasks of a job where their agent is (prolog.sh). Slurm sets what it prints as `export NAME=VALUE`
# in each task. It runs as the job's user, prints nothing where no agent was started, and ends with 0.
trap 'exit 0' EXIT
settings=${ROLECALL_SLURM_SETTINGS:-/etc/default/rolecall-slurm}
[ -r "$settings" ] && . "$settings"
dir=${ROLECALL_RUN_DIR:-/run/rolecall}/job-${SLURM_JOB_ID:-}
[ -z "${ROLECALL_AGENT_DIR:-}" ] && [ -d "$dir" ] && echo "export ROLECALL_AGENT_DIR=$dir"
