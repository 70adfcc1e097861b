#!/usr/bin/env bash
# Every case of the shipped matrices: each layout, packing and precision against one rank. About five minutes on two idle cores; a sample of
# them is in tests/distributed/test_certify.py.
#
#   tests/soak/certify_matrices.sh [dense moe mla]
#
# Ends with 0 when every case holds. gspo_mega/certify/RESULTS.md has the tables of one such run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

models=("$@")
((${#models[@]})) || models=(dense moe mla)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
for model in "${models[@]}"; do
  .venv/bin/gspo-mega certify "configs/certify_$model.yaml" "run.dir=$folder"
done
