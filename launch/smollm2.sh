#!/usr/bin/env bash
# GSPO on a pretrained model: SmolLM2-135M-Instruct learns to write JSON objects. No GPU needed. See docs/pretrained.md.
#
#   launch/quickstart.sh --model smollm2 [--task json|arithmetic] [--lora] [--seed N] [--control] [key=value ...]
#
#   --task T     json (default), or arithmetic: sums and products, 20 steps
#   --lora       train adapters of rank 16 in place of all weights
#   --seed N     other problems and another order of everything (default 1)
#   --control    the same training with rewards permuted inside the batch, which must not learn
#   key=value    overrides for the configuration, e.g. train.num_steps=3
#
# The model comes from launch/smollm2_model.sh once, as the Hugging Face folder runs/models/smollm2 (93 MB to fetch). Run it again to continue an interrupted run. A finished run is
# moved to runs/smollm2-json.1, ... and made anew. Results are in the repository's runs/.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

seed=1 control=false task=json lora=false overrides=()
while (($#)); do
  case $1 in
    --seed)
      [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "quickstart: --seed needs a number, not '${2:-}'" >&2; exit 2; }
      seed=$2
      shift
      ;;
    --task)
      [[ ${2:-} == json || ${2:-} == arithmetic ]] || { echo "quickstart: --task is json or arithmetic, not '${2:-}'" >&2; exit 2; }
      task=$2
      shift
      ;;
    --lora) lora=true ;;
    --control) control=true ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *=*) overrides+=("$1") ;;
    *)
      echo "quickstart: with --model smollm2, '$1' is neither an option (--task T, --lora, --seed N, --control) nor key=value" >&2
      exit 2
      ;;
  esac
  shift
done

model=runs/models/smollm2
folder=runs/smollm2-$task own=() reward=()
# Without a GPU each prompt of a group is computed once (docs/shared_prefixes.md); more than half of the tokens are prompts'.
compgen -G '/dev/nvidia[0-9]*' >/dev/null || own+=(batch.share_prefixes=prompts)
if [[ $task == arithmetic ]]; then reward=(reward=gsm8k) own+=(train.num_steps=20 eval.every_steps=10); fi
if $lora; then folder+=-lora own+=('lora={rank: 16, alpha: 32}' optimizer.lr=2e-4); fi
[[ $seed == 1 ]] || folder+=-seed$seed
if $control; then folder+=-control own+=(reward.permute_in_batch=true); fi
overrides=(${own[@]+"${own[@]}"} ${overrides[@]+"${overrides[@]}"})
config=configs/smollm2_json.yaml

say() { printf '\n== %s\n' "$*"; }

say "1 of 5  Setting up the environment (.venv; once, a few minutes)"
launch/setup.sh
setup_seconds=$SECONDS

say "2 of 5  SmolLM2-135M-Instruct as a Hugging Face folder in $model (once; 93 MB to fetch)"
launch/smollm2_model.sh

if [[ -d $folder/train/hf ]]; then
  number=1
  while [[ -e $folder.$number ]]; do number=$((number + 1)); done
  mv "$folder" "$folder.$number"
  echo "quickstart: the finished $folder of the last run is now $folder.$number"
fi
say "3 of 5  Problems in $folder/data"
.venv/bin/python tools/make_short_task.py "$folder/data" --task "$task" --seed "$seed"

run=(run.dir="$folder" run.seed="$seed" data.path="$folder/data/train.jsonl" eval.path="$folder/data/heldout.jsonl"
  ${reward[@]+"${reward[@]}"})
say "4 of 5  GSPO: an SGLang server samples, two Megatron-Core ranks train, weights are published every step"
if grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo; then
  echo "quickstart: this processor multiplies bf16 itself; the training takes six to ten minutes on two idle cores"
else
  echo "quickstart: this processor has no bf16 products (AMX, AVX-512), so they are computed in fp32; allow half an hour on two" \
    "idle cores, or try train.num_steps=3 first"
fi
code=0
.venv/bin/gspo-mega train "$config" model.path="$model" "${run[@]}" ${overrides[@]+"${overrides[@]}"} || code=$?
if ((code)); then
  echo "quickstart: the training ended with exit code $code; run the same command again to continue it" >&2
  exit "$code"
fi

say "5 of 5  The same held-out prompts before and after, the likeliest token each time"
few=(eval.num_prompts=4 eval.temperature=0)
ask() { .venv/bin/gspo-mega eval "$1" --config "$config" "${run[@]}" "${few[@]}" run.name="$2" --out "$folder/$2.jsonl" >"$folder/$2.log" 2>&1; }
if ask "$model" before && ask "$folder/train/hf" after; then
  .venv/bin/python tools/before_and_after.py "$folder/data/heldout.jsonl" "$folder/before.jsonl" "$folder/after.jsonl"
else
  echo "quickstart: no samples; $folder/before.log and after.log say why. The trained model is complete" >&2
fi

report="$folder/train/report.html"
.venv/bin/gspo-mega report "$folder/train" --out "$report" >/dev/null || report="could not be written; gspo-mega report $folder/train"
minutes() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }
say "Done after $(minutes $SECONDS), $(minutes $setup_seconds) of it set-up"
cat <<END
The trained model, a Hugging Face folder:   $folder/train/hf
Its report, to open in a browser:           $report
Every step's numbers:                       $folder/train/metrics.jsonl

Your own model and data: docs/pretrained.md
END
