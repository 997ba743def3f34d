#!/bin/sh
# run.sh BUILD [PACKAGES]: builds the library for 64-bit ARM in folder BUILD and runs it under
# qemu-user. With PACKAGES, the folder of `fetch.py arm64`, it runs the unit tests, too.
#
# It compares every kernel of the NEON levels with portable C (200 cases each, because all cases
# take minutes), and the bytes that codecs write with tests/unit/same_bytes.txt. One emulated
# processor has no dot product, so an instruction of a higher level ends the program. The second
# processor has all instructions.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:?usage: run.sh BUILD [PACKAGES]} packages=${2:-}
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
mkdir -p "$build"
if ! {
    cmake -S "$root" -B "$build" -DCMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64.cmake" \
        -DCMAKE_BUILD_TYPE=Release \
        -DKVANT_CUDA=OFF -DKVANT_BUILD_PLUGIN=OFF -DKVANT_BUILD_TOOLS=OFF -DKVANT_BUILD_TESTS=ON \
        -DKVANT_QEMU_CPU=cortex-a76 -DKVANT_ARM64_PACKAGES="$packages" &&
        cmake --build "$build" -j 2
} >"$build/build.log" 2>&1; then
    cat "$build/build.log" >&2
    exit 1
fi

emulate() { # processor, program, its arguments
    cpu=$1 program=$2
    shift 2
    "$qemu" -L /usr/aarch64-linux-gnu -cpu "$cpu" "$build/bin/$program" "$@"
}

same_bytes() { # processor, level, head_dim
    emulate "$1" same_bytes "$2" "$3" >"$build/same_bytes.$2.$3"
    grep " $3 " "$root/tests/unit/same_bytes.txt" | diff - "$build/same_bytes.$2.$3"
    echo "$1, level $2, head_dim $3: same bytes ($(wc -l <"$build/same_bytes.$2.$3") hashes)"
}

# Two at a time: most machines have two cores, and emulation is slow.
(
    emulate cortex-a53 check_kernels --level neon --cases 200
    same_bytes cortex-a53 neon 40
) &
plain=$!
(
    # The kernels that the level neondot adds to neon.
    emulate max check_kernels --level neondot --kernel code_dots --cases 200
    emulate max check_kernels --level neondot --kernel tile_sums --cases 200
    emulate max check_kernels --level neondot --kernel pack_dots --cases 200
    same_bytes max c 80
    same_bytes max neondot 64
)
newest=$!
status=0
wait "$plain" || status=1
wait "$newest" || status=1
# Emulation is slow, so the unit tests that take more than a second without it are left out. Tests
# that measure processor time are left out, too, and test_parallel: qemu 7.2 fails in a child that
# is forked while other threads run.
slow="([a-z]*_)?allocation|([a-z]*_)?attention|calibration_file|canonical|centers|codec$|encode"
slow="$slow|exact|export|failed_writes|hqmq$|index$|learning_memory|levels|octopus|page|polar"
slow="$slow|position_buckets|problem|random_(sequences|slots)|shift|spec|stack|transfer|turboquant"
if [ -n "$packages" ]; then
    ctest --test-dir "$build" -j 2 --output-on-failure -R '^unit\.test_' \
        -E "^unit\.test_($slow|openmp|host_threads|parallel)" || status=1
fi
exit $status
