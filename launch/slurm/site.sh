# shellcheck shell=bash
# What is particular to your cluster; the one file to edit. Sourced by launch/slurm/train.sbatch on the login node and in the
# job. Anything may be set in the environment instead, for one submission.

# Options of sbatch for every job: partition, account, time, and that a job has its nodes to itself. USR1 comes
# GSPO_SIGNAL_SECONDS before the time limit; a run then saves a checkpoint and is queued again by itself. So it does when it is
# preempted, if slurm.conf has PreemptParameters=send_user_signal (in older Slurms, as 22.05,
# SlurmctldParameters=preempt_send_user_signal) and the partition or QOS a GraceTime of at least GSPO_SIGNAL_SECONDS. Without
# that option a GraceTime ends the ranks with TERM, and the run fails; it continues from its last checkpoint.
: "${GSPO_SBATCH:=--exclusive --mem=0 --time=24:00:00}"    # e.g. --partition=h100 --account=research --qos=normal
# More of them for nodes that hold servers alone. When set, the job is heterogeneous: two components.
: "${GSPO_ROLLOUT_SBATCH:=}"                               # e.g. --partition=a100 --exclusive --mem=0 --time=24:00:00
: "${GSPO_SIGNAL_SECONDS:=0}"                               # 0: what the plan asks for, 300 at least; more is needed to save a large model

# The nodes.
: "${GSPO_GPUS_PER_NODE:=8}"                               # 0: none, everything runs on CPUs
: "${GSPO_CPUS_PER_TASK:=8}"                               # of every rank and every server
: "${GSPO_NETWORK:=}"                                      # interfaces of gloo and NCCL, e.g. ib0; their own choice when empty

# The supervisor: a Python with gspo_mega, numpy, pydantic and PyYAML, on the login node and on the first node, outside of any container.
: "${GSPO_PYTHON:=$GSPO_HOME/.venv/bin/python}"

# Where ranks and servers run: a container and the Python inside of it, with gspo_mega or with this repository, which PYTHONPATH
# names. Both see the run folder, the model and the data at the same paths as outside. Options for srun when the line begins with --, else words put before the command:
#   pyxis      GSPO_TRAINER_CONTAINER='--container-image=/images/trainer.sqsh --container-mounts=/data:/data'
#   apptainer  GSPO_TRAINER_CONTAINER='apptainer exec --nv --bind /data /images/trainer.sif'
: "${GSPO_TRAINER_CONTAINER:=}"
: "${GSPO_TRAINER_PYTHON:=$GSPO_PYTHON}"
# PyTorch and NCCL must be the same in both where `publish.method: distributed`. `server.python` in a YAML replaces the last one.
: "${GSPO_SERVER_CONTAINER:=}"
: "${GSPO_SERVER_PYTHON:=$GSPO_PYTHON}"

# 1: check every node before the run starts, and do not start it where something is wrong (see gspo-mega doctor). 0: do not.
: "${GSPO_PREFLIGHT:=1}"
: "${GSPO_PREFLIGHT_SECONDS:=600}"                         # what that may take; imports from a slow shared folder take minutes
