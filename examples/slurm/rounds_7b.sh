#!/usr/bin/env bash
# A chain of `megarlhf rounds` as Slurm jobs, one a stage. Run it on the login node, in the checkout:
#
#   bash examples/slurm/rounds_7b.sh CONFIG [sbatch flags] [key.sub=value ...]
#
#   bash examples/slurm/rounds_7b.sh examples/configs/iterative_dpo_7b.yaml --nodes=4 rounds=2
#
# generate -> score -> select -> train of each round. Each job waits until the job before it has completed. If a job
# fails or is cancelled, Slurm cancels the later jobs; the same command then submits the stages that are left. Flags are
# for the jobs with GPUs. Site settings come from SBATCH_ACCOUNT, SBATCH_PARTITION, ...
set -euo pipefail
if [ ! -f "${1:-}" ]; then
  echo "usage: bash examples/slurm/rounds_7b.sh CONFIG [sbatch flags] [key.sub=value ...]
CONFIG is a configuration of megarlhf rounds" >&2
  exit 2
fi
if [ ! -d examples/slurm ]; then
  echo "run it from the checkout's root" >&2
  exit 2
fi
flags=() keys=()
for argument in "${@:2}"; do
  if [[ $argument =~ ^[a-z_]+(\.[a-z_0-9]+)*= ]]; then keys+=("$argument"); else flags+=("$argument"); fi
done
python=${MEGARLHF_PYTHON:-python3}
if [ -z "${MEGARLHF_PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi

left=$("$python" -m megarlhf rounds --config "$1" ${keys[@]+"${keys[@]}"} plan=true)
if [ -z "$left" ]; then
  echo "nothing is left to do"
  exit 0
fi
chain=() submitted=()
while read -r program file; do
  name=$(basename "$(dirname "$file")")_$program
  if [ "$program" = select ]; then # one process, without a GPU
    job=$(sbatch --parsable --kill-on-invalid-dep=yes ${chain[@]+"${chain[@]}"} --job-name="$name" --nodes=1 \
      --ntasks=1 --cpus-per-task=2 --time=2:00:00 --output=%x-%j.log \
      --wrap "$(printf '%q ' "$python" -m megarlhf select --config "$file")")
  else
    job=$(sbatch --parsable --kill-on-invalid-dep=yes ${chain[@]+"${chain[@]}"} --job-name="$name" \
      ${flags[@]+"${flags[@]}"} examples/slurm/rounds_stage_7b.sh "$program" "$file")
  fi
  chain=("--dependency=afterok:$job")
  submitted+=("$name $job")
done <<<"$left"
printf -v line ' -> %s' "${submitted[@]}"
echo "submitted: ${line# -> }; squeue --me shows them"
