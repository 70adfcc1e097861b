#!/usr/bin/env bash
# Measures precision, speed and memory on NVIDIA GPUs, part by part; a part that fails does not stop the others. Each ends
# within ten minutes. What an H100 and an H200 said is in tests/benchmarks/RESULTS.md;
# publish, run_r3 and budget have not ended on one, and resume only without experts.
#
#   tests/gpu/run.sh [PART ...]     all parts by default
#   tests/gpu/run.sh --list         the parts and their time limits
#   tests/gpu/run.sh --dry          on a CPU with tiny sizes: everything but a GPU's own code
#
# GSPO_GPU_BUNDLE   a folder for PYTHONPATH with Transformer Engine, Megatron-Core and so on; .cache/gpu_bundle by default
# GSPO_PYTHON       the trainer's Python; that of launch/setup_gpu.sh by default, else python3
# GSPO_SERVER_PYTHON   the servers', where it is another one; that of launch/setup_gpu.sh by default
# GSPO_GPU_SERVER   keys of the section `server` that this machine needs, e.g. {attention_backend: triton}
# OUT               the folder that parts add their rows to: PART.md, with date, versions and command; .cache/gpu_rows by default
#
# Exit code 0: every part passed or was skipped; 77: there is no GPU; 1: a part failed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
made=$root/.venv-gpu
if [[ -z ${GSPO_PYTHON:-} && -x $made/trainer/bin/python ]]; then
  GSPO_PYTHON=$made/trainer/bin/python
  export GSPO_SERVER_PYTHON=${GSPO_SERVER_PYTHON:-$made/server/bin/python}
fi
bundle=${GSPO_GPU_BUNDLE:-$root/.cache/gpu_bundle}
[[ ! -d $bundle ]] || PYTHONPATH=$bundle${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OUT=${OUT:-$root/.cache/gpu_rows}
mkdir -p "$OUT"
exec "${GSPO_PYTHON:-python3}" tests/gpu/parts.py "$@"
