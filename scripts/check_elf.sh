#!/bin/sh
# check_elf.sh GLIBC FILE...: no program or library asks for a newer glibc, or for another library.
set -eu
[ $# -ge 2 ] || { echo "usage: scripts/check_elf.sh GLIBC FILE..." >&2; exit 2; }
glibc=$1
shift
fail() {
    echo "check_elf: $1" >&2
    exit 1
}
for file in "$@"; do
    symbols=$(objdump -T "$file" | grep -oE '\(?GLIBC_[0-9.]+\)? .*' | tr -d '()') ||
        fail "$file has no versioned symbols"
    newest=$(echo "$symbols" | cut -d' ' -f1 | sed 's/GLIBC_//' | sort -V | tail -1)
    if [ "$(printf '%s\n%s\n' "$newest" "$glibc" | sort -V | tail -1)" != "$glibc" ]; then
        echo "$symbols" | grep "GLIBC_$newest " | head -3 >&2
        fail "$file needs glibc $newest, $glibc is promised"
    fi
    others=$(objdump -p "$file" | awk '$1 == "NEEDED" { print $2 }' |
        grep -vxE -e '(libc|libm)\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1' \
            -e 'ld-linux-(x86-64\.so\.2|aarch64\.so\.1)' || true)
    [ -z "$others" ] || fail "$file needs $others"
    echo "$(basename "$file"): glibc $newest"
done
