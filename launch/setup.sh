#!/usr/bin/env bash
# Makes .venv beside this repository's pyproject.toml, for a machine without a GPU: pinned, released packages and the
# project itself, editable. It needs Linux x86_64, Python 3.11 and pip's usual indexes. A second call returns at once: a
# stamp records what was installed.
#
#   launch/setup.sh [--tests] [--trace]     GSPO_PYTHON=/path/to/python3.11 launch/setup.sh
#
# GSPO_PYTHON=/path/to/python3.12: with the Megatron-Core of the GPU set-up (launch/env/cpu-py312.txt), which needs that
# Python; the other packages are the same. Later calls keep an environment of either Python.
# GSPO_VENV=/path: the environment's folder, in place of .venv.
#
# --tests: also the packages that only the tests need (launch/env/test.txt), with a stamp of their own, and reasoning-gym in
# an environment of its own (launch/env/reasoning-gym.txt, .venv/opt/reasoning_gym), where there is a C compiler for it.
# --trace: also the Megatron-Core that a GPU runs with (launch/env/trace.txt), which `gspo-mega trace` traces. Part of --tests.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${GSPO_VENV:-$root/.venv}
log=$root/.cache/setup.log
requirements=("$root/launch/env/cpu.txt" "$root/launch/env/cpu-no-deps.txt" "$root/launch/env/cpu-te.txt")
newer_requirements=$root/launch/env/cpu-py312.txt
test_requirements=$root/launch/env/test.txt
gym_requirements=$root/launch/env/reasoning-gym.txt
trace_requirements=$root/launch/env/trace.txt

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() {
  local candidate
  if [[ -n ${GSPO_PYTHON:-} ]]; then
    [[ $(version_of "$GSPO_PYTHON") == "$version" ]] || die "GSPO_PYTHON=$GSPO_PYTHON is not a Python 3.11 or 3.12"
    command -v "$GSPO_PYTHON"
    return
  fi
  for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && [[ $(version_of "$candidate") == 3.11 ]]; then
      command -v "$candidate"
      return
    fi
  done
  candidate=absent
  if command -v python3 >/dev/null; then candidate=$(python3 --version 2>&1); fi
  die "needs Python 3.11; python3 here is $candidate." \
    "Install it, or name one: GSPO_PYTHON=/path/to/python3.11 $0"
}

# Fingerprint of everything that the environment is made from. It includes the root: a copied or moved environment is
# made again.
wanted_stamp() {
  {
    printf '%s\n' "$root" "$version"
    cat "${requirements[@]}" "$newer_requirements" "$root/pyproject.toml" "${BASH_SOURCE[0]}"
  } | sha256sum | cut -d' ' -f1
}

step() {
  local what=$1 started=$SECONDS
  shift
  printf 'setup: %s ... ' "$what"
  if ! "$@" >>"$log" 2>&1; then
    printf 'failed\n'
    tail -n 20 "$log" >&2
    die "'$*' failed; all of its output is in $log"
  fi
  printf '%d s\n' $((SECONDS - started))
}

with_tests=
with_trace=
for option in "$@"; do
  case $option in
    --tests) with_tests=1 with_trace=1 ;;
    --trace) with_trace=1 ;;
    *) die "'$option' is no option; there are: --tests --trace" ;;
  esac
done
[[ $(uname -sm) == "Linux x86_64" ]] || die "the pins in launch/env are for Linux x86_64; this is $(uname -sm)"
mkdir -p "$root/.cache"
exec 9>"$root/.cache/setup.lock"
flock --nonblock 9 || { echo "setup: another set-up is running here; waiting for it"; flock 9; }

pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off)
# As a user has it (docs/reasoning_gym.md), without a pip of its own and without compiling what is never imported.
make_gym() {
  local gym=$venv/opt/reasoning_gym
  rm -rf "$gym"
  "$venv/bin/python" -m venv --without-pip "$gym"
  "$venv/bin/python" -m pip --python "$gym/bin/python" --disable-pip-version-check --no-input install --progress-bar off \
    --no-deps --no-compile -r "$gym_requirements"
}
is_current() {
  [[ -x $venv/bin/python && -f $1 && $(<"$1") == "$2" ]]
}

