#!/bin/sh
# bare_build.sh portable|native
#
# On a machine with only a C compiler, CMake and make, `cmake -B build && cmake --build build` makes
# the library, the plug-in and the command. One line each says what the command's part for llama.cpp
# and the tests need. This script imitates such a machine: PATH has only those programs, CMake does
# not search the system's folders, and there is no network where the system allows that.
#
# portable: builds without the kernels of CPU levels, as on a processor that kvant does not know.
# These kernels take two thirds of the build time.
set -eu
kind=$1
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "bare_build: $1" >&2
    exit 1
}

mkdir "$work/bin"
for program in cc cmake make as ld ar ranlib nm sh uname; do
    path=$(command -v $program) || fail "this machine has no $program"
    ln -s "$path" "$work/bin/$program"
done
offline=
if command -v unshare >/dev/null && unshare -rn true 2>/dev/null; then
    offline="unshare -rn"
fi
bare() {
    $offline env -i HOME="$work/home" PATH="$work/bin" "$@"
}

# Builds without optimisation, because the test asks only whether everything builds.
configure() {
    bare cmake -G "Unix Makefiles" -S "$root" -B "$work/build" -DCMAKE_BUILD_TYPE=Debug \
        -DCMAKE_C_FLAGS_DEBUG=-O0 -DCMAKE_FIND_USE_CMAKE_SYSTEM_PATH=OFF "$@" \
        >"$work/configure.log" 2>&1 || {
        cat "$work/configure.log" >&2
        fail "cmake failed"
    }
}
configure
for line in "kvant command: without llama.cpp" "Tests: not built, need " \
    "libkvant_cuda: not built, needs "; do
    grep -q "^-- $line" "$work/configure.log" || fail "cmake did not say \"$line...\""
done
if [ "$kind" = portable ]; then
    rm -r "$work/build"
    configure -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=unknown -DKVANT_BUILD_TESTS=OFF
fi
bare cmake --build "$work/build" -j 2 >"$work/build.log" 2>&1 || {
    tail -20 "$work/build.log" >&2
    fail "building failed"
}
for file in lib/libkvant.a lib/libkvant.so lib/libggml-kvant.so bin/kvant; do
    [ -e "$work/build/$file" ] || fail "$file was not built"
done
"$work/build/bin/kvant" codecs >"$work/codecs" || fail "the command does not list codecs"
[ ! -e "$work/home" ] || fail "something was written into the home folder"

# The installed files are enough for a program outside of this tree.
bare cmake --install "$work/build" --prefix "$work/installed" >"$work/install.log"
cat >"$work/program.c" <<'END'
#include <kvant/kvant.h>
#include <string.h>
int main(void)
{
    return strcmp(kvant_version(), KVANT_VERSION_STRING);
}
END
lib=$(dirname "$(find "$work/installed" -name libkvant.a)")
bare cc -I"$work/installed/include" "$work/program.c" "$lib/libkvant.a" \
    -lm -pthread -o "$work/static"
bare cc -I"$work/installed/include" "$work/program.c" -L"$lib" -Wl,-rpath,"$lib" \
    -lkvant -o "$work/shared"
"$work/static" && "$work/shared" || fail "a program linked with what was installed does not run"
echo "built, installed and used ${offline:+without a network}"
