#!/usr/bin/env bash
# Runs tests on the newest Megatron-Core that is tried, the GPU set-up's, which needs Python 3.12: in .cache/versions, made
# on the first call by launch/setup.sh. Where there is no Python 3.12 it says so and succeeds.
#
#   tests/versions.sh [PYTEST ARGUMENTS ...]        (all of tests/distributed by default)
#   tests/versions.sh tests/unit tests/recovery tests/distributed       before a release
#   GSPO_PYTHON=/path/to/python3.12 tests/versions.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export GSPO_VENV=$root/.cache/versions/python3.12

is_312() {
  [[ $("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == 3.12 ]]
}

find_python() {
  local candidate
  # A version manager's python3.12 on the PATH may be a stand-in that refuses; the real ones lie beside it.
  for candidate in ${GSPO_PYTHON:-} python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if is_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

GSPO_PYTHON=$(find_python) || { echo "tests/versions.sh: no Python 3.12 found; nothing was run"; exit 0; }
export GSPO_PYTHON
launch/setup.sh --tests
unset GSPO_PYTHON

(($#)) || set -- tests/distributed
# Before what is installed: a run's processes import the sources here, too.
export OMP_NUM_THREADS=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PATH="$GSPO_VENV/bin:$PATH"
"$GSPO_VENV/bin/python" -c 'import importlib.metadata as m, sys; print("Python %d.%d.%d," % sys.version_info[:3], *("%s %s," % (p, m.version(p)) for p in ("megatron-core", "torch")))'
exec "$GSPO_VENV/bin/python" -m pytest -q "$@"
