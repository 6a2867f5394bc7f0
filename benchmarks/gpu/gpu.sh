#!/usr/bin/env bash
# Runs all measurements and tests that need a GPU, in one command.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: benchmarks/gpu/gpu.sh OUT [--part decode|train] [--device cuda|cpu] [--tiny] [--peak-tflops N] [--limit-s 300]

Runs, one after the other, each with a share of the part's time:
  --part decode, which needs little beside torch and transformers
    decode       tokens/s of chains and trees beside plain decoding
    graphs       the same with CUDA graphs, beside transformers' compiled generate
    tests        tests marked gpu: decoding, compiled calls, serving, attention
    sampling     draws, choices and verifications at a large vocabulary
  --part train
    train        a step of three drafters: share of the peak, memory, and the kernels that attention takes
    extract      share of the device's peak with writing on, and the seconds of forward, copy, encoding and waiting
    train-tests  tests marked gpu: copies, training steps, codecs
    codecs       GB/s of lossless and int8 on the host and on the device
    transform    the same of a codec that learns
Each leaves a record and a log in OUT, a new or empty folder; a table of all comes last. A step that fails or takes too
long is named, makes the exit status 1, and keeps no other from running. Before the first, a line says what a part
lacks here, and the exit status is 2; `python -m benchmarks.gpu.preflight --wheels` lists what to carry.

  --part         the part that runs (default both, decode first)
  --device       device that is measured (default cuda); on cpu the tests are found but not run
  --tiny         tiny shapes, which show that each step works and nothing else
  --peak-tflops  10^12 operations a second that the device could do; default: known by its name, else no share is given
  --limit-s      seconds of each part (default 300)
PYTHON names the interpreter (default python).
TEXT
}

die() { echo "$1" >&2; exit 2; }

out='' device=cuda tiny='' peak=() part_s=300 parts=(decode train)
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) usage; exit ;;
    --tiny) tiny=yes ;;
    --part|--device|--peak-tflops|--limit-s)
      [ $# -gt 1 ] || die "$1 needs a value; --help shows them."
      case $1 in
        --part) parts=("$2") ;;
        --device) device=$2 ;;
        --peak-tflops) peak=(--peak-tflops "$2") ;;
        --limit-s) part_s=$2 ;;
      esac
      shift ;;
    -*) die "There is no option $1; --help lists them." ;;
    *) [ -z "$out" ] || die "One OUT is enough, but $1 came behind $out."; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || die "Give a folder OUT for the records; --help says more."
case $device in cpu|cuda) ;; *) die "--device is cuda or cpu, not $device." ;; esac
case ${parts[0]} in decode|train) ;; *) die "--part is decode or train, not ${parts[0]}." ;; esac
[[ $part_s =~ ^[1-9][0-9]*$ ]] || die "--limit-s is a whole number of seconds, not $part_s."
[ -z "$(ls -A "$out" 2>/dev/null)" ] || die "$out is not empty; give a new folder."
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
# The root of the repository is the package moa_data. If the package is not installed, make a link with this name.
if ! "$python" -c 'import moa_data' 2>/dev/null; then
  mkdir "$out/path"
  ln -s "$PWD" "$out/path/moa_data"
  export PYTHONPATH="$out/path${PYTHONPATH:+:$PYTHONPATH}"
fi
if [ "$device" = cuda ]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch finds no GPU here; --device cpu runs the same steps without one."
fi
"$python" -m benchmarks.gpu.preflight "${parts[@]}" || exit 2
failed=()

step() { # step NAME PERCENT MODULE OPTION...: runs a benchmark for at most PERCENT of the part's time
  local name=$1 limit_s=$(( part_s * $2 / 100 )) began_s=$SECONDS status=0; shift 2
  if [ $limit_s -gt $(( ends_s - SECONDS )) ]; then limit_s=$(( ends_s - SECONDS )); fi
  if [ $limit_s -lt 1 ]; then
    status='no time left'
  else
    timeout --kill-after 5 "$limit_s" "$python" -m "$@" >"$out/$name.log" 2>&1 || status=$?
    if [ "$status" = 124 ]; then status="more than $limit_s s"; fi
  fi
  if [ "$status" = 0 ]; then
    echo "$name: $(( SECONDS - began_s )) s"
  else
    failed+=("$name")
    echo "$name: FAILED ($status), see $out/$name.log"
    tail -n 3 "$out/$name.log" 2>/dev/null || true
  fi
}

