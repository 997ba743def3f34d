#!/bin/sh
# delivery.sh TARBALL WHEEL PACKAGES RUNTIME MODEL: runs what people download for ARM64 under
# qemu-user: the command and the plug-in of the tarball with llama.cpp's real libraries, and the
# Python package of the wheel. PACKAGES is the folder of `fetch.py arm64`, RUNTIME the one of
# `fetch.py runtime aarch64`.
#
# `kvant exec` is not tested, because qemu-user does not emulate a program that another one starts.
set -eu
[ $# = 5 ] || { echo "usage: delivery.sh TARBALL WHEEL PACKAGES RUNTIME MODEL" >&2; exit 2; }
tarball=$1 wheel=$2 packages=$3 runtime=$4 model=$5
scripts=$(cd "$(dirname "$0")/../../scripts" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "delivery: $1" >&2
    exit 1
}

# A processor with dot products. The emulated processor `max` has SVE and SME, too, and did not
# finish in 5 minutes what this one does in one.
emulate() {
    qemu-aarch64 -cpu cortex-a76 -L /usr/aarch64-linux-gnu "$@"
}

# generate NAME OPTIONS: the text of a cache. The plug-in reports the cache's memory.
generate() {
    name=$1
    shift
    emulate "$kvant" run --runtime "$runtime" -m "$model" --raw -t 2 -n 4 -p "$prompt" "$@" \
        >"$work/$name.text" 2>"$work/$name.said" || { cat "$work/$name.said" >&2; fail "$name"; }
    echo "$name: $(tr '\n' ' ' <"$work/$name.text")"
}

# The plug-in computes attention of int-8 and of balanced, llama.cpp computes that of f16. SmolLM2
# copies a pattern here, so the errors of 4 bits do not change a token.
prompt="The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
tar -C "$work" -xf "$tarball"
kvant=$(find "$work" -path '*/bin/kvant')
generate f16 --stock f16
grep -q Madrid "$work/f16.text" || fail "llama.cpp does not continue the pattern"
for cache in "-k int-8" "--preset balanced"; do
    # shellcheck disable=SC2086 # the options are meant to be split
    generate "${cache##* }" $cache
    diff "$work/f16.text" "$work/${cache##* }.text" || fail "$cache: another text than with f16"
    grep -q "KV cache" "$work/${cache##* }.said" || { cat "$work"/*.said >&2; fail "no memory"; }
done

python3 -m zipfile -e "$wheel" "$work/wheel"
package=$work/wheel/kvant
"$scripts/check_elf.sh" 2.28 "$package/bin/kvant" "$package/lib/libkvant.so" \
    "$package/lib/libggml-kvant.so"
root=$packages/root
libraries=$root/usr/lib/aarch64-linux-gnu:$root/lib/aarch64-linux-gnu
emulate -E LD_LIBRARY_PATH="$libraries" -E PYTHONHOME="$root/usr" -E PYTHONDONTWRITEBYTECODE=1 \
    -E PYTHONPATH="$packages/python:$work/wheel" \
    "$root/usr/bin/python3.11" "$scripts/check_wheel.py"
chmod +x "$package/bin/kvant" # pip does so
emulate "$package/bin/kvant" --version
echo "runs: $(basename "$tarball"), $(basename "$wheel")"
