#!/usr/bin/env bash
# Drills the configurations of tests/soak/drills in turn, and counts all their faults in docs/studies/drill_rows.jsonl.
#
#     tests/soak/drill.sh HOURS [FAULTS] [FOLDER]     until FAULTS in all (default: 300) were struck, or HOURS are over
#
# It goes on from the rows that are there. Runs are forked (drill_forks.py) and started as users start them, in turn;
# HOW=forked or HOW=whole: only so. FOLDER (default: /tmp/gspo-mega-drill) keeps models, data, reference runs and the
# runs that ended differently; it is made where it is missing. Remove it after the code or a configuration changed.
set -euo pipefail
end=$(awk -v now="$(date +%s)" -v hours="$1" 'BEGIN {print int(now + 3600 * hours)}')
faults=${2:-300} folder=${3:-/tmp/gspo-mega-drill}
tests=$(cd "$(dirname "$0")/.." && pwd)
rows=$tests/../docs/studies/drill_rows.jsonl
python=${PYTHON:-$tests/../.venv/bin/python}
export PYTHONPATH=$tests/..:$tests/soak:$tests/support:$tests/integration OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
mkdir -p "$folder" && cd "$folder"
"$python" "$tests/../tools/make_quickstart.py" moe --num-train 64 --num-heldout 16
"$python" "$tests/../tools/make_quickstart.py" dense --task calculator --num-train 64 --num-heldout 16
while true; do
    for how in ${HOW:-forked whole}; do
        program=("$python" -m gspo_mega drill)
        [ "$how" = whole ] || program=(unshare --mount --propagation private "$python" "$tests/soak/drill_forks.py")
        for one in turns:0.8 ahead:0.5 standbys:0.2 kept:1.0 one_turn:0.2; do
            [ "$(grep -c '"tried": true' "$rows")" -lt "$faults" ] || exit 0
            left=$(awk -v end="$end" -v now="$(date +%s)" 'BEGIN {h = (end - now) / 3600; print h < 0.15 ? h : 0.15}')
            case $left in -* | 0) exit 0 ;; esac
            "${program[@]}" "$tests/soak/drills/${one%:*}.yaml" --live "${one#*:}" --per-run 8 --patience 400 \
                --faults "$faults" --hours "$left" --folder "$folder/$how-${one%:*}" --rows "$rows" || echo "exit code $?"
        done
    done
done
