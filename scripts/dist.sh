#!/bin/sh
# dist.sh BUILD HEADERS PLOT ZIG MACHINE: BUILD/kvant-VERSION-linux-MACHINE.tar.gz for any Linux on
# x86_64 or aarch64 with glibc 2.28 or newer. MACHINE may be windows-x86_64, which makes a zip file,
# or macos-aarch64.
set -eu
[ $# = 5 ] || { echo "usage: scripts/dist.sh BUILD HEADERS PLOT ZIG MACHINE" >&2; exit 2; }
headers=$2 plot=$3 zig=$4 machine=$5
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/zig_tools.sh"
mkdir -p "$1"
build=$(cd "$1" && pwd)
zig_tools "$build"

# No folder of this machine may be in what others get, so there is no default runtime.
# shellcheck disable=SC2086 # $cross is meant to be split
CC="$objects/tools/cc" cmake -S "$root" -B "$objects" -USKBUILD -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_INSTALL_PREFIX=/usr/local -DCMAKE_INSTALL_LIBDIR=lib \
    -DCMAKE_AR="$objects/tools/ar" -DCMAKE_RANLIB="$objects/tools/ranlib" \
    -DKVANT_LLAMA_SRC="$headers" -DKVANT_PLOT_LIB="$plot" -DKVANT_BUILD_TESTS=OFF -DKVANT_CUDA=OFF \
    $cross
cmake --build "$objects" -j "${JOBS:-$(nproc)}"
# ggml's tables have the same layout on this system as the plug-in declares.
"$objects/tools/cc" -std=c11 -I"$root/include" -I"$root/integrations/llama.cpp" \
    -isystem "$headers/ggml/include" -isystem "$headers/ggml/src" \
    -c "$root/tests/integration/test_abi_layout.c" -o "$build/layout.o"

version=$(sed -n 's/^CMAKE_PROJECT_VERSION:STATIC=//p' "$objects/CMakeCache.txt")
name=kvant-$version-$place
rm -rf "${build:?}/$name" "$build"/kvant-*.tar.gz "$build"/kvant-*.zip
cmake --install "$objects" --prefix "$build/$name" >"$build/install.log"
cp "$root/LICENSE" "$build/$name/"
cp "$root"/scripts/fetch*.py "$build/$name/share/kvant/"
runtime="They need its libraries
once (11 MB, Linux with glibc 2.34):

    export KVANT_RUNTIME=\$(python3 share/kvant/fetch.py runtime)"
case $machine in
    windows-* | macos-*)
        runtime="They need the folder of its
libraries (ggml 0.10 to 0.27, with its back ends as files):

    set KVANT_RUNTIME=FOLDER" ;;
esac
cat >"$build/$name/README.txt" <<END
kvant $version for $system. There is nothing to install: the folder works at any place.

Compress the KV cache of your own llama.cpp (llama-server, llama-cli, llama-bench ...):

    bin/kvant exec -- llama-server -m model.gguf -c 32768

run, eval, bench, calibrate, tune and report drive llama.cpp themselves. $runtime
    bin/kvant run -m model.gguf -p "Why is the sky blue?"
    bin/kvant report -m model.gguf -o report.html --quick

C programs: cmake -DCMAKE_PREFIX_PATH=\$PWD, or PKG_CONFIG_PATH=\$PWD/lib/pkgconfig.
Manual: man share/man/man1/kvant.1
END

# The same input gives the same bytes: names in order, no times and owners.
if [ "$cmake_system" = Windows ]; then
    (cd "$build" && "${PYTHON:-python3}" "$root/scripts/pack_zip.py" "$name")
    "$root/scripts/check_dll.sh" "$build/$name" lib/libkvant.dll.a lib/libkvant.a \
        include/kvant/kvant.h LICENSE README.txt
    echo "$build/$name.zip"
    exit 0
fi
epoch=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)}
tar -C "$build" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner -cf - "$name" |
    gzip -9n >"$build/$name.tar.gz"
if [ "$cmake_system" = Linux ]; then
    "$root/scripts/check_dist.sh" "$build/$name.tar.gz" $GLIBC
else
    echo "not run: nothing here runs programs for $system"
fi
echo "$build/$name.tar.gz"
