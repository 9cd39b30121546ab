#!/usr/bin/env bash
# DPO of a 7B model on one node of 8 GPUs.
#
#   sbatch examples/slurm/dpo_7b.sh [key.sub=value ...]      from the checkout's root
#
# Account, partition and other site settings come from SBATCH_ACCOUNT, SBATCH_PARTITION, ... or from sbatch's flags. The
# job saves and exits before its time limit, is requeued and resumes, so --time may be any limit that the site allows.
#SBATCH --job-name=dpo_7b
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
exec bash examples/slurm/run.sh dpo examples/configs/dpo_7b.yaml "$@"
