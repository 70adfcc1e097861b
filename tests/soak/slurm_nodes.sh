#!/usr/bin/env bash
# The slower failures of Slurm jobs, some ten minutes: nodes whose loss Slurm notices by itself, the batch node, a heterogeneous
# job queued again. Needs what tests/slurm needs.
#
#   tests/soak/slurm_nodes.sh [PYTEST ARGUMENTS ...]        e.g. -k batch_node
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -q --durations=0 tests/slurm/soak_nodes.py "$@"
