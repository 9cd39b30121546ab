#!/usr/bin/env bash
# The common part of the job scripts: start `megarlhf PROGRAM --config YAML [key.sub=value ...]` on all GPUs of the job,
# and requeue the job when the run asks for it. docs/slurm.md describes each failure.
#
#   MEGARLHF_PYTHON   the interpreter   [.venv/bin/python if there is one and no CONTAINER_IMAGE, else python3]
#   CONTAINER_IMAGE   the image to run in (needs pyxis); CONTAINER_MOUNTS [this directory under its own name]
set -euo pipefail
program=$1 config=$2
shift 2

echo "== $SLURM_JOB_NAME: job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}, on $SLURM_JOB_NODELIST, $(date)"
if [ ! -f "$config" ]; then
  echo "no $PWD/$config: submit from the checkout's root, or say sbatch --chdir=CHECKOUT" >&2
  exit 2
fi

python=${MEGARLHF_PYTHON:-python3}
# .venv is for this machine: in a container its interpreter may not start, or its torch may not support GPUs.
if [ -z "${MEGARLHF_PYTHON:-}${CONTAINER_IMAGE:-}" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi
container=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
  if ! srun --help | grep -q -- --container-image; then
    echo "CONTAINER_IMAGE is set, but this Slurm has no pyxis (srun --help knows no --container-image); unset it" >&2
    exit 2
  fi
  container=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
    --container-mounts="${CONTAINER_MOUNTS:-$PWD:$PWD}")
fi

# The run uses this file to ask for another attempt: the file is absent until the ranks have met, then empty, and has the
# reason if the run wants a requeue. srun's status cannot show this: when one rank exits, srun ends the others and
# returns the highest status of all.
export MEGARLHF_REQUEUE=$PWD/.requeue-$SLURM_JOB_ID
early="a rank was killed before the ranks had met"
last=$(cat "$MEGARLHF_REQUEUE" 2>/dev/null || true)
rm -f "$MEGARLHF_REQUEUE"
# Files older than a month are left from jobs that were killed with their batch scripts.
find . -maxdepth 1 -name '.requeue-*' -mmin +43200 -delete || true
trap 'rm -f "$MEGARLHF_REQUEUE"' EXIT

status=0
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" ${container[@]+"${container[@]}"} \
  "$python" -m megarlhf "$program" --config "$config" "$@" || status=$?

reason=$(cat "$MEGARLHF_REQUEUE" 2>/dev/null || true)
if [ ! -e "$MEGARLHF_REQUEUE" ] && [ "$status" -gt 128 ]; then
  # No rank could write the reason. A second time in a row has a lasting cause.
  limit=$({ cat "$config"; printf '%s\n' "$@"; } |
    sed -nE "s/^([^#]*[^#a-z_])?max_requeues[\"']? *[:=] *([0-9]+).*/\2/p" | tail -n 1)
  if [ "$last" = "$early" ]; then
    signal=$(kill -l "$status" 2>/dev/null || true)
    echo "== not requeued: twice in a row $early (status $status${signal:+, signal $signal}). Its last words stand above;" \
      "of a lack of memory its node's kernel log tells. Mend that and submit it again"
  elif [ "${SLURM_RESTART_COUNT:-0}" -ge "${limit:-100}" ]; then
    echo "== not requeued: $early, and the job was restarted ${SLURM_RESTART_COUNT:-0} times (job.max_requeues)"
  else
    reason=$early
  fi
fi
state=$(squeue -h -j "$SLURM_JOB_ID" -o %T || true)
if [ -n "$reason" ] && [ "${state:-RUNNING}" = RUNNING ]; then # else the job was cancelled
  echo "== requeue: $reason"
  if [ "$reason" = "$early" ]; then
    trap - EXIT
    echo "$early" >"$MEGARLHF_REQUEUE" # for the next attempt
  else
    rm -f "$MEGARLHF_REQUEUE"
  fi
  if scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
  rm -f "$MEGARLHF_REQUEUE"
  exit 75 # not finished: jobs that depend on this one must not start
fi
exit "$status"
