#!/usr/bin/env bash
# Every case of the shipped matrices: each layout, packing and precision against one rank. About half an hour on two idle cores; samples of
# them are in tests/distributed/test_certify.py and test_certify_fp8.py.
#
#   tests/soak/certify_matrices.sh [dense shared moe mla families balanced shared_balanced delta episodes masks lora ppo distill teachers te_bf16 fp8 objectives]
#
# fp8 runs with every recipe of scales, objectives with every algorithm that has a range of its own.
#
# Runs all of them and ends with 0 when every case holds; otherwise with 1, after naming the matrices that have one that
# does not. gspo_mega/verify/certify/RESULTS.md has the tables of one such run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

models=("$@")
((${#models[@]})) || models=(dense shared moe mla families balanced shared_balanced delta episodes masks lora ppo distill teachers te_bf16 fp8 objectives)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
failed=()
for model in "${models[@]}"; do
  recipes=("")
  [[ $model != fp8 ]] || recipes=(fp8.recipe={blockwise,tensorwise,delayed,mxfp8})
  [[ $model != distill ]] || recipes+=(teacher.divergence=full)
  if [[ $model == objectives ]]; then
    mapfile -t recipes < <(.venv/bin/python -c 'from gspo_mega.config.algorithms import RECIPES
print(*(f"algorithm={name}" for name in RECIPES if name != "custom" and not RECIPES[name].has_critic), sep="\n")')
  fi
  for recipe in "${recipes[@]}"; do
    own_range=()  # the file's range is for a ratio of whole responses
    [[ $recipe != algorithm=* || $recipe == algorithm=gspo* ]] || own_range=("objective={}")
    code=0
    .venv/bin/gspo-mega certify "configs/certify_$model.yaml" "run.dir=$folder" ${recipe:+"$recipe"} "${own_range[@]}" || code=$?
    ((code != 130)) || exit 130  # stopped by the user
    ((code == 0)) || failed+=("$model${recipe:+ $recipe}")
  done
done
if ((${#failed[@]})); then
  printf 'certify_matrices.sh: does not hold: %s\n' "${failed[@]}" >&2
  exit 1
fi
