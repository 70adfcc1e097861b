#!/usr/bin/env bash
# Do the pinned set-ups for a GPU resolve, and to the same PyTorch and NCCL on both sides? Installs nothing but a newer pip in
# .cache, and reads packages' metadata alone: some 20 MB. Needs Python 3.12 and pip's configured indexes.
#
#   GSPO_PYTHON=/path/to/python3.12 tests/gpu/resolve.sh
#
# Exit code 0: they do; 77: there is no Python 3.12; 1: they do not.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=
for candidate in ${GSPO_PYTHON:-} python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
  [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == 3.12 ]] && { python=$candidate; break; }
done
[[ -n $python ]] || { echo "tests/gpu/resolve.sh: skipped: no Python 3.12"; exit 77; }

work=.cache/resolve
[[ -x $work/bin/python ]] || { "$python" -m venv "$work" && "$work/bin/python" -m pip install --quiet --upgrade pip; }
for side in gpu gpu-server; do
  echo "resolving launch/env/$side.txt"
  "$work/bin/python" -m pip install --dry-run --ignore-installed --use-feature=fast-deps --quiet \
    --report "$work/$side.json" --requirement "launch/env/$side.txt"
done
"$work/bin/python" - "$work"/gpu.json "$work"/gpu-server.json <<'PY'
import json
import sys

sides = []
for report in sys.argv[1:]:
    with open(report) as file:
        sides.append({item["metadata"]["name"].lower(): item["metadata"]["version"] for item in json.load(file)["install"]})
trainer, server = sides
both = sorted(trainer.keys() & server.keys())
wrong = [f"{name}: trainer {trainer[name]}, server {server[name]}" for name in both if trainer[name] != server[name] and name in ("torch", "nvidia-nccl-cu13")]
print(f"{len(trainer)} packages for the trainer, {len(server)} for a server; torch {trainer['torch']}, NCCL {trainer['nvidia-nccl-cu13']}")
sys.exit("\n".join(wrong))
PY
