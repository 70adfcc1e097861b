#!/usr/bin/env bash
# Sets up the environment and runs the tests, tier by tier, with the time each took.
#
#   tests/run.sh [TIER ...]        tiers: unit distributed recovery integration slurm (all by default)
#
# GSPO_REQUIRE=sglang,slurm  a test that would be skipped for want of one of these fails instead.
# The tier slurm starts a Slurm of its own where slurmctld, slurmd, slurm-client and munge are installed (as root), and skips
# where they are not. Changes nothing outside the repository and the temporary folder. Exit code 0: every tier passed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
declare -A folders=(
  [unit]="tests/structure tests/unit tests/numerics"
  [distributed]="tests/distributed tests/gpu"
  [recovery]="tests/recovery"
  [integration]="tests/integration"
  [slurm]="tests/slurm"
)
tiers=("$@")
((${#tiers[@]})) || tiers=(unit distributed recovery integration slurm)
for tier in "${tiers[@]}"; do
  [[ -n ${folders[$tier]:-} ]] || { echo "tests/run.sh: '$tier' is no tier; there are: unit distributed recovery integration slurm" >&2; exit 2; }
done

launch/setup.sh
# Ranks and servers of a test that each take every core hinder each other.
export OMP_NUM_THREADS=1

status=0
summary=()
for tier in "${tiers[@]}"; do
  started=$SECONDS
  log=.cache/tests-$tier.log
  printf '\n== %s tests\n' "$tier"
  code=0
  # shellcheck disable=SC2086  # a tier's folders are words
  .venv/bin/python -m pytest -q --durations=5 ${folders[$tier]} 2>&1 | tee "$log" || code=$?
  ((code == 0)) || status=1
  summary+=("$(printf '%-12s %4d s  %s' "$tier" $((SECONDS - started)) "$(tail -n 1 "$log")")")
done

printf '\n== tests/run.sh: %s after %d s\n' "$([[ $status == 0 ]] && echo passed || echo FAILED)" $SECONDS
printf '%s\n' "${summary[@]}"
exit $status
