#!/usr/bin/env bash
# Makes the Pythons of a machine with NVIDIA GPUs: one for the ranks (.venv-gpu/trainer) and one for the servers
# (.venv-gpu/server), from the pins in launch/env/gpu.txt, gpu-no-isolation.txt and gpu-server.txt. A second call returns at
# once. Not yet run on a GPU: the pins resolve (tests/gpu/resolve.py), and its decisions are tested without them.
#
#   launch/setup_gpu.sh                 both; it needs no GPU, so a login node will do. Tens of minutes
#   launch/setup_gpu.sh --check         installs nothing; prints what is there and what is missing. Exit code 1: something is
#   launch/setup_gpu.sh --one-python    one Python for ranks and servers; .venv-gpu/server is a link to it
#   launch/setup_gpu.sh --only SIDE     trainer or server alone, for an image (launch/containers/Containerfile)
#   launch/setup_gpu.sh --into DIR      another folder in place of .venv-gpu
#
# It needs Linux x86_64, glibc 2.34, Python 3.12 with its headers, nvcc of CUDA 13 and a C++ compiler: Transformer Engine's
# part for PyTorch is compiled here. GPUs need a driver for CUDA 13 (580 or newer) where a run starts, not here.
#
#   GSPO_PYTHON=/path/to/python3.12     CUDA_HOME=/path/to/cuda     MAX_JOBS=8 (compilers at a time)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
into=$root/.venv-gpu
log=$root/.cache/setup_gpu.log
env=$root/launch/env
least_driver=580
cuda_release=13
# Rough sizes of what pip unpacks, with its cache: both sides hold a PyTorch with CUDA's libraries.
declare -A gibibytes=([trainer]=20 [server]=25 [both]=30)

die() {
  printf 'setup_gpu: %s\n' "$@" >&2
  exit 1
}

