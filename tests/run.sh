#!/usr/bin/env bash
# Sets up the environment, runs the tests tier by tier, and shows the time of each tier.
#
#   tests/run.sh [TIER ...]        tiers: unit distributed recovery integration slurm (all by default)
#
# GSPO_REQUIRE=sglang,slurm,reasoning-gym,chromium,pyarrow,smollm2
#             a test that needs one of these fails where it is missing, instead of being skipped.
# The tier slurm starts a Slurm of its own. It needs root, slurmctld, slurmd, slurm-client and munge, and is skipped without
# them. Nothing outside the repository and the temporary folder changes. Exit code 0: every tier passed.
#
# The tiers unit and integration have two parts each (unit-1, unit-2). Three tiers or parts run side by side, because most of
# them wait for half of their time and more. The output of each appears when it ends; until then it is in
# .cache/tests-NAME.log. A tier that has no parts and runs by itself shows its output directly.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
  exit 0
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
# What pytest runs of each tier, or of each of the two parts of one: a file that one part leaves out is in the other.
declare -A folders=(
  [unit-1]="tests/structure tests/browser tests/numerics tests/unit --ignore-glob=tests/unit/[!a-k]*"
  [unit-2]="tests/kernels tests/unit --ignore-glob=tests/unit/[a-k]*"
  [distributed]="tests/distributed tests/gpu"
  [recovery]="tests/recovery"
  [integration-1]="tests/integration --ignore-glob=tests/integration/test_run_*"
  [integration-2]="tests/integration/test_run_*.py"
  [slurm]="tests/slurm"
)
# The order in which they begin: the longest first, and what waits most (unit) next to what computes most.
order=(distributed integration-1 unit-2 integration-2 unit-1 recovery slurm)
for tier in "$@"; do
  case $tier in
    unit | distributed | recovery | integration | slurm) ;;
    *) echo "tests/run.sh: '$tier' is no tier; there are: unit distributed recovery integration slurm" >&2; exit 2 ;;
  esac
done
tiers=()
for tier in "${order[@]}"; do
  if (($# == 0)) || [[ " $* " == *" ${tier%-[12]} "* ]]; then tiers+=("$tier"); fi
done

launch/setup.sh --tests
# One thread per process: otherwise the ranks and servers of a test compete for every core.
export OMP_NUM_THREADS=1
mkdir -p .cache

pytest=(.venv/bin/python -m pytest -q --durations=10)
status=0
declare -A summaries=() pids=() began=()

# Records the exit code of a tier that has ended, and its line of the summary.
ended() {
  local tier=$1 code=$2
  ((code == 0)) || status=1
  summaries[$tier]=$(printf '%-13s %4d s  %s' "$tier" $((SECONDS - began[$tier])) "$(tail -n 1 ".cache/tests-$tier.log")")
}

show_one() {
  local tier=$1 code=0
  printf '\n== %s tests\n' "$tier"
  began[$tier]=$SECONDS
  # shellcheck disable=SC2086  # a tier's folders are words and patterns
  "${pytest[@]}" ${folders[$tier]} 2>&1 | tee ".cache/tests-$tier.log" || code=$?
  ended "$tier" $code
}

begin() {
  local tier=$1
  printf '== %s tests begin\n' "$tier"
  began[$tier]=$SECONDS
  # shellcheck disable=SC2086  # a tier's folders are words and patterns
  "${pytest[@]}" ${folders[$tier]} >".cache/tests-$tier.log" 2>&1 &
  pids[$tier]=$!
}

# Waits for the next running tier to end, and shows its output.
await() {
  local tier code alive
  wait -n "${pids[@]}" || true
  alive=" $(jobs -pr | tr '\n' ' ') "
  for tier in "${!pids[@]}"; do
    [[ $alive != *" ${pids[$tier]} "* ]] || continue
    code=0
    wait "${pids[$tier]}" || code=$?
    ended "$tier" $code
    printf '\n== %s tests\n' "$tier"
    cat ".cache/tests-$tier.log"
    unset "pids[$tier]"
  done
}

if ((${#tiers[@]} == 1)); then
  show_one "${tiers[0]}"
else
  # SIGINT, so that the fixtures of a test end its processes.
  trap '((${#pids[@]} == 0)) || kill -INT "${pids[@]}" 2>/dev/null || true' EXIT
  for tier in "${tiers[@]}"; do
    while ((${#pids[@]} == 3)); do await; done
    begin "$tier"
  done
  while ((${#pids[@]})); do await; done
fi

printf '\n== tests/run.sh: %s after %d s\n' "$([[ $status == 0 ]] && echo passed || echo FAILED)" $SECONDS
for tier in "${tiers[@]}"; do printf '%s\n' "${summaries[$tier]}"; done
exit $status
