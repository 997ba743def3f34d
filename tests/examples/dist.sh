#!/bin/sh
# dist.sh BUILD: scripts/check_dist.sh refuses a tarball that asks for a newer C library, names a
# folder of this machine, or lacks a file.
set -eu
build=$(cd "${1:?usage: dist.sh BUILD}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "dist: $1" >&2
    exit 1
}

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
