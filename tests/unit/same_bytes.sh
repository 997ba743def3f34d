#!/bin/sh
# The bytes that codecs write must have the hashes in same_bytes.txt.
#
#     same_bytes.sh levels PROGRAM   runs a built program at every CPU level of this machine
#     same_bytes.sh compilers        builds the library straight from its sources by gcc and clang,
#                                    at -O0 and -O3, for the baseline and for this machine
#
# A compiler that is not installed fails the test, which then names the package to install.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

same() { # what it is, file of hashes
    if [ "${KVANT_PAPERS:-1}" = 0 ] && [ -s "$2" ] &&
        ! grep -qvxFf "$root/tests/unit/same_bytes.txt" "$2"; then
        echo "$1: same bytes of the families that were built ($(wc -l <"$2") hashes)"
    elif cmp -s "$2" "$root/tests/unit/same_bytes.txt"; then
        echo "$1: same bytes ($(wc -l <"$2") hashes)"
    else
        echo "$1: different bytes" >&2
        diff "$root/tests/unit/same_bytes.txt" "$2" | head -5 >&2
        status=1
    fi
}

levels() { # program
    case $(uname -m) in
        x86_64) names="c avx2 avx2vnni avx512 avx512vnni avx512vbmi" ;;
        *) names="c neon neondot" ;;
    esac
    for level in $names; do
        rc=0
        "$1" $level >"$work/out.txt" 2>"$work/err.txt" || rc=$?
        if [ $rc = 2 ]; then
            echo "skipped: CPU level $level, which this machine or this build lacks"
        elif [ $rc = 0 ]; then
            same "level $level" "$work/out.txt"
        else
            cat "$work/err.txt" >&2
            status=1
        fi
    done
}

build() { # compiler, flags
    command -v "$1" >/dev/null || {
        echo "same_bytes: $1 is not installed (apt-get install $1)" >&2
        exit 1
    }
    rm -f "$work"/*.o
    # shellcheck disable=SC2086
    (cd "$work" && printf '%s\n' $sources | xargs -P 2 -n 8 "$1" -std=c11 $2 -ffp-contract=off \
        -D_POSIX_C_SOURCE=200809L -I"$root/include" -c && "$1" ./*.o -lm -pthread -o same_bytes)
    "$work/same_bytes" >"$work/out.txt"
    same "$1 $2" "$work/out.txt"
}

sources="$root/tests/unit/same_bytes.c $(find "$root"/src/base "$root"/src/math "$root"/src/page \
    "$root"/src/calibration "$root"/src/codec "$root"/src/blocks "$root"/src/kernels \
    \( -name x86 -o -name arm \) -prune -o -name '*.c' -print)"
case "${1:-} ${2:-}" in
    "levels "*) levels "$2" ;;
    "compilers ")
        for compiler in gcc clang; do
            for flags in "-O0" "-O3" "-O3 -march=native -DKVANT_NATIVE_BASELINE"; do
                build $compiler "$flags"
            done
        done
        ;;
    *)
        echo "usage: same_bytes.sh levels PROGRAM | compilers" >&2
        exit 2
        ;;
esac
exit $status
