#!/bin/sh
# Builds the library straight from its sources (no build system) with gcc and clang, at -O0 and -O3, for the baseline and
# for this machine's own instruction set, and requires that all of them encode the same bytes, those of same_bytes.txt.
# A compiler that is not installed fails the test: it names what to install.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0
sources=$(ls "$root"/src/base/*.c "$root"/src/math/*.c "$root"/src/page/*.c "$root"/src/calibration/*.c "$root"/src/codec/*.c "$root"/src/codec/papers/*.c \
    "$root"/src/blocks/*.c "$root"/src/kernels/*.c)
for compiler in gcc clang; do
    if ! command -v $compiler >/dev/null; then
        echo "same_bytes: $compiler is not installed (apt-get install $compiler)" >&2
        exit 1
    fi
    for flags in "-O0" "-O3" "-O3 -march=native -DKVANT_NATIVE_BASELINE"; do
        # shellcheck disable=SC2086
        $compiler -std=c11 $flags -ffp-contract=off -D_POSIX_C_SOURCE=200809L -I"$root/include" \
            "$root/tests/unit/same_bytes.c" $sources -lm -pthread -o "$work/same_bytes"
        "$work/same_bytes" >"$work/out.txt"
        if cmp -s "$work/out.txt" "$root/tests/unit/same_bytes.txt"; then
            echo "$compiler $flags: same bytes ($(wc -l <"$work/out.txt") hashes)"
        else
            echo "$compiler $flags: different bytes" >&2
            diff "$root/tests/unit/same_bytes.txt" "$work/out.txt" | head -5 >&2
            status=1
        fi
    done
done
exit $status
