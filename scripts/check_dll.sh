#!/bin/sh
# check_dll.sh FOLDER FILE...: the programs and libraries for Windows need KERNEL32 and the
# universal C runtime only, which every Windows 10 has. Each DLL exports the functions of its
# version script and nothing else. No file names a folder of this machine. The folder has these
# other files.
set -eu
[ $# -ge 1 ] || { echo "usage: scripts/check_dll.sh FOLDER FILE..." >&2; exit 2; }
folder=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
fail() {
    echo "check_dll: $1" >&2
    exit 1
}
for file in bin/kvant.exe bin/libkvant.dll lib/ggml-kvant.dll "$@"; do
    [ -e "$folder/$file" ] || fail "$file is missing"
done
for file in bin/kvant.exe bin/libkvant.dll lib/ggml-kvant.dll; do
    others=$(objdump -p "$folder/$file" | sed -n 's/.*DLL Name: //p' |
        grep -vixE 'KERNEL32\.dll|api-ms-win-crt-[a-z]+-l1-1-0\.dll' || true)
    [ -z "$others" ] || fail "$file needs $others"
done
exports() { # file
    objdump -p "$1" |
        sed -n '/Name Pointer\] Table/,/^$/s/^.*\] .*\<\([a-z][a-z0-9_]*\)$/\1/p' | sort
}
globals() { # version script
    sed -nE 's/^ +(global: )?([a-z][a-z0-9_]*);$/\2/p' "$1" | sort
}
for pair in bin/libkvant.dll:src/libkvant.map \
    lib/ggml-kvant.dll:integrations/llama.cpp/libggml-kvant.map; do
    exports "$folder/${pair%%:*}" >"$folder.exports"
    globals "$root/${pair#*:}" | diff - "$folder.exports" >&2 ||
        fail "${pair%%:*} exports other functions than ${pair#*:} names"
    rm -f "$folder.exports"
done
if grep -rlF -e "$root" -e "${HOME:-/root}/" "$folder"; then
    fail "these files name a folder of this machine"
fi
echo "$(basename "$folder"): KERNEL32 and the universal C runtime, exports as the version scripts"
