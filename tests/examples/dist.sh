#!/bin/sh
# dist.sh BUILD check: scripts/check_dist.sh refuses a wrong release. dist.sh BUILD make runs `make
# dist`, and dist.sh BUILD wheel runs `make wheel`, with the compiler that was fetched before. Both
# print "skipped" if there is no such compiler.
set -eu
build=$(cd "${1:?usage: dist.sh BUILD check|make}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "dist: $1" >&2
    exit 1
}

if [ "$2" != check ]; then
    target=$2
    [ "$target" = wheel ] || target=dist
    if ! ls -d "${KVANT_CACHE:-$HOME/.cache/kvant}"/zig-* >/dev/null 2>&1; then
        echo "skipped: scripts/fetch.py zig has not run"
        exit 0
    fi
    make -C "$root" "$target" BUILD="$work" JOBS=2 >"$work/log" 2>&1 || {
        tail -20 "$work/log" >&2
        fail "make $target"
    }
    tail -5 "$work/log"
    exit 0
fi

refused() { # tarball, glibc, words
    if "$root/scripts/check_dist.sh" "$1" "$2" >"$work/out" 2>&1; then
        fail "was accepted, although: $3"
    fi
    grep -q "$3" "$work/out" || { cat "$work/out" >&2; fail "was refused without saying: $3"; }
}
pack() {
    tar -C "$work" -czf "$work/kvant.tar.gz" kvant
}
cmake --install "$build" --prefix "$work/kvant" >"$work/log"
mkdir -p "$work/kvant/share/kvant/plot"
touch "$work/kvant/LICENSE" "$work/kvant/README.txt" "$work/kvant/share/kvant/plot/LICENSE-d3"
pack
refused "$work/kvant.tar.gz" 2.2 "bin/kvant needs glibc 2.*, 2.2 is promised"
echo "$root" >"$work/kvant/README.txt"
pack
refused "$work/kvant.tar.gz" 99.9 "name a folder of this machine: .*README.txt"
rm "$work/kvant/include/kvant/kvant.h"
pack
refused "$work/kvant.tar.gz" 99.9 "include/kvant/kvant.h is missing"
echo "a newer glibc, a folder of this machine and a missing file are refused"
