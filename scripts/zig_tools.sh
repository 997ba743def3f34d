# Sourced by dist.sh and wheel.sh: a compiler for $machine. zig cc carries the headers and the
# symbol lists of every system's C library, so programs for Linux run with glibc 2.28 and newer, and
# nothing newer can be linked by mistake. The compiler writes no folder of this machine ($root) into
# files that others get.
GLIBC=2.28
processor=${machine#*-}
case $machine in
    x86_64) system="x86-64 Linux with glibc $GLIBC or newer" ;;
    aarch64) system="ARM64 Linux with glibc $GLIBC or newer" ;;
    windows-x86_64) system="x86-64 Windows 10 (version 1903) or newer" ;;
    macos-aarch64) system="ARM64 macOS 13 or newer" ;;
    *)
        echo "zig_tools: x86_64, aarch64, windows-x86_64 and macos-aarch64 are built," \
            "not $machine" >&2
        exit 2
        ;;
esac
# What is built: the compiler's name of it, CMake's, the one in names of files, and Python's.
case $machine in
    windows-x86_64)
        target=$processor-windows-gnu cmake_system=Windows place=$machine tag=win_amd64
        ;;
    macos-aarch64)
        target=$processor-macos.13.0 cmake_system=Darwin place=$machine tag=macosx_13_0_arm64
        ;;
    *)
        target=$processor-linux-gnu.$GLIBC cmake_system=Linux place=linux-$processor
        tag=manylinux_$(echo $GLIBC | tr . _)_$processor
        ;;
esac
# The tarball and the wheel are built in one folder of CMake, because compiling takes minutes: the
# library is the same, and only what knows its place is compiled again. Both need the same kind of
# build files.
export CMAKE_GENERATOR="Unix Makefiles"
# CMake's words for a machine that differs from this one.
cross=
[ "$machine" = "$(uname -m)" ] ||
    cross="-DCMAKE_SYSTEM_NAME=$cmake_system -DCMAKE_SYSTEM_PROCESSOR=$processor"
# The linker strips, because this machine's strip knows no files of other machines. For Windows it
# writes symbols to other files (*.pdb), which are not installed.
[ "$cmake_system" = Windows ] || export LDFLAGS=-s

zig_tool() { # folder, name, words that $zig is called with
    folder=$1 name=$2
    shift 2
    printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$*" >"$folder/$name"
    chmod +x "$folder/$name"
}

zig_tools() { # folder of the delivery: sets $objects, the folder of CMake
    objects=$(dirname "$1")/objects-$machine
    set -- "$objects/tools"
    mkdir -p "$1"
    rm -rf "$objects/lib" "$objects/bin" # a library's name is a link in the tarball alone
    # Objects for Windows hold the name of their own file, unless it is given another one.
    name_of_object=
    [ "$cmake_system" != Windows ] || name_of_object="-Xclang -object-file-name=kvant"
    zig_tool "$1" cc cc -target $target -g0 "$name_of_object" "'-ffile-prefix-map=$root=.'"
    zig_tool "$1" ar ar
    zig_tool "$1" ranlib ranlib
}
