#!/usr/bin/env bash
# A stage of a chain that examples/slurm/rounds_7b.sh submits: `megarlhf PROGRAM --config FILE` on one node of 8 GPUs;
# more nodes (sbatch --nodes=4) add data parallelism. Training saves and exits before the time limit, is requeued and
# resumes. Generation and scoring start anew: give them a time limit that is long enough.
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
exec bash examples/slurm/run.sh "$1" "$2"
