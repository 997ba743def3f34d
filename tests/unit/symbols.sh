#!/bin/sh
# symbols.sh LIBKVANT.A LIBKVANT.SO: every global symbol of the static library begins with kvant_, because a program that links it
# may have functions of any other name. The shared library exports exactly the functions that the public headers declare, each with a
# version.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
static=${1:?usage: symbols.sh LIBKVANT.A LIBKVANT.SO}
shared=${2:?usage: symbols.sh LIBKVANT.A LIBKVANT.SO}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
status=0

nm -g --defined-only "$static" | awk 'NF == 3 { print $3 }' | sort -u >"$work/static"
[ -s "$work/static" ] || { echo "symbols: $static has no symbols" >&2; exit 1; }
if grep -vE '^kvant_' "$work/static"; then
    echo "symbols: the above are global in $static and do not begin with kvant_" >&2
    status=1
fi

# KVANT_API type name(: a declaration may take several lines.
for header in "$root"/include/kvant/*.h; do
    tr '\n' ' ' <"$header" | grep -oE 'KVANT_API [^;(]*\(' | grep -v __attribute__ || true
done | sed -E 's/.*[ *]([a-z0-9_]+)\($/\1/' | sort -u >"$work/declared"
nm -D --defined-only "$shared" | awk 'NF == 3 && $2 != "A" { print $3 }' | sort -u >"$work/versioned"
if grep -v '@@KVANT_' "$work/versioned"; then
    echo "symbols: the above have no version in $shared" >&2
    status=1
fi
sed 's/@@.*//' "$work/versioned" | sort -u >"$work/exported"
if ! diff "$work/declared" "$work/exported"; then
    echo "symbols: the headers declare what < says, $shared exports what > says" >&2
    status=1
fi
echo "$(wc -l <"$work/static") globals, $(wc -l <"$work/exported") exported functions"
exit $status
