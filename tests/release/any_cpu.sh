#!/usr/bin/env bash
# Whether a binary runs on every x86-64 CPU: it converts and scores on one without AVX, by emulation, and what it makes is what it
# makes here.
#
#     tests/release/any_cpu.sh COLICONV
#
# Wants Debian's qemu-user-static.
set -euo pipefail
coliconv=$(realpath "$1")
root=$(cd "$(dirname "$0")/../.." && pwd)
[ "$(uname -m)" = x86_64 ] || { echo "error: this looks at x86-64 binaries, and this is $(uname -m)" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

head -n 2 "$root/fixtures/nano/expected/gloss.jsonl" >"$work/gloss.jsonl"
make() {
    local name=$1
    shift
    "$@" "$coliconv" convert "$root/fixtures/nano" "$work/$name" --group-size 64 --mtp --indexer --quiet >/dev/null
    case $name in here | qemu64) ;; *) return ;; esac
    "$@" "$coliconv" score "$work/$name" --task "gloss=$work/gloss.jsonl" --out "$work/scores-$name" --quiet >/dev/null
}
make here
# The oldest x86-64 that qemu knows, one without AVX, one with AVX2, and those with AVX2's kernels one instruction set short.
for cpu in qemu64 Conroe max max,avx2=off max,f16c=off; do
    make "$cpu" qemu-x86_64-static -cpu "$cpu"
    diff -r "$work/here" "$work/$cpu"
    echo "$cpu: the same container as here"
done
cmp "$work/scores-here/requests.csv" "$work/scores-qemu64/requests.csv"
echo "qemu64: the same scores as here"
