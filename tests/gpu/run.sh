#!/usr/bin/env bash
# Measures precision, speed and memory on one NVIDIA GPU, part by part; a part that fails does not stop the others.
# Not yet run on a GPU: bounds are what is expected, and the first run will tell.
#
#   tests/gpu/run.sh [PART ...]     parts: products log_probs training log_prob_head throughput rollout (all by default)
#
# GSPO_GPU_BUNDLE   a folder for PYTHONPATH with Transformer Engine, Megatron-Core and so on; .cache/gpu_bundle by default
# GSPO_PYTHON       the Python with PyTorch for CUDA; python3 by default
# OUT               a folder for one JSON file a part, where it is set
#
# Exit code 0: every part passed; 77: there is no GPU; 1: a part failed.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 1
python=${GSPO_PYTHON:-python3}
bundle=${GSPO_GPU_BUNDLE:-$root/.cache/gpu_bundle}
[[ -d $bundle ]] && PYTHONPATH=$bundle${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1

declare -A limits=([products]=120 [log_probs]=240 [training]=300 [log_prob_head]=180 [throughput]=480 [rollout]=480)
parts=("$@")
((${#parts[@]})) || parts=(products log_probs training log_prob_head throughput rollout)
for part in "${parts[@]}"; do
  [[ -n ${limits[$part]:-} ]] || { echo "tests/gpu/run.sh: '$part' is no part; there are: ${!limits[*]}" >&2; exit 2; }
done
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || { echo "tests/gpu/run.sh: skipped: no CUDA device"; exit 77; }
# What a rank of a run gets; a server gets none of it.
variables=$("$python" -m gspo_mega.runtime.gpu_variables) || exit 1

status=0
summary=()
for part in "${parts[@]}"; do
  started=$SECONDS
  command=("tests/gpu/$part.py")
  [[ $part == log_prob_head ]] && command=(tests/benchmarks/log_prob_head.py --device cuda)
  printf '\n== %s\n' "$part"
  (
    [[ $part == rollout ]] || eval "$variables"
    exec timeout "${limits[$part]}" "$python" "${command[@]}"
  )
  case $? in
    0) said=passed ;;
    77) said=skipped ;;
    124) said="FAILED: longer than ${limits[$part]} s" status=1 ;;
    *) said=FAILED status=1 ;;
  esac
  summary+=("$(printf '%-14s %4d s  %s' "$part" $((SECONDS - started)) "$said")")
done

printf '\n== tests/gpu/run.sh\n'
printf '%s\n' "${summary[@]}"
exit $status
