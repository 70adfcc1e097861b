#!/usr/bin/env bash
# From a fresh machine to a trained model: set-up, a tiny model and its task, cold start, GSPO. No GPU needed.
#
#   launch/quickstart.sh [--task calculator] [--seed N] [--fp8] [--ppo] [--control] [--keep] [key=value ...]
#   launch/quickstart.sh --model smollm2 [--seed N] [--control] [key=value ...]
#
#   --model smollm2     a pretrained model that learns to write JSON objects; --model smollm2 --help says more
#   --task calculator   several turns with a tool, in place of additions in one turn; in runs/calculator
#   --seed N     another model, task split and order of everything (default 1); in runs/quickstart-seedN
#   --fp8        a wider model, trained in FP8 and served in FP8 (without a GPU: emulated); in runs/quickstart-fp8
#   --ppo        PPO with a critic in place of GSPO, on additions of 3 to 6 digits; in runs/quickstart-ppo
#   --control    the same training with rewards permuted inside the batch, which must not learn; implies --keep
#   --keep       keep the model, data and cold start of the last run, and only train anew
#   key=value    overrides for the training's configuration, e.g. train.num_steps=3
#
# Run it again to continue an interrupted run. A finished run is moved to runs/quickstart.1, ... and made anew; nothing is
# overwritten. It works from any folder. Results are in the repository's runs/.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

rest=() pretrained=false
while (($#)); do
  if [[ $1 == --model ]]; then
    [[ ${2:-} == smollm2 ]] || { echo "quickstart: --model is smollm2, not '${2:-}'; leave it out for the tiny model" >&2; exit 2; }
    pretrained=true
    shift
  else
    rest+=("$1")
  fi
  shift
done
set -- ${rest[@]+"${rest[@]}"}
if $pretrained; then exec launch/smollm2.sh "$@"; fi

seed=1 task=arithmetic fp8=false ppo=false control=false keep=false overrides=()
kind=quickstart model="a tiny Qwen3-MoE" data="additions to learn from" shape=()
ranks="an SGLang server samples, two Megatron-Core ranks train, weights are published every step"
while (($#)); do
  case $1 in
    --seed)
      [[ ${2:-} =~ ^[0-9]+$ ]] || { echo "quickstart: --seed needs a number, not '${2:-}'" >&2; exit 2; }
      seed=$2
      shift
      ;;
    --task)
      [[ ${2:-} =~ ^(arithmetic|calculator)$ ]] || {
        echo "quickstart: --task is arithmetic or calculator, not '${2:-}'" >&2
        exit 2
      }
      task=$2
      shift
      ;;
    --fp8) fp8=true ;;
    --ppo) ppo=true ;;
    --control) control=true keep=true ;;
    --keep) keep=true ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *=*) overrides+=("$1") ;;
    *)
      echo "quickstart: '$1' is neither an option (--model smollm2, --task NAME, --seed N, --fp8, --ppo, --control, --keep) nor key=value" >&2
      exit 2
      ;;
  esac
  shift
done

algorithm=GSPO
if $ppo; then
  [[ $task/$fp8 == arithmetic/false ]] || { echo "quickstart: --ppo has a task and a precision of its own; leave out --task and --fp8" >&2; exit 2; }
  kind=quickstart_ppo algorithm=PPO shape=(--task mixed)
  ranks="an SGLang server samples, two Megatron-Core ranks train policy and critic, weights are published every step"
fi
case $task/$fp8 in
  calculator/true) echo "quickstart: --fp8 has no calculator; leave out one of them" >&2; exit 2 ;;
  calculator/false)
    kind=calculator model="a tiny Qwen3" data="sums to work out with a calculator" shape=(--task calculator)
    ranks="an SGLang server samples turns, a process runs the tool, two Megatron-Core ranks train, weights are published every step"
    ;;
  arithmetic/true)
    kind=quickstart_fp8 model="a small Qwen3" shape=(--wide)
    ranks="an SGLang server samples with FP8 weights, a Megatron-Core rank trains in FP8, weights are published every step"
    ;;
esac
# What makes this run again.
same=()
[[ $task == arithmetic ]] || same+=(--task "$task")
! $fp8 || same+=(--fp8)
! $ppo || same+=(--ppo)
[[ $seed == 1 ]] || same+=(--seed "$seed")
folder=runs/${kind//_/-}
name=train
[[ $seed == 1 ]] || folder+=-seed$seed
if $control; then
  name=train-control
  overrides+=(reward.permute_in_batch=true)
fi

say() { printf '\n== %s\n' "$*"; }

set_aside() {
  local number=1
  while [[ -e $1.$number ]]; do number=$((number + 1)); done
  mv "$1" "$1.$number"
  echo "quickstart: the finished $1 of the last run is now $1.$number"
}

say "1 of 4  Setting up the environment (.venv; once, a few minutes)"
launch/setup.sh
setup_seconds=$SECONDS

if [[ -d $folder/$name/hf ]]; then
  if $keep; then set_aside "$folder/$name"; else set_aside "$folder"; fi
fi
run=(run.dir="$folder" run.seed="$seed" data.path="$folder/data/train.jsonl" eval.path="$folder/data/heldout.jsonl")

say "2 of 4  Making $model of random weights, and $data, in $folder"
.venv/bin/python tools/make_quickstart.py "$folder" --seed "$seed" ${shape[@]+"${shape[@]}"}

say "3 of 4  Cold start: supervised training until 0.3 to 0.5 of 256 held-out problems are solved"
if [[ -d $folder/sft/hf ]]; then
  echo "quickstart: the cold start is done; $folder/sft/hf is kept"
else
  .venv/bin/gspo-mega sft "configs/${kind}_sft.yaml" "${run[@]}" model.path="$folder/model"
fi

if $control; then
  say "4 of 4  The control: $algorithm with rewards permuted inside the batch; accuracy should not rise"
else
  say "4 of 4  $algorithm: $ranks"
fi
code=0
.venv/bin/gspo-mega train "configs/$kind.yaml" \
  "${run[@]}" model.path="$folder/sft/hf" run.name="$name" ${overrides[@]+"${overrides[@]}"} || code=$?
if ((code)); then
  echo "quickstart: the training ended with exit code $code; run the same command again to continue it" >&2
  exit "$code"
fi

report="$folder/$name/report.html"
.venv/bin/gspo-mega report "$folder/$name" --out "$report" >/dev/null || report="could not be written; gspo-mega report $folder/$name"

minutes() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }
say "Done after $(minutes $SECONDS), $(minutes $setup_seconds) of it set-up"
cat <<END
The trained model, a Hugging Face folder:   $folder/$name/hf
Its report, to open in a browser:           $report
Curves:                                     .venv/bin/tensorboard --logdir $folder
Every step's numbers:                       $folder/$name/metrics.jsonl

Next:
  source .venv/bin/activate
END
next() { printf '  %-68s %s\n' "$1" "$2"; }
next "gspo-mega eval $folder/$name" "its accuracy once more"
next "launch/quickstart.sh ${same[*]-}${same:+ }--control" "the same with meaningless rewards"
next "gspo-mega plan configs/gsm8k.yaml data.path=YOUR.jsonl" "your own prompts: look at the plan first"
next "gspo-mega train configs/gsm8k.yaml data.path=YOUR.jsonl" "any JSONL of prompts and answers"
