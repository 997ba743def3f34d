#!/bin/sh
# symbols.sh LIBKVANT.A LIBKVANT.SO: every global symbol of the static library begins with kvant_,
# because a program that links it may have functions of any other name. The public headers,
# src/libkvant.map and the shared library have the same functions, each under the same version:
# KVANT_UNSTABLE if the first line of its header says "unstable", otherwise a release.
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

# "name stable" or "name unstable", a line for each function.
# KVANT_API type name(: a declaration may take several lines.
for header in "$root"/include/kvant/*.h; do
    kind=stable
    ! head -n 1 "$header" | grep -q ' - unstable: ' || kind=unstable
    tr '\n' ' ' <"$header" | grep -oE 'KVANT_API [^;(]*\(' | grep -v __attribute__ |
        sed -E "s/.*[ *]([a-z0-9_]+)\($/\1 $kind/" || true
done | sort -u >"$work/declared"
awk '/^KVANT_/ { kind = $1 == "KVANT_UNSTABLE" ? "unstable" : "stable" }
     /^ +kvant_[a-z0-9_]+;$/ { sub(/;/, ""); print $1, kind }' "$root/src/libkvant.map" |
    sort >"$work/named" # a function that is named twice differs from the headers
nm -D --defined-only "$shared" | awk 'NF == 3 && $2 != "A" { print $3 }' |
    sed 's/@@KVANT_UNSTABLE$/ unstable/; s/@@KVANT_[0-9.]*$/ stable/' | sort -u >"$work/exported"

if ! diff "$work/declared" "$work/named"; then
    echo "symbols: the headers declare what < says, src/libkvant.map names what > says" >&2
    status=1
fi
if ! diff "$work/declared" "$work/exported"; then
    echo "symbols: the headers declare what < says, $shared exports what > says" >&2
    status=1
fi
echo "$(wc -l <"$work/static") globals, $(grep -c ' stable$' "$work/exported") stable and" \
    "$(grep -c ' unstable$' "$work/exported") unstable functions"
exit $status
