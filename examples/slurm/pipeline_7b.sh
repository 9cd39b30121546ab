#!/usr/bin/env bash
# From a Hugging Face model to a PPO policy, as a chain of four jobs. Run it on the login node, in the checkout:
#
#   bash examples/slurm/pipeline_7b.sh HF_DIRECTORY [sbatch flags] [key.sub=value ...] [PROGRAM:key.sub=value ...]
#     [convert:--ignore=KEY ...]
#
#   bash examples/slurm/pipeline_7b.sh /models/llama --nodes=4 job.max_requeues=20 \
#     sft:data.train=/data/sft.jsonl reward:data.train=/data/pairs.jsonl ppo:prompts.path=/data/prompts.jsonl
#
# convert -> SFT -> reward model -> PPO. Flags and keys are for the three jobs that train. The prefix sft:, reward: or
# ppo: restricts a key to one of them. The prefix convert: gives the options --ignore and --dtype of megarlhf convert to
# the conversion. Each job waits until the job before it has completed. If a job fails or is cancelled, Slurm cancels the
# later jobs. Site settings come from SBATCH_ACCOUNT, SBATCH_PARTITION, ...
set -euo pipefail
if [ ! -f "${1:-}/config.json" ]; then
  echo "usage: bash examples/slurm/pipeline_7b.sh HF_DIRECTORY [sbatch flags] [key.sub=value ...] [PROGRAM:key=value ...]
  [convert:--ignore=KEY ...]
HF_DIRECTORY has config.json, the weights and the tokenizer; PROGRAM is sft, reward or ppo" >&2
  exit 2
fi
if [ ! -d examples/slurm ]; then
  echo "run it from the checkout's root" >&2
  exit 2
fi
source=$(realpath "$1")
flags=() keys=() options=()
for argument in "${@:2}"; do
  if [[ $argument =~ ^((sft|reward|ppo):)?[a-z_]+(\.[a-z_0-9]+)*= ]]; then
    keys+=("$argument")
  elif [[ $argument =~ ^convert:--(ignore|dtype)=. ]]; then
    options+=("${argument#*:}")
  elif [[ $argument =~ ^[a-z-]+: ]]; then
    echo "$argument: is for no program of the chain; say sft:, reward: or ppo: and key.sub=value behind it, or convert:--ignore=KEY" >&2
    exit 2
  else
    flags+=("$argument")
  fi
done
python=${MEGARLHF_PYTHON:-python3}
if [ -z "${MEGARLHF_PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=$PWD/.venv/bin/python; fi

# train PROGRAM AFTER key.sub=value: submit one of the three jobs that train, after the job AFTER
train() {
  local own=() key
  for key in ${keys[@]+"${keys[@]}"}; do
    case $key in
      "$1":*) own+=("${key#*:}") ;;
      sft:* | reward:* | ppo:*) ;;
      *) own+=("$key") ;;
    esac
  done
  sbatch --parsable --kill-on-invalid-dep=yes --dependency="afterok:$2" ${flags[@]+"${flags[@]}"} \
    "examples/slurm/$1_7b.sh" "${@:3}" ${own[@]+"${own[@]}"}
}

convert=$(sbatch --parsable --job-name=convert_7b --nodes=1 --ntasks=1 --cpus-per-task=8 --time=2:00:00 \
  --output=%x-%j.log --wrap "$(printf '%q ' "$python" -m megarlhf convert hf2megatron "$source" models/base_7b ${options[@]+"${options[@]}"})")
sft=$(train sft "$convert" model.checkpoint=models/base_7b)
reward=$(train reward "$sft" model.checkpoint=runs/sft_7b)
ppo=$(train ppo "$reward" model.checkpoint=runs/sft_7b)
echo "submitted: convert $convert -> sft $sft -> reward $reward -> ppo $ppo; squeue --me shows them"
