# Sourced by dist.sh and wheel.sh: a compiler whose programs run with glibc 2.28 and newer on
# $machine, x86_64 or aarch64. zig cc carries the symbol lists of old C libraries, so nothing newer
# can be linked by mistake. The compiler writes no folder of this machine ($root) into files that
# others get.
GLIBC=2.28
case $machine in
    x86_64) system="x86-64 Linux" ;;
    aarch64) system="ARM64 Linux" ;;
    *) echo "zig_tools: x86_64 and aarch64 are built, not $machine" >&2; exit 2 ;;
esac
# CMake's words for a machine that differs from this one.
cross=
[ "$machine" = "$(uname -m)" ] ||
    cross="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$machine"
# The linker strips, because this machine's strip knows no files of other machines.
export LDFLAGS=-s

zig_tool() { # folder, name, words that $zig is called with
    folder=$1 name=$2
    shift 2
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$*" >"$folder/$name"
    chmod +x "$folder/$name"
}

zig_tools() { # folder
    mkdir -p "$1"
    zig_tool "$1" cc cc -target $machine-linux-gnu.$GLIBC -g0 "'-ffile-prefix-map=$root=.'"
    zig_tool "$1" ar ar
    zig_tool "$1" ranlib ranlib
}
