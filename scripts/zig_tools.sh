# Sourced by dist.sh and wheel.sh: a compiler whose programs run with glibc 2.28 and newer. zig cc
# carries the symbol lists of old C libraries, so nothing newer can be linked by mistake. The
# compiler writes no folder of this machine ($root) into files that others get.
GLIBC=2.28
TARGET=x86_64-linux-gnu.$GLIBC

zig_tool() { # folder, name, words that $zig is called with
    folder=$1 name=$2
    shift 2
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$*" >"$folder/$name"
    chmod +x "$folder/$name"
}

zig_tools() { # folder
    mkdir -p "$1"
    zig_tool "$1" cc cc -target $TARGET -g0 "'-ffile-prefix-map=$root=.'"
    zig_tool "$1" ar ar
    zig_tool "$1" ranlib ranlib
}
