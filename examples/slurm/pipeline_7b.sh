#!/usr/bin/env bash
# From a Hugging Face model to a PPO policy, as a chain of four jobs; run it on the login node, from the checkout's root:
#
#   bash examples/slurm/pipeline_7b.sh HF_DIRECTORY [sbatch flags for the three that train, such as --nodes=4]
#
# convert -> SFT -> reward model -> PPO. Each job waits until the one before it has completed; when one fails or is
# cancelled, Slurm cancels those behind it. Site values come from SBATCH_ACCOUNT, SBATCH_PARTITION, ...
set -euo pipefail
if [ ! -f "${1:-}/config.json" ]; then
  echo "usage: bash examples/slurm/pipeline_7b.sh HF_DIRECTORY [sbatch flags for the three that train]
HF_DIRECTORY has config.json, the weights and the tokenizer" >&2
  exit 2
fi
if [ ! -d examples/slurm ]; then
  echo "run it from the checkout's root" >&2
  exit 2
fi
source=$(realpath "$1")
flags=("${@:2}")
python=${MEGARLHF_PYTHON:-python3}
if [ -z "${MEGARLHF_PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi

after() {
  sbatch --parsable --kill-on-invalid-dep=yes --dependency="afterok:$1" ${flags[@]+"${flags[@]}"} "${@:2}"
}

convert=$(sbatch --parsable --job-name=convert_7b --nodes=1 --ntasks=1 --cpus-per-task=8 --time=2:00:00 \
  --output=%x-%j.log --wrap "$(printf '%q ' "$python" -m tools.convert hf2megatron "$source" models/base_7b)")
sft=$(after "$convert" examples/slurm/sft_7b.sh model.checkpoint=models/base_7b)
reward=$(after "$sft" examples/slurm/reward_7b.sh model.checkpoint=runs/sft_7b)
ppo=$(after "$reward" examples/slurm/ppo_7b.sh model.checkpoint=runs/sft_7b)
echo "submitted: convert $convert -> sft $sft -> reward $reward -> ppo $ppo; squeue --me shows them"