version=3.11
for python in "$venv/bin/python" "${GSPO_PYTHON:-}"; do
  if [[ -n $python && $(version_of "$python") == 3.12 ]]; then version=3.12; elif [[ -n $python ]]; then version=3.11; fi
done
if [[ $version == 3.12 ]]; then
  sed "s/^megatron-core==.*/$(grep '^megatron-core==' "$newer_requirements")/" "${requirements[0]}" >"$root/.cache/cpu-py312.txt"
  requirements[0]=$root/.cache/cpu-py312.txt
fi
stamp=$(wanted_stamp)
compiler=$(type -P cc || true) # one of reasoning-gym's packages comes as source only
test_stamp=$(printf '%s\n' "$stamp" "$compiler" | cat - "$test_requirements" "$gym_requirements" | sha256sum | cut -d' ' -f1)
trace_stamp=$(printf '%s\n' "$stamp" | cat - "$trace_requirements" | sha256sum | cut -d' ' -f1)
if is_current "$venv/gspo_mega.stamp" "$stamp" &&
  { [[ -z $with_trace ]] || is_current "$venv/gspo_mega_trace.stamp" "$trace_stamp"; } &&
  { [[ -z $with_tests ]] || is_current "$venv/gspo_mega_tests.stamp" "$test_stamp"; }; then
  exit 0
fi

: >"$log"
if ! is_current "$venv/gspo_mega.stamp" "$stamp"; then
  if [[ ! -x $venv/bin/python ]] || [[ $(version_of "$venv/bin/python") != "$version" ]]; then
    python=$(find_python)
    step "virtual environment in ${venv#"$root"/} ($python)" "$python" -m venv --clear "$venv"
  fi
  rm -f "$venv/gspo_mega.stamp"
  # --no-warn-conflicts: after phase 2, pip would list every package that SGLang declares and that a machine without a GPU
  # cannot have (see launch/env/cpu-no-deps.txt), each time phase 1 runs again.
  step "packages, phase 1 of 2 (PyTorch, Megatron-Core, ...)" "${pip[@]}" --no-warn-conflicts -r "${requirements[0]}"
  step "packages, phase 2 of 2 (SGLang)" "${pip[@]}" --no-deps -r "${requirements[1]}"
  # One of an earlier set-up, or of another package, built for another torch: see launch/env/cpu-no-deps.txt.
  if "$venv/bin/python" -m pip --quiet show torchvision >>"$log" 2>&1 && ! "$venv/bin/python" -c 'import torchvision' >>"$log" 2>&1; then
    step "torchvision, which does not fit this PyTorch, out" "$venv/bin/python" -m pip --disable-pip-version-check uninstall --yes torchvision
  fi
  # Beside the environment's packages, not among them: see launch/env/cpu-te.txt.
  rm -rf "$venv/opt/transformer_engine"
  step "Transformer Engine's Python" "${pip[@]}" --no-deps --target "$venv/opt/transformer_engine" -r "${requirements[2]}"
  step "gspo_mega itself" "${pip[@]}" --no-deps --no-build-isolation --editable "$root"
  printf '%s\n' "$stamp" >"$venv/gspo_mega.stamp"
fi
if [[ -n $with_trace ]] && ! is_current "$venv/gspo_mega_trace.stamp" "$trace_stamp"; then
  rm -rf "$venv/gspo_mega_trace.stamp" "$venv/opt/megatron_core"
  step "the GPU's Megatron-Core, for gspo-mega trace" "${pip[@]}" --no-deps --only-binary :all: \
    --python-version 3.12 --ignore-requires-python --target "$venv/opt/megatron_core" -r "$trace_requirements"
  printf '%s\n' "$trace_stamp" >"$venv/gspo_mega_trace.stamp"
fi
if [[ -n $with_tests ]]; then
  rm -f "$venv/gspo_mega_tests.stamp"
  step "packages of the tests" "${pip[@]}" --no-warn-conflicts -r "$test_requirements"
  if [[ -n $compiler ]]; then
    step "reasoning-gym, in an environment of its own" make_gym
  else
    echo "setup: no C compiler here (cc), which reasoning-gym's package pycosat is built with: its test will be skipped"
  fi
  printf '%s\n' "$test_stamp" >"$venv/gspo_mega_tests.stamp"
fi
echo "setup: ready after $SECONDS s; activate it with: source $venv/bin/activate"
