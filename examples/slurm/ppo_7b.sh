#!/usr/bin/env bash
# PPO of a 7B model on one node of 8 GPUs; more nodes (sbatch --nodes=4) are more data parallelism.
#
#   sbatch examples/slurm/ppo_7b.sh [key.sub=value ...]      from the checkout's root
#
# Account, partition and the like come from SBATCH_ACCOUNT, SBATCH_PARTITION, ... or from sbatch's flags. It saves and
# leaves before its time is up, goes back into the queue and goes on; so --time may be whatever the site allows.
#SBATCH --job-name=ppo_7b
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
exec bash examples/slurm/run.sh ppo examples/configs/ppo_7b.yaml "$@"
