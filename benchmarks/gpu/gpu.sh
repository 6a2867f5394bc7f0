#!/usr/bin/env bash
# Measures what waits for a GPU, in one command.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: benchmarks/gpu/gpu.sh OUT [--device cuda|cpu] [--tiny] [--peak-tflops N] [--limit-s 590]

Runs, one after the other, each with a share of the time:
  tests      pytest -m gpu
  extract    share of the device's peak with writing on, and the seconds of forward, copy, encoding and waiting
  train      a step of each drafter: share of the peak, memory, and the kernels that attention takes
  codecs     GB/s of lossless and int8 on the host and on the device
  transform  the same of a codec that learns
  sampling   draws and verifications at a large vocabulary
  decode     tokens/s of chains and trees beside plain decoding
  compiled   the same with compiled target calls
Each leaves a record and a log in OUT, a new or empty folder; a table of all comes last. A step that fails or takes too
long is named, makes the exit status 1, and keeps no other from running.

  --device       device that is measured (default cuda); on cpu the tests are found but not run
  --tiny         tiny shapes, which show that each step works and nothing else
  --peak-tflops  10^12 operations a second that the device could do; default: known by its name, else no share is given
  --limit-s      seconds of all steps together (default 590)
PYTHON names the interpreter (default python).
TEXT
}

die() { echo "$1" >&2; exit 2; }

out='' device=cuda tiny='' peak=() total_s=590
while [ $# -gt 0 ]; do
  case $1 in
    -h|--help) usage; exit ;;
    --tiny) tiny=yes ;;
    --device|--peak-tflops|--limit-s)
      [ $# -gt 1 ] || die "$1 needs a value; --help shows them."
      case $1 in
        --device) device=$2 ;;
        --peak-tflops) peak=(--peak-tflops "$2") ;;
        --limit-s) total_s=$2 ;;
      esac
      shift ;;
    -*) die "There is no option $1; --help lists them." ;;
    *) [ -z "$out" ] || die "One OUT is enough, but $1 came behind $out."; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || die "Give a folder OUT for the records; --help says more."
case $device in cpu|cuda) ;; *) die "--device is cuda or cpu, not $device." ;; esac
[[ $total_s =~ ^[1-9][0-9]*$ ]] || die "--limit-s is a whole number of seconds, not $total_s."
[ -z "$(ls -A "$out" 2>/dev/null)" ] || die "$out is not empty; give a new folder."
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
if [ "$device" = cuda ]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || die "torch finds no GPU here; --device cpu runs the same steps without one."
fi
failed=()

step() { # step NAME PERCENT FILE OPTION...: runs a benchmark for at most that part of the time
  local name=$1 limit_s=$(( total_s * $2 / 100 )) began_s=$SECONDS status=0; shift 2
  if [ $limit_s -gt $(( total_s - SECONDS )) ]; then limit_s=$(( total_s - SECONDS )); fi
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
if [ "$device" = cuda ]; then tests=(tests); else tests=(tests/moa/nn --collect-only); fi
if [ -n "$tiny" ]; then
  extract=(--layers 2 --max-sequences 4 --max-length 128 --repeats 1)
  train=(--shape tiny --layers 8 --tokens 96 --micro-batch 4 --steps 2 --threads 1 --count-flops)
  codecs=(--shape 2 2 32 --tokens 128 --repeats 1 --threads 1)
  transform=(--shape 2 2 32 --tokens 128 --learn-tokens 512 --repeats 1 --threads 1)
  sampling=(--vocabulary 1000 --repeats 3)
  decode=(--shape tiny --prompt-tokens 32 --max-new-tokens 6 --repeats 1 --drafts 5 4x4x16)
  compiled=(--shape tiny --layers 2 --prompt-tokens 32 --max-new-tokens 4 --repeats 1 --drafts 3 --compile aot_eager)
else
  extract=(--shape llama-3-8b --layers 8 --max-sequences 64 --repeats 2)
  train=(--steps 4 --threads 8 --limit-s $(( total_s * 40 / 100 )))
  codecs=(--shape 32 8 128 --tokens 1024 --repeats 3 --threads 1)
  transform=(--shape 4 8 128 --tokens 1024 --repeats 3 --threads 1)
  sampling=()
  decode=(--shape llama-3-8b --dtype bfloat16 --repeats 2 --drafts 3 5 4x4x16 6x8x24 6x8x62)
  compiled=(--shape llama-3-8b --layers 8 --dtype bfloat16 --repeats 2 --drafts 3 5 6x8x24 --compile)
fi
step tests 15 pytest -m gpu -q --junit-xml "$out/gpu-tests.xml" "${tests[@]}"
step extract 20 benchmarks.store.extract "${extract[@]}" "${on[@]}" "${peak[@]}" --out "$out"
step train 50 benchmarks.training.train_step "${train[@]}" "${on[@]}" "${peak[@]}" --out "$out"
step codecs 12 benchmarks.codecs.codec_speed "${codecs[@]}" "${on[@]}" --codecs lossless int8 --out "$out"
step transform 12 benchmarks.codecs.codec_speed "${transform[@]}" "${on[@]}" --codecs transform:1 --out "$out"
step sampling 8 benchmarks.decoding.sampling "${sampling[@]}" "${on[@]}" --out "$out"
step decode 20 benchmarks.decoding.decode "${decode[@]}" "${on[@]}" --rounds-only --out "$out"
step compiled 30 benchmarks.decoding.decode "${compiled[@]}" "${on[@]}" --rounds-only --out "$out"
echo
"$python" -m benchmarks.gpu.gpu_report "$out"
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED: ${failed[*]}"
  exit 1
fi
