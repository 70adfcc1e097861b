#!/usr/bin/env bash
# Every case of the shipped matrices: each layout, packing and precision against one rank. About fifteen minutes on two idle cores; samples of
# them are in tests/distributed/test_certify.py and test_certify_fp8.py.
#
#   tests/soak/certify_matrices.sh [dense moe mla te_bf16 fp8]
#
# fp8 runs with every recipe.
#
# Ends with 0 when every case holds. gspo_mega/certify/RESULTS.md has the tables of one such run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

models=("$@")
((${#models[@]})) || models=(dense moe mla te_bf16 fp8)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
for model in "${models[@]}"; do
  recipes=("")
  [[ $model != fp8 ]] || recipes=(fp8.recipe={blockwise,tensorwise,delayed,mxfp8})
  for recipe in "${recipes[@]}"; do
    .venv/bin/gspo-mega certify "configs/certify_$model.yaml" "run.dir=$folder" ${recipe:+"$recipe"}
  done
done
