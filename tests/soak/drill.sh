#!/usr/bin/env bash
# Drills the configurations of tests/soak/drills in turn, and counts all their faults in docs/studies/drill_rows.jsonl.
#
#     tests/soak/drill.sh HOURS [FAULTS] [FOLDER]     until FAULTS in all (default: 300) were struck, or HOURS are over
#
# It goes on from the rows that are there. FOLDER (default: /tmp/gspo-mega-drill) keeps models, data, reference runs and
# the runs that ended differently; it is made where it is missing. Remove it after the code or a configuration changed.
set -euo pipefail
end=$(awk -v now="$(date +%s)" -v hours="$1" 'BEGIN {print int(now + 3600 * hours)}')
faults=${2:-300} folder=${3:-/tmp/gspo-mega-drill}
repository=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$repository/.venv/bin/python}
export PYTHONPATH=$repository:$repository/tests/soak OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
mkdir -p "$folder" && cd "$folder"
"$python" "$repository/tools/make_quickstart.py" moe --num-train 64 --num-heldout 16
"$python" "$repository/tools/make_quickstart.py" dense --task calculator --num-train 64 --num-heldout 16
turn=0.15
while true; do
    for one in turns:0.8 ahead:0.5 one_turn:0.2; do
        left=$(awk -v end="$end" -v now="$(date +%s)" -v turn=$turn 'BEGIN {h = (end - now) / 3600; print h < turn ? h : turn}')
        case $left in -* | 0) exit 0 ;; esac
        "$python" -m gspo_mega drill "$repository/tests/soak/drills/${one%:*}.yaml" --live "${one#*:}" --per-run 8 \
            --patience 400 --faults "$faults" --hours "$left" --folder "$folder/${one%:*}" \
            --rows "$repository/docs/studies/drill_rows.jsonl" || echo "exit code $?"
    done
    if [ "$(grep -c '"tried": true' "$repository/docs/studies/drill_rows.jsonl")" -ge "$faults" ]; then exit 0; fi
done
