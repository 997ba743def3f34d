#!/bin/sh
# symbols.sh LIBKVANT_CUDA LIBKVANT_STATIC: the first library holds no copy of the second and
# exports only its table.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nm -D --defined-only "$1" | awk '{ print $3 }' >"$work/exported"
if [ "$(cat "$work/exported")" != kvant_cuda_table_get ]; then
    echo "$1 exports:" >&2
    cat "$work/exported" >&2
    exit 1
fi
nm --defined-only "$1" | awk '{ print $3 }' | sort -u >"$work/defined"
nm --defined-only --extern-only "$2" 2>/dev/null | awk 'NF == 3 { print $3 }' | sort -u \
    >"$work/libkvant"
if ! grep -q '^kvant_cuda_table_' "$work/defined" ||
    ! grep -qx kvant_codec_create "$work/libkvant"; then
    echo "symbols.sh: nm shows too little to judge: is $1 stripped?" >&2
    exit 1
fi
comm -12 "$work/defined" "$work/libkvant" >"$work/both"
nm --undefined-only "$1" | awk '{ print $NF }' | grep '^kvant_' >>"$work/both" || true
if [ -s "$work/both" ]; then
    echo "$1 and libkvant share:" >&2
    cat "$work/both" >&2
    exit 1
fi
echo "one exported symbol, none of $(wc -l <"$work/libkvant") symbols of libkvant"