on=(--device "$device")
# Tests are run by their paths, because pytest imports every file that it is given. The other files in tests/ import
# packages that may be missing here.
tests=()
if [ "$device" = cpu ]; then tests=(--collect-only); fi
if [ -n "$tiny" ]; then
  extract=(--layers 2 --max-sequences 4 --max-length 128 --repeats 1)
  train=(--shape tiny --layers 8 --tokens 96 --micro-batch 4 --steps 2 --threads 1 --count-flops)
  codecs=(--shape 2 2 32 --tokens 128 --repeats 1 --threads 1)
  transform=(--shape 2 2 32 --tokens 128 --learn-tokens 512 --repeats 1 --threads 1)
  sampling=(--vocabulary 1000 --repeats 3)
  decode=(--shape tiny --prompt-tokens 32 --max-new-tokens 6 --repeats 1 --drafts 5 4x4x16)
  graphs=(--shape tiny --layers 2 --prompt-tokens 32 --max-new-tokens 4 --repeats 1 --drafts 3 --cuda-graphs)
else
  extract=(--shape llama-3-8b --layers 8 --max-sequences 64 --repeats 2)
  # Measure only three kinds of drafters, with a fixed micro-batch, to save time. On an H100, compiling takes a minute
  # per kind, and more for DSpark.
  train=(--steps 4 --threads 8 --micro-batch 8 --drafters moa eagle eagle3 --limit-s $(( part_s * 55 / 100 )))
  codecs=(--shape 32 8 128 --tokens 1024 --repeats 3 --threads 1)
  transform=(--shape 4 8 128 --tokens 1024 --repeats 3 --threads 1)
  sampling=()
  decode=(--shape llama-3-8b --dtype bfloat16 --repeats 2 --drafts 3 5 4x4x16 6x8x24 6x8x62)
  graphs=(--shape llama-3-8b --dtype bfloat16 --repeats 3 --max-new-tokens 64 --drafts 3 5 4x4x16 6x8x24 6x8x62
    --cuda-graphs --transformers-compiled)
fi
marked_gpu() { # marked_gpu NAME PERCENT PATH...: runs the tests with the mark gpu in the files and folders PATH
  local name=$1 percent=$2; shift 2
  step "$name" "$percent" pytest -m gpu -q --junit-xml "$out/$name.xml" "${tests[@]}" "$@"
}

decode() {
  step decode 35 benchmarks.decoding.decode "${decode[@]}" "${on[@]}" --rounds-only --out "$out"
  step graphs 45 benchmarks.decoding.decode "${graphs[@]}" "${on[@]}" --rounds-only --out "$out"
  marked_gpu tests 25 tests/gpu/test_decoding.py tests/moa/nn/test_attention.py
  step sampling 15 benchmarks.decoding.sampling "${sampling[@]}" "${on[@]}" --out "$out"
}

train() {
  step train 60 benchmarks.training.train_step "${train[@]}" "${on[@]}" "${peak[@]}" --out "$out"
  step extract 30 benchmarks.store.extract "${extract[@]}" "${on[@]}" "${peak[@]}" --out "$out"
  marked_gpu train-tests 25 tests/gpu/test_copies.py tests/storage/codecs
  step codecs 20 benchmarks.codecs.codec_speed "${codecs[@]}" "${on[@]}" --codecs lossless int8 --out "$out"
  step transform 20 benchmarks.codecs.codec_speed "${transform[@]}" "${on[@]}" --codecs transform:1 --out "$out"
}

for part in "${parts[@]}"; do
  ends_s=$(( SECONDS + part_s ))
  "$part"
done
echo
"$python" -m benchmarks.gpu.gpu_report "$out"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
