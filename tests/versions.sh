#!/usr/bin/env bash
# Runs the engine's tests on the newest Megatron-Core that is tried, which needs Python 3.12: the set-up of
# launch/env/cpu-py312.txt, in .cache/versions, made on the first call. Where there is no Python 3.12 it says so and
# succeeds.
#
#   tests/versions.sh [PYTEST ARGUMENTS ...]        (all of tests/distributed by default)
#   GSPO_PYTHON=/path/to/python3.12 tests/versions.sh
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
pins=launch/env/cpu-py312.txt
venv=.cache/versions/python3.12

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

stamp=$(cat "$pins" launch/env/cpu-te.txt | sha256sum | cut -d' ' -f1)
if [[ ! -x $venv/bin/python || ! -f $venv/pins.sha256 || $(<"$venv/pins.sha256") != "$stamp" ]]; then
  python=$(find_python) || { echo "tests/versions.sh: no Python 3.12 found; nothing was run"; exit 0; }
  echo "tests/versions.sh: setting up $venv with $python"
  if [[ ! -x $venv/bin/python ]] || ! is_312 "$venv/bin/python"; then "$python" -m venv --clear "$venv"; fi
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --progress-bar off)
  "${pip[@]}" --requirement "$pins"
  rm -rf "$venv/opt/transformer_engine"
  "${pip[@]}" --no-deps --target "$venv/opt/transformer_engine" --requirement launch/env/cpu-te.txt
  printf '%s\n' "$stamp" >"$venv/pins.sha256"
fi

(($#)) || set -- tests/distributed
# Not installed: two Pythons would write one set of metadata beside the sources.
export OMP_NUM_THREADS=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$venv/bin/python" -c 'import importlib.metadata as m, sys; print("Python %d.%d.%d," % sys.version_info[:3], *("%s %s," % (p, m.version(p)) for p in ("megatron-core", "torch")))'
exec "$venv/bin/python" -m pytest -q "$@"
