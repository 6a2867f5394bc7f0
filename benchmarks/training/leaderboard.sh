#!/usr/bin/env bash
# Fills the leaderboard for a target: trains every drafter for every number of steps and seed, and enters each.
# usage: benchmarks/training/leaderboard.sh STORE MODEL TEST_CHATS HELD_OUT_CHATS OUT TARGET
# TARGET is what the leaderboard calls the target. Run again it goes on: on one thread all of it takes some 40 hours.
# DRAFTERS, STEPS, SEEDS, RATES and PYTHON in the environment change what runs; a step is 8 chats, and on GSM8K the
# steps are 0.57, 2.0 and 8.0 M tokens. Calls with other DRAFTERS or STEPS may share OUT and run side by side.
set -euo pipefail
if [ $# -ne 6 ]; then sed -n '2,6p' "$0" | cut -c3-; exit 2; fi
store=$1 model=$2 test_chats=$3 held_out=$4 out=$5 target=$6
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
read -r -a rates <<< "${RATES:-0.5 1}"
read -r -a seeds <<< "${SEEDS:-0 1}"

value() { # value KEY FILE
  "$python" -c 'import json, sys; print(json.load(open(sys.argv[2]))[sys.argv[1]])' "$@"
}

for steps in ${STEPS:-340 1199 4796}; do
  for drafter in ${DRAFTERS:-eagle eagle3 moa moa-light dflash dspark block-kv-deep block-memory}; do
    trained=(--target "$target" --only "$drafter" --rates "${rates[@]}" --steps "$steps" --seeds "${seeds[@]}")
    "$python" -m benchmarks.training.drafters "$store" "$model" "$test_chats" "$out/$steps" "${trained[@]}"
    for seed in "${seeds[@]}"; do
      row=$out/$steps/row-$drafter-$seed.json
      "$python" -m benchmarks.training.leaderboard "$model" "$test_chats" "$(value run "$row")" --name "$(value title "$row")" \
        --target "$target" --seed "$seed" --held-out "$held_out" --out "$out/$steps" --trained "${trained[*]:2}"
    done
  done
done
