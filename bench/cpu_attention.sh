#!/bin/sh
# Measures attention on this CPU and keeps the results:
#
#     bench/cpu_attention.sh build/bin/kvant bench/results/cpu_attention.csv
#
# Six runs of kvant bench attention, 15 seconds to two minutes each, on a machine that does nothing
# else. PREFIX is put before each of them (for example "taskset -c 0-7"). bench/cpu_roofline.py
# makes tables and a picture.
set -eu

kvant=$1
out=$2
partial=$out.partial
codecs="-k int-4 -k bdr-4 -k turboquant-4 -k trellis-4 -k octopus-4 -k hqmq-s96r4"
here=$(dirname "$0")
rm -f "$partial"

run() {
    # shellcheck disable=SC2086 # both are lists
    ${PREFIX:-} python3 "$here/record.py" --append "$partial" -- "$kvant" bench attention "$@" \
        --json
}

levels=c
for level in avx2 avx2vnni avx512 neon; do # the best one is in the other runs
    if "$kvant" --cpu "$level" --version >/dev/null 2>&1; then levels=$levels,$level; fi
done

# One query token: shapes at each head_dim, then CPU levels, then every other codec.
for dim in 64 128 256; do
    # shellcheck disable=SC2086
    run $codecs -d "$dim" -g 1,4,7 -n 4096,32768,131072 -q 1 -r 3
done
# shellcheck disable=SC2086
run $codecs -d 128 -g 4 -n 4096,32768 -q 1 -r 5 --stock f16 --levels "$levels"
run -k f16 -k bf16 -k int-8 -k int-6 -k int-3 -k int-2 -k bdr-3 -k kivi-4 -k kivi-2 -k innerq-base \
    -k innerq-hybrid \
    -k innerq-small -k turboquant-8 -k turboquant-3 -k turboquant-2 -k turboquant-4:qjl \
    -k trellis-3 -k trellis-2 -k polar-4 -k octopus-3 -k octopus-2 \
    -k hqmq-s192r6 -k spherical-r4jl4 -k addvq-k48r4 -d 128 -g 4 -n 32768 -q 1 -r 5 --stock f16
# 512 query tokens.
# shellcheck disable=SC2086
run $codecs -d 64,128,256 -g 4 -n 4096 -q 512 -r 3

mv "$partial" "$out"