sides=(trainer server) one='' check=''
while (($#)); do
  case $1 in
    --check) check=1 ;;
    --one-python) one=1 ;;
    --only) sides=("${2:-}") && shift ;;
    --into) into=${2:-} && shift ;;
    -h | --help) exec sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" ;;
    *) die "'$1' is no option; there are: --check, --one-python, --only SIDE, --into DIR" ;;
  esac
  (($# == 0)) || shift
done
[[ ${sides[0]} =~ ^(trainer|server)$ ]] || die "--only is followed by trainer or server, not '${sides[0]}'"
[[ -n $into ]] || die "--into is followed by a folder"
[[ $into == /* ]] || into=$PWD/$into
if [[ -n $one ]]; then
  ((${#sides[@]} == 2)) || die "--one-python makes both sides at once; leave out --only"
  [[ -L $into/server || ! -e $into/server ]] || die "$into/server is a Python of its own from an earlier set-up; remove it, or leave out --one-python"
  sides=(both)
elif [[ -L $into/server && -z $check ]]; then
  die "$into/server is a link that --one-python made; give --one-python again, or remove $into to make two Pythons"
fi

folder_of() { if [[ $1 == both ]]; then echo "$into/trainer"; else echo "$into/$1"; fi; }
builds() { [[ $1 != server ]]; } # Transformer Engine's part for PyTorch is for the ranks
pins_of() {
  case $1 in
    trainer) printf '%s\n' "$env/gpu.txt" ;;
    server) printf '%s\n' "$env/gpu-server.txt" ;;
    both) printf '%s\n' "$env/gpu.txt" "$env/gpu-server.txt" ;;
  esac
}

# --- what must be there. Each prints nothing where it is, else what to do.

platform_problem() {
  [[ $(uname -sm) == "Linux x86_64" ]] || echo "the pins are for Linux x86_64; this is $(uname -sm)"
}

glibc_problem() {
  local found
  found=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed 's/^glibc //')
  [[ $found =~ ^2\.([0-9]+) ]] && ((BASH_REMATCH[1] >= 34)) && return
  echo "glibc is ${found:-unknown}; the pins' wheels need 2.34 or newer (Ubuntu 22.04, RHEL 9): use an image of launch/containers"
}

driver_problem() {
  local found
  found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1) || true
  if ! command -v nvidia-smi >/dev/null; then
    echo "no nvidia-smi here. On a login node that is normal: check again on a node with GPUs"
  elif ! [[ $found =~ ^([0-9]+)\. ]]; then
    echo "nvidia-smi does not tell the driver's version: $found"
  elif ((BASH_REMATCH[1] < least_driver)); then
    echo "the driver is $found; CUDA $cuda_release needs $least_driver or newer: update the driver"
  fi
}

is_312() {
  [[ $("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == 3.12 ]]
}

find_python() {
  local candidate
  for candidate in "${GSPO_PYTHON:-python3.12}" "${GSPO_PYTHON:-python3}"; do
    if command -v "$candidate" >/dev/null && is_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

python_problem() {
  local python
  if ! python=$(find_python); then
    echo "no Python 3.12${GSPO_PYTHON:+ at GSPO_PYTHON=$GSPO_PYTHON}; install it (Ubuntu 24.04: python3.12-venv, python3.12-dev), or name" \
      "one: GSPO_PYTHON=/path/to/python3.12"
    return
  fi
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$python has no venv; install python3.12-venv"
}

headers_problem() {
  local python
  python=$(find_python)
  "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
    echo "$python has no Python.h, which Transformer Engine is compiled with; install python3.12-dev"
}

has_headers() { [[ -f $1/include/cuda_runtime.h || -f $1/targets/x86_64-linux/include/cuda_runtime.h ]]; }

# The toolkit's folder: one with headers rather than one that only has nvcc.
find_cuda() {
  local nvcc home found=''
  for nvcc in ${CUDA_HOME:+"$CUDA_HOME/bin/nvcc"} "$(type -P nvcc || true)" /usr/local/cuda/bin/nvcc; do
    [[ -z ${CUDA_HOME:-} || $nvcc == "$CUDA_HOME"/* ]] || break
    [[ -n $nvcc && -x $nvcc ]] || continue
    # In a PATH it is often a link, or a script that calls the one beside the headers.
    home=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    found=${found:-$home}
    if has_headers "$home"; then found=$home && break; fi
  done
  [[ -n $found ]] && printf '%s\n' "$found"
}

compiler_problem() {
  local cuda release
  cuda=$(find_cuda) || {
    echo "no nvcc${CUDA_HOME:+ in CUDA_HOME=$CUDA_HOME}; install the CUDA $cuda_release toolkit (Ubuntu: cuda-toolkit-$cuda_release-0; clusters: module load cuda), or name" \
      "it: CUDA_HOME=/path/to/cuda"
    return
  }
  release=$("$cuda/bin/nvcc" --version 2>&1 | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  [[ ${release%%.*} == "$cuda_release" ]] ||
    echo "$cuda/bin/nvcc is of CUDA ${release:-unknown}; PyTorch of the pins is built for CUDA $cuda_release: name another one with CUDA_HOME"
  has_headers "$cuda" ||
    echo "$cuda has no include/cuda_runtime.h; name the whole toolkit: CUDA_HOME=/path/to/cuda"
  type -P c++ >/dev/null || echo "no C++ compiler (c++); install g++"
}

cudnn_include() {
  local folder
  for folder in ${CUDNN_PATH:+"$CUDNN_PATH/include"} "$1"/lib/python3.12/site-packages/nvidia/cudnn/include /usr/include; do
    if [[ -f $folder/cudnn.h ]]; then echo "$folder" && return; fi
  done
  return 1
}

cudnn_problem() {
  # PyTorch brings cuDNN with its headers (nvidia-cudnn-cu13); only after its installation they can be missing.
  local folder
  folder=$(folder_of "$1")
  [[ ! -d $folder/lib/python3.12/site-packages/torch ]] || cudnn_include "$folder" >/dev/null ||
    echo "no cudnn.h in $folder/lib/python3.12/site-packages/nvidia/cudnn/include or /usr/include; name its prefix: CUDNN_PATH=/path"
}

disk_problem() {
  local place=$into needed=0 free side
  for side in "${sides[@]}"; do
    is_current "$side" || needed=$((needed + gibibytes[$side]))
  done
  while [[ ! -d $place ]]; do place=$(dirname "$place"); done
  free=$(df -Pk "$place" | awk 'NR == 2 { print int($4 / 1048576) }')
  ((free >= needed)) || echo "$free GiB free in $place; about $needed are needed: free some, or choose another folder with --into DIR"
}

# The pins of a side that its Python has not, as it tells them itself.
pins_problem() {
  local side=$1 folder files
  folder=$(folder_of "$side")
  mapfile -t files < <(pins_of "$side")
  builds "$side" && files+=("$env/gpu-no-isolation.txt")
  if [[ ! -x $folder/bin/python ]]; then
    echo "no Python in $folder; make it: launch/setup_gpu.sh"
    return
  fi
  "$folder/bin/python" - "${files[@]}" <<'PYTHON' || echo "$folder/bin/python does not run; remove $folder and run launch/setup_gpu.sh"
import re
import sys
from importlib import metadata

lacking = []
for file in sys.argv[1:]:
    for name, wanted in re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", open(file).read(), re.MULTILINE):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "absent"
        if found.partition("+")[0] != wanted:
            lacking.append(f"{name}=={wanted} ({found})")
if lacking:
    print(f"{len(lacking)} pins are not installed: {', '.join(dict.fromkeys(lacking))}; run launch/setup_gpu.sh")
PYTHON
}

# PyTorch and NCCL of both sides, where both are there.
equal_problem() {
  local trainer=$into/trainer/bin/python server=$into/server/bin/python
  [[ -x $trainer && -x $server ]] || return 0
  PYTHONPATH=$root "$trainer" - "$server" <<'PYTHON' || echo "$trainer does not run"
import sys
from gspo_mega.base import versions

try:
    print(*versions.differences(versions.own_versions(), versions.versions_of(sys.argv[1], 120.0)), sep="\n", end="")
except ValueError as error:
    print(error, end="")
PYTHON
}

# --- stamps, so that a second call returns at once.

wanted_stamp() {
  {
    printf '%s\n' "$root" "$1"
    pins_of "$1" | xargs cat "$env/gpu-no-isolation.txt" "$root/pyproject.toml" "${BASH_SOURCE[0]}"
  } | sha256sum | cut -d' ' -f1
}

is_current() {
  local folder
  folder=$(folder_of "$1")
  [[ -x $folder/bin/python && -f $folder/gspo_mega.stamp && $(<"$folder/gspo_mega.stamp") == "$(wanted_stamp "$1")" ]]
}

problems=0
# tell WHAT TEXT: a line for what is there, and for each line of TEXT that says what is missing.
tell() {
  local what=$1 text=$2 line
  if [[ -z $text ]]; then
    [[ -z $check ]] || printf 'setup_gpu: ok       %s\n' "$what"
    return
  fi
  while IFS= read -r line; do
    printf 'setup_gpu: missing  %s: %s\n' "$what" "$line"
    problems=$((problems + 1))
  done <<<"$text"
}

needs_build=''
for side in "${sides[@]}"; do
  if builds "$side" && { [[ -n $check ]] || ! is_current "$side"; }; then needs_build=$side; fi
done

check_machine() {
  tell platform "$(platform_problem)"
  tell "glibc 2.34" "$(glibc_problem)"
  tell "Python 3.12" "$(python_problem)"
  if [[ -n $needs_build ]]; then
    [[ -z $(find_python) ]] || tell "Python.h" "$(headers_problem)"
    tell "nvcc of CUDA $cuda_release and c++" "$(compiler_problem)"
    tell "cuDNN's headers" "$(cudnn_problem "$needs_build")"
  fi
  tell disk "$(disk_problem)"
}

if [[ -n $check ]]; then
  check_machine
  tell "driver $least_driver" "$(driver_problem)"
  for side in "${sides[@]}"; do tell "pins of $side" "$(pins_problem "$side")"; done
  [[ ! -x $into/trainer/bin/python || ! -x $into/server/bin/python ]] ||
    tell "the same PyTorch and NCCL on both sides" "$(equal_problem)"
  ((!problems)) || { echo "setup_gpu: $problems missing; nothing was installed" >&2; exit 1; }
  echo "setup_gpu: nothing is missing"
  exit 0
fi

mkdir -p "$root/.cache" "$into"
exec 9>"$root/.cache/setup_gpu.lock"
flock --nonblock 9 || { echo "setup_gpu: another set-up is running here; waiting for it"; flock 9; }

todo=()
for side in "${sides[@]}"; do is_current "$side" || todo+=("$side"); done
if ((${#todo[@]})); then
  check_machine >&2
  ((!problems)) || die "$problems missing, see above; nothing was installed"
  driver=$(driver_problem)
  [[ -z $driver ]] || printf 'setup_gpu: note     driver: %s\n' "$driver" >&2
  : >"$log"
fi

step() {
  local what=$1 started=$SECONDS
  shift
  printf 'setup_gpu: %s ... ' "$what"
  if ! "$@" >>"$log" 2>&1; then
    echo failed
    tail -n 20 "$log" >&2
    die "'$*' failed; all of its output is in $log"
  fi
  printf '%d s\n' $((SECONDS - started))
}

make() {
  local side=$1 folder cuda files file words=()
  folder=$(folder_of "$side")
  rm -f "$folder/gspo_mega.stamp"
  if [[ ! -x $folder/bin/python ]] || ! is_312 "$folder/bin/python"; then
    step "virtual environment in $folder" "$(find_python)" -m venv --clear "$folder"
  fi
  local pip=("$folder/bin/python" -m pip --disable-pip-version-check --no-input install --progress-bar off)
  mapfile -t files < <(pins_of "$side")
  for file in "${files[@]}"; do words+=(-r "$file"); done
  # In one call, so that pip resolves all of them together.
  step "packages of $side" "${pip[@]}" "${words[@]}"
  if builds "$side"; then
    cuda=$(find_cuda)
    local include place
    include=$(cudnn_include "$folder") || die "$(cudnn_problem "$side")"
    # Behind the toolkit's own headers: PyTorch's packages have those that a small toolkit lacks (cusparse.h and others).
    for place in "$folder"/lib/python3.12/site-packages/nvidia/*/include; do include+=:$place; done
    step "Transformer Engine for PyTorch, compiled with $cuda" env CUDA_HOME="$cuda" PATH="$folder/bin:$cuda/bin:$PATH" \
      CPLUS_INCLUDE_PATH="$include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}" NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
      "${pip[@]}" --no-build-isolation -r "$env/gpu-no-isolation.txt"
    step "gspo_mega itself" "${pip[@]}" --no-deps --no-build-isolation --editable "$root"
  fi
  wanted_stamp "$side" >"$folder/gspo_mega.stamp"
}

for side in ${todo[@]+"${todo[@]}"}; do make "$side"; done
[[ -z $one ]] || ln -sfn trainer "$into/server"
for side in "${sides[@]}"; do
  lacking=$(pins_problem "$side")
  [[ -z $lacking ]] || die "$side: $lacking"
done
different=$(equal_problem)
[[ -z $different ]] || die "the two sides do not fit: $different"
((${#todo[@]})) || exit 0
cat <<END
setup_gpu: ready after $SECONDS s, in $into. Where the GPUs are:
  source $into/trainer/bin/activate
  export GSPO_SERVER_PYTHON=$into/server/bin/python
  gspo-mega doctor                                 versions of both, GPUs, driver, Transformer Engine
  GSPO_PYTHON=$into/trainer/bin/python tests/gpu/run.sh    precision, speed and memory, part by part
END
[[ $into != "$root/.venv-gpu" ]] || echo "Under Slurm launch/slurm/site.sh finds both by itself."
