#!/bin/sh
# Compilers for big-endian machines must refuse the library and say why; its first header does.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
check() {
    clang --target="$1" -ffreestanding -fsyntax-only -x c "$root/src/base/attributes.h" 2>&1
}
if ! check aarch64-linux-gnu; then
    echo "big_endian: a little-endian machine was refused" >&2
    exit 1
fi
if output=$(check aarch64_be-linux-gnu); then
    echo "big_endian: a big-endian machine was not refused" >&2
    exit 1
fi
echo "$output" | grep -q "little-endian machines" || {
    echo "big_endian: refused for another reason: $output" >&2
    exit 1
}
