#!/bin/sh
# installed.sh BUILD: installs the build, moves the tree, and builds and runs examples/ with it: by
# CMake and by pkg-config, shared and static. No variable tells the loader where the library is.
set -eu
build=$(cd "${1:?usage: installed.sh BUILD}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset LD_LIBRARY_PATH
fail() {
    echo "installed: $1" >&2
    exit 1
}
quiet() { # a command whose output is of interest when it fails
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        fail "failed: $*"
    }
}
names='blocks cache calibrate codec rows search sequences settings slots'
works() {
    "$1/cache" | grep -q '256 tokens: ' || fail "$1/cache"
    "$1/slots" | grep -q 'error 0[.]0' || fail "$1/slots"
}
linked() { # folder, number of programs that load libkvant.so
    found=$(for name in $names; do ldd "$1/$name"; done | grep -c 'libkvant[.]so' || true)
    [ "$found" = "$2" ] || fail "$found of 9 programs in $1 load libkvant.so, expected $2"
}

quiet cmake --install "$build" --prefix "$work/first"
mv "$work/first" "$work/moved"
config=$(find "$work/moved" -name kvant.pc)
PKG_CONFIG_PATH=$(dirname "$config")
export PKG_CONFIG_PATH

for package in kvant kvant-static; do
    mkdir "$work/$package"
    for name in $names; do
        # shellcheck disable=SC2046 # flags are meant to be split
        quiet cc -std=c11 -Wall -Wextra -Werror "$root/examples/$name.c" \
            $(pkg-config --cflags --libs $package) -lm -o "$work/$package/$name"
    done
    works "$work/$package"
done
linked "$work/kvant" 9
linked "$work/kvant-static" 0

for static in OFF ON; do
    quiet cmake -S "$root/examples" -B "$work/cmake-$static" -DCMAKE_PREFIX_PATH="$work/moved" \
        -DKVANT_STATIC=$static
    quiet cmake --build "$work/cmake-$static"
    works "$work/cmake-$static"
done
linked "$work/cmake-OFF" 9
linked "$work/cmake-ON" 0

# kvant as a folder of another project; the test checks that the target exists.
mkdir "$work/parent"
cat >"$work/parent/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(parent LANGUAGES C)
set(KVANT_BUILD_TOOLS OFF)
set(KVANT_BUILD_PLUGIN OFF)
set(KVANT_BUILD_TESTS OFF)
add_subdirectory($root kvant)
add_executable(cache $root/examples/cache.c)
target_link_libraries(cache PRIVATE kvant::kvant)
END
quiet cmake -S "$work/parent" -B "$work/parent/build"

# An error names a component that is missing.
if [ -z "$(find "$work/moved" -name 'libkvant_cuda*')" ]; then
    cat >"$work/parent/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.22)
project(parent LANGUAGES C)
find_package(kvant REQUIRED COMPONENTS cuda)
END
    if cmake -S "$work/parent" -B "$work/parent/cuda" -DCMAKE_PREFIX_PATH="$work/moved" \
        >"$work/log" 2>&1
    then
        fail "find_package found a CUDA library that is not installed"
    fi
    grep -q cuda "$work/log" || fail "find_package does not name the missing component"
fi
echo "examples built with the installed tree by CMake and pkg-config, shared and static"
