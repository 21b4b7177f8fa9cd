#!/bin/sh
# Epilog of slurmd: ends the agent that prolog.sh started for a job, and removes its folder. It ends with 0 whatever
# happens, since Slurm drains a node whose epilog fails, and takes a few seconds at most.
trap 'exit 0' EXIT
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin}
export PATH

settings=${ROLECALL_SLURM_SETTINGS:-/etc/default/rolecall-slurm}
job=${SLURM_JOB_ID:-}
uid=${SLURM_JOB_UID:-}
[ -r "$settings" ] && . "$settings"
dir=${ROLECALL_RUN_DIR:-/run/rolecall}/job-$job

case "$job:$uid" in
    : | :* | *: | *[!0-9:]*) exit 0 ;;
esac
[ -d "$dir" ] || exit 0
gid=${SLURM_JOB_GID:-$(id -g "$uid")} || exit 0

# As the user: the folder is the user's, and a PID in it may be any. Root removes only the empty folder. A process is an
# agent of this job if its command line has the folder; one that has only started has no other file yet.
# shellcheck disable=SC2016 # the inner shell expands $1
setpriv --reuid "$uid" --regid "$gid" --init-groups -- /bin/sh -c '
    pids=$(grep -x "[0-9][0-9]*" "$1/pids" | tail -n 20)
    is_agent() {
        tr "\0" " " 2>/dev/null <"/proc/$2/cmdline" | grep -qF -- " $1 "
    }
    living() {
        for pid in $pids; do is_agent "$1" "$pid" && echo "$pid"; done
    }
    pids=$(living "$1")
    [ -z "$pids" ] || kill $pids
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
        pids=$(living "$1")
        [ -n "$pids" ] || break
        sleep 0.1
    done
    [ -z "$pids" ] || kill -KILL $pids
    find "$1" -mindepth 1 -delete
' sh "$dir" </dev/null >/dev/null 2>&1
rmdir "$dir" 2>/dev/null
