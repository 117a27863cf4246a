#!/usr/bin/env bash
# docs/cluster/slurm on a real Slurm: one node, several tasks at once, parts that die and are started again, to the same bytes as
# one run.
#
#     tests/cluster/slurm.sh COLICONV
#
# Wants Debian's slurm-wlm and munge, and root. Starts munged, slurmctld and slurmd of its own and ends them.
set -euo pipefail
coliconv=$(realpath "$1")
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d /tmp/coliconv-slurm.XXXXXX)
chmod 755 "$work"
pids=()
finish() {
    code=$?
    [ "$code" = 0 ] || tail -n 20 "$work"/*.log "$work"/jobs/*.log 2>/dev/null || true
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait 2>/dev/null || true
    rm -rf "$work"
    exit "$code"
}
trap finish EXIT

# ---- a cluster of one node
host=$(hostname -s)
port=$((20000 + RANDOM % 20000))
mkdir -p "$work"/{state,spool,jobs,munge,bin}
head -c 1024 /dev/urandom >"$work/munge/key"
chmod 400 "$work/munge/key"
chmod 700 "$work/munge"
cat >"$work/slurm.conf" <<END
ClusterName=coliconv
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF="$work/slurm.conf"
munged --force --foreground --key-file="$work/munge/key" --socket="$work/munge.socket" --pid-file="$work/munge/pid" \
    --log-file="$work/munge/log" --seed-file="$work/munge/seed" >"$work/munged.log" 2>&1 &
pids+=($!)
until [ -S "$work/munge.socket" ]; do sleep 0.1; done
slurmctld -D >"$work/slurmctld.log" 2>&1 &
pids+=($!)
slurmd -D -N "$host" >"$work/slurmd.log" 2>&1 &
pids+=($!)
for _ in $(seq 100); do
    sinfo -h -o %T 2>/dev/null | grep -q idle && break
    sleep 0.2
done
sinfo -h -o %T | grep -q idle || { echo "error: the node does not come up" >&2; exit 1; }

# ---- a coliconv that dies: part 2 is killed at once, part 3 takes its whole job with it, which Slurm starts again
cat >"$work/bin/coliconv" <<END
#!/usr/bin/env bash
case "\$*" in
*"--part 2/"*) [ -e "$work/died-2-\$1" ] || { : >"$work/died-2-\$1"; timeout -s KILL 0.01 "$coliconv" "\$@"; kill -9 \$\$; } ;;
*"--part 3/"*) [ -e "$work/died-3-\$1" ] || { : >"$work/died-3-\$1"; timeout -s KILL 0.01 "$coliconv" "\$@"
    scontrol requeue "\$SLURM_JOB_ID"; sleep 60; } ;;
esac
exec "$coliconv" "\$@"
END
chmod +x "$work/bin/coliconv"
export PATH="$work/bin:$PATH"

# All jobs of a submission, to their end; the exit codes that its logs and Slurm tell.
submitted() {
    local ids id
    ids=$(cd "$work/jobs" && "$root/docs/cluster/slurm/submit" "$@")
    for id in $ids; do
        for _ in $(seq 600); do
            [ -n "$(squeue -h -j "$id" 2>/dev/null)" ] || break
            sleep 0.2
        done
        [ -z "$(squeue -h -j "$id" 2>/dev/null)" ] || { squeue; echo "error: job $id does not end" >&2; exit 1; }
    done
    for id in $ids; do
        scontrol show job "$id" | grep -E "^ *JobState=" | grep -vq COMPLETED && { scontrol show job "$id"; exit 1; }
    done
    [ -e "$work/died-2-$2" ] && [ -e "$work/died-3-$2" ] || { echo "error: no part has died" >&2; exit 1; }
}

cp -r "$root/fixtures/nano" "$work/nano"
flags=(--group-size 64 --mtp --indexer)
"$coliconv" convert "$work/nano" "$work/single" "${flags[@]}" --quiet >/dev/null
submitted 4 convert "$work/nano" "$work/container" "${flags[@]}"
diff -r "$work/single" "$work/container"
echo "convert: four parts, two of which died, make what one run makes"

against=(--source "$work/nano" --reference "$root/fixtures/nano/expected/tokens-g64-mtp-indexer.json")
"$coliconv" verify "$work/single" "${against[@]}" --report "$work/whole.json" --quiet >/dev/null
submitted 4 verify "$work/container" "${against[@]}" --report "$work/verify.json"
python3 - "$work" <<'END'
import json, sys
whole, joined = (json.load(open(f"{sys.argv[1]}/{name}.json")) for name in ["whole", "verify"])
for key in set(whole) - {"seconds", "experts"}:
    one, other = json.dumps(whole[key]).replace("/single", "/container"), json.dumps(joined.get(key))
    assert one == other, (key, one, other)
END
echo "verify: four parts, two of which died, make what one run makes"

head -n 10 "$root/fixtures/nano/expected/gloss.jsonl" >"$work/gloss.jsonl"
head -n 6 "$root/fixtures/nano/expected/heldout.txt" >"$work/heldout.txt"
inputs=(--task "gloss=$work/gloss.jsonl" --text "heldout=$work/heldout.txt")
"$coliconv" score "$work/nano" "${inputs[@]}" --out "$work/source" --quiet >/dev/null
"$coliconv" score "$work/single" "${inputs[@]}" --baseline "$work/source" --out "$work/single-scores" --quiet >/dev/null
submitted 4 score "$work/container" "${inputs[@]}" --baseline "$work/source" --out "$work/scores"
cmp "$work/single-scores/results.jsonl" "$work/scores/results.jsonl"
cmp "$work/single-scores/requests.csv" "$work/scores/requests.csv"
echo "score: four parts, two of which died, make what one run makes"
