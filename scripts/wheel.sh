#!/bin/sh
# wheel.sh BUILD HEADERS PLOT ZIG MACHINE: BUILD/kvant-VERSION-py3-none-manylinux_2_28_MACHINE.whl,
# for any Linux on x86_64 or aarch64 with glibc 2.28 or newer. MACHINE may be windows-x86_64 or
# macos-aarch64, too. Without a GPU's library, which nvcc links with the C++ library of its own
# machine: KVANT_CUDA=ON pip wheel . makes a wheel that has it, for one machine.
set -eu
[ $# = 5 ] || { echo "usage: scripts/wheel.sh BUILD HEADERS PLOT ZIG MACHINE" >&2; exit 2; }
headers=$2 plot=$3 zig=$4 machine=$5
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/zig_tools.sh"
mkdir -p "$1"
build=$(cd "$1" && pwd)
zig_tools "$build"

export CC="$objects/tools/cc" KVANT_CUDA=OFF
export KVANT_LLAMA_SRC="$headers" KVANT_PLOT_LIB="$plot" \
    CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(nproc)}"
export CMAKE_ARGS="'-DCMAKE_AR=$objects/tools/ar' '-DCMAKE_RANLIB=$objects/tools/ranlib' $cross"
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH
rm -f "$build"/*.whl
"${PYTHON:-python3}" -m pip wheel "$root" --no-deps --wheel-dir "$build" \
    --disable-pip-version-check \
    -C build-dir="$objects" -C install.strip=false \
    -C wheel.tags="py3-none-$tag"
case $machine in
    "$(uname -m)") "$root/scripts/check_wheel.sh" "$build"/kvant-*.whl $GLIBC ;;
    aarch64) echo "not checked: make test-arm64 runs this wheel under qemu" ;;
    windows-*)
        rm -rf "$build/unpacked"
        "${PYTHON:-python3}" -m zipfile -e "$build"/kvant-*.whl "$build/unpacked"
        "$root/scripts/check_dll.sh" "$build/unpacked/kvant" py.typed
        ;;
    *) echo "not run: nothing here runs programs for $system" ;;
esac
ls "$build"/kvant-*.whl
