#!/bin/sh
# run_device.sh - builds the CUDA tests on a machine with a GPU, runs them, and prints a line per
# test.
#
#     tests/cuda/run_device.sh [TEST...]
#
# By default it runs the tests of PAIRS and DIMS below. test_cuda_codec, test_calibrated,
# test_calibrated_attention, test_cuda_attention, test_problems and test_calls need PAIRS=ALL and
# every head_dim, which takes 10 minutes or more. For bench_cuda_cache it shows the output.
#
# It takes 2 to 4 minutes with 16 cores, most of it for kernels of attention, and needs no network.
# Environment:
#
#     BUILD        build folder, default build-device
#     PAIRS, DIMS  pairs of codes (attention_pairs.h; ALL) and values of head_dim that get kernels
#     ARCH         default 90-real
#     WRAP         a command before each test, such as "compute-sanitizer --error-exitcode 1"
#     CMOCKA       a folder with cmocka.h, cmocka_*.h and libcmocka.so*, if cmocka is not installed
#
# The exit status is the number of tests that failed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build-device}
groups="Uniform2Tokens32_Uniform2Channels32;Uniform3Channels32_Uniform3Tokens32"
groups="$groups;Uniform3Channels32_Uniform2Tokens32"
trellises="Trellis4_Trellis4;Trellis3_Trellis3;Codebook6_Trellis4"
pairs=${PAIRS:-Codebook4_Codebook4;Uniform4_Uniform4;Codebook4_Uniform4;$trellises;$groups}
dims=${DIMS:-64;128}
[ $# -gt 0 ] || set -- test_cuda_cache test_append test_open test_marks example_cuda_cache
mkdir -p "$build"

# pkg-config and cmocka may be missing on a machine with CUDA.
if [ -n "${CMOCKA:-}" ]; then
    mkdir -p "$build/cmocka"
    cp "$CMOCKA"/cmocka*.h "$CMOCKA"/libcmocka.so* "$build/cmocka/"
    cd "$build/cmocka"
    [ -e libcmocka.so ] || ln -s "$(ls libcmocka.so.* | head -n 1)" libcmocka.so
    [ -e libcmocka.so.0 ] || ln -s libcmocka.so libcmocka.so.0
    cat > pkg-config <<EOF
#!/bin/sh
case "\$*" in
*--version*) echo 1.8.0 ;;
*--modversion*) echo 1.1.7 ;;
*cmocka*) case "\$*" in
    *--cflags-only-other* | *--libs-only-other* | *--exists*) ;;
    *--cflags*) echo "-I$build/cmocka" ;;
    *--libs-only-L*) echo "-L$build/cmocka" ;;
    *--libs-only-l*) echo "-lcmocka" ;;
    *--libs*) echo "-L$build/cmocka -lcmocka" ;;
    esac ;;
*) exit 1 ;;
esac
EOF
    chmod +x pkg-config
    export LD_LIBRARY_PATH="$build/cmocka${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    pkg="-DPKG_CONFIG_EXECUTABLE=$build/cmocka/pkg-config"
fi

start=$(date +%s)
command -v ninja > /dev/null && generator="-G Ninja" || generator=
# shellcheck disable=SC2086
cmake -S "$root" -B "$build" $generator ${pkg:-} -DCMAKE_BUILD_TYPE=Release \
    -DKVANT_CUDA=ON -DKVANT_BUILD_TESTS=ON -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF \
    -DKVANT_BUILD_PLUGIN=OFF -DKVANT_BUILD_TOOLS=OFF "-DCMAKE_CUDA_ARCHITECTURES=${ARCH:-90-real}" \
    "-DKVANT_CUDA_PAIRS=$pairs" "-DKVANT_CUDA_HEAD_DIMS=$dims" > "$build/configure.log" 2>&1 ||
    { tail -n 30 "$build/configure.log"; exit 99; }
cmake --build "$build" -j "$(nproc)" --target kvant_cuda "$@" > "$build/build.log" 2>&1 ||
    { grep -E -A 5 'error|FAILED' "$build/build.log" | head -n 60; exit 98; }
echo "built in $(($(date +%s) - start)) s"

KVANT_CUDA_LIBRARY=$(find "$build" -name libkvant_cuda.so | head -n 1)
export KVANT_CUDA_LIBRARY
cd "$build"
# The tests run at once, because most of their time is the CPU's. Benchmarks run alone, afterwards.
run_one() { # test
    begin=$(date +%s)
    status=0
    # shellcheck disable=SC2086
    ${WRAP:-} "$(find "$build" -type f -name "$1" -perm -u+x | head -n 1)" \
        > "$1.log" 2>&1 || status=$?
    echo "status=$status seconds=$(($(date +%s) - begin))" > "$1.status"
}
for test in "$@"; do
    case $test in bench_*) ;; *) run_one "$test" & ;; esac
done
wait
failed=0
for test in "$@"; do
    case $test in bench_*) run_one "$test" ;; esac
    . "./$test.status"
    case $test in bench_*) cat "$test.log" ;; esac
    case $status in
    0)
        worst=$(grep -E 'error / bound' "$test.log" | sed 's/.*bound //' | sort -n | tail -n 1 |
            sed 's/^/error at most /;s/$/ of its bound/')
        echo "passed   $test ($seconds s): $(grep -c '       OK' "$test.log" || true) cases, $worst"
        ;;
    77) echo "skipped  $test: $(tail -n 1 "$test.log")" ;;
    *)
        failed=$((failed + 1))
        echo "FAILED   $test ($seconds s, status $status)"
        grep -E -B 1 -A 3 'ERROR|=====|Error|error:' "$test.log" | head -n 30
        ;;
    esac
done
exit $failed
