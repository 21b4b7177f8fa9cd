#!/bin/sh
# Prolog of slurmd: starts an agent on this node for the time of a job, as the job's user (README.md beside this file).
# It ends with 0 whatever happens, since Slurm drains a node whose prolog fails, and it does not wait for the agent.
trap 'exit 0' EXIT
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

say() {
    logger -t rolecall-prolog -- "job ${job:-?}: $*" 2>/dev/null || :
}

settings=${ROLECALL_SLURM_SETTINGS:-/etc/default/rolecall-slurm}
job=${SLURM_JOB_ID:-}
uid=${SLURM_JOB_UID:-}
[ -r "$settings" ] && . "$settings"
program=${ROLECALL_PROGRAM:-/opt/rolecall/bin/rolecall}
runs=${ROLECALL_RUN_DIR:-/run/rolecall}
node=${SLURMD_NODENAME:-$(hostname -s)}

case "$job:$uid" in
    : | :* | *: | *[!0-9:]*) say "no job or user number: no agent is started"; exit 0 ;;
esac
[ -x "$program" ] || { say "$program is not there: no agent is started"; exit 0; }
gid=${SLURM_JOB_GID:-$(id -g "$uid")} || exit 0

# Below a folder that only root can write to, so that no user puts a link in the place of the next job's folder.
mkdir -p -m 0755 "$runs" || { say "$runs cannot be created"; exit 0; }
dir=$runs/job-$job
mkdir -m 0750 "$dir" 2>/dev/null
chown "$uid:$gid" "$dir" || { say "$dir cannot be given to user $uid"; exit 0; }

# The user's shell opens the log: root never writes to a file of the user's folder. A session of its own outlives the
# prolog, whose process group slurmd kills once it ends: the shell that starts the agent is in that session before it
# does so, and is waited for. A second agent of the same job finds the folder in use and ends.
# shellcheck disable=SC2016,SC2086 # the inner shells expand $@ and $1 to $3; the options are several words
setsid /bin/sh -c '"$@" </dev/null >/dev/null 2>&1 &' sh \
    setpriv --reuid "$uid" --regid "$gid" --init-groups -- /bin/sh -c '
    umask 077
    cd "$1" && dir=$1 program=$2 node=$3 && shift 3 && echo $$ >>pids &&
        exec "$program" agent --node "$node" --data-dir "$dir" "$@" >>agent.log 2>&1
' sh "$dir" "$program" "$node" ${ROLECALL_AGENT_OPTIONS:-} </dev/null >/dev/null 2>&1
