#!/usr/bin/env bash
# The slower Slurm jobs, a quarter of an hour: nodes whose loss Slurm notices by itself, the batch node, servers' nodes, a
# heterogeneous job queued again, Slurm's own signal. Needs what tests/slurm needs.
#
#   tests/soak/slurm_nodes.sh [PYTEST ARGUMENTS ...]        e.g. -k batch_node
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=1 SLURM_TEST_NODES=4
exec .venv/bin/python -m pytest -q --durations=0 tests/slurm/soak_nodes.py "$@"
