#!/usr/bin/env bash
# The whole job on a real model and real chats: plan, extract, verify, audit, train at two budgets, eval at two drafts.
# usage: benchmarks/real_input.sh MODEL TRAIN_CHATS TEST_CHATS OUT
# Every command is safe to run again: it goes on, or repeats what is quick. The output of each goes to OUT/logs.
# MOA_DATA, N_PROMPTS, SHORT_STEPS, LONG_STEPS, TRAIN_OPTIONS and DRAFTER_SIZES in the environment change what runs; the
# sizes here are a drafter of 2.0 million weights, as published 1.9, for a target of width 384 with 2 KV heads of 64.
set -euo pipefail
if [ $# -ne 4 ]; then sed -n '2,6p' "$0" | cut -c3-; exit 2; fi
model=$1 train_chats=$2 test_chats=$3 out=$4
moa_data=${MOA_DATA:-moa-data}
n_prompts=${N_PROMPTS:-80}
short_steps=${SHORT_STEPS:-340}
long_steps=${LONG_STEPS:-3000}
read -r -a sizes <<< "${DRAFTER_SIZES-self_attention_kv_heads=1 self_attention_mlp_width=320 \
cross_attention_kv_heads=1 cross_attention_mlp_width=320 layer_attention_kv_heads=2 layer_attention_mlp_width=224}"
sizes=("${sizes[@]/#/--set=drafter.}")
read -r -a options <<< "${TRAIN_OPTIONS:-}"
mkdir -p "$out/logs"

step() { # step NAME COMMAND...: runs it, keeps its output, shows it
  local name=$1; shift
  echo "== $name: $*"
  "$@" 2>"$out/logs/$name.err" | tee "$out/logs/$name.txt"
}

train() { # train NAME N_STEPS: goes on if the run is there
  local resume=()
  if [ -e "$out/$1/checkpoints/last.ckpt" ]; then resume=(--resume); fi
  step "train-$1" "$moa_data" train "$out/store" --out "$out/$1" --preset small --max-steps "$2" \
    "${sizes[@]}" "${options[@]}" "${resume[@]}"
}

step plan "$moa_data" plan --model "$model" --dataset "$train_chats" --out "$out/store"
step extract "$moa_data" extract --model "$model" --dataset "$train_chats" --out "$out/store"
step inspect "$moa_data" inspect "$out/store"
step verify "$moa_data" verify "$out/store"
step audit "$moa_data" audit "$out/store" --model "$model" --samples 16
train short "$short_steps"
train long "$long_steps"
for run in short long; do
  for draft_length in 4 5; do
    step "eval-$run-$draft_length" "$moa_data" eval --model "$model" --drafter "$out/$run" --prompts "$test_chats" \
      --method plain,chain,auto --n-prompts "$n_prompts" --draft-length "$draft_length" --out "$out/eval-$run-$draft_length.json"
  done
done
