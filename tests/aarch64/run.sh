#!/bin/sh
# run.sh BUILD: builds the library for 64-bit ARM in folder BUILD and runs it under qemu-user.
#
# It compares every kernel of the NEON levels with portable C (200 cases each, because all cases
# take minutes), and the bytes that codecs write with tests/unit/same_bytes.txt. One emulated
# processor has no dot product, so an instruction of a higher level ends the program. The second
# processor has all instructions.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${1:?usage: run.sh BUILD}
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static)
mkdir -p "$build"
if ! {
    cmake -S "$root" -B "$build" -DCMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64.cmake" \
        -DCMAKE_BUILD_TYPE=Release \
        -DKVANT_CUDA=OFF -DKVANT_BUILD_PLUGIN=OFF -DKVANT_BUILD_TOOLS=OFF -DKVANT_BUILD_TESTS=ON &&
        cmake --build "$build" -j 2 --target check_kernels same_bytes
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
exit $status
