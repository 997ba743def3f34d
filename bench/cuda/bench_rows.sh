#!/bin/sh
# bench_rows.sh - times attention of many query rows (bench_rows.c) and runs the sanitizers on the
# tile kernels.
#
#     bench/cuda/bench_rows.sh [times] [tests] [racecheck] [synccheck] [memcheck] [initcheck] [ncu]
#
# The default is: times tests.
#
# Environment: BUILD, a build folder (default build-device) whose libkvant_cuda.so and tests are
# used if they are there; otherwise they are made there. PAIRS, DIMS, ARCH, CMOCKA: as for
# tests/cuda/run_device.sh.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$root/build-device}
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
[ -d "$cuda/lib64" ] || cuda=/usr/local/cuda
export PATH="$cuda/bin:$PATH"
if [ -z "$(find "$build" -name test_problems -type f 2> /dev/null)" ]; then
    pairs="Uniform4_Uniform4;Codebook4_Codebook4;Octopus4_Octopus4;Trellis4_Trellis4"
    export PAIRS="${PAIRS:-$pairs}" DIMS="${DIMS:-128}"
    BUILD=$build "$root/tests/cuda/run_device.sh" example_cuda_cache || exit 1
    cmake --build "$build" -j "$(nproc)" --target test_problems > "$build/build2.log" 2>&1 ||
        { tail -n 20 "$build/build2.log"; exit 1; }
fi
KVANT_CUDA_LIBRARY=$(find "$build" -name 'libkvant_cuda.so' | head -n 1)
export KVANT_CUDA_LIBRARY
if [ ! -x "$build/bench_rows" ]; then
    gcc -O2 -std=c11 -D_DEFAULT_SOURCE -I"$root/include" -I"$cuda/include" \
        "$root/bench/cuda/bench_rows.c" -o "$build/bench_rows" \
        "$(find "$build" -name 'libkvant.a' | head -n 1)" -L"$cuda/lib64" \
        -lcudart_static -lm -ldl -lrt -lpthread || exit 1
fi
export LD_LIBRARY_PATH="$build/cmocka:${LD_LIBRARY_PATH:-}"
rows=$build/bench_rows
tests=$(find "$build" -name test_problems -type f | head -n 1)
[ $# -gt 0 ] || set -- times tests
failed=0
for what in "$@"; do
    begin=$(date +%s)
    case $what in
    times)
        "$rows" 1,32,8,128,32768,2048
        for tokens in 1 4 16; do "$rows" 8,32,8,128,32768,$tokens; done
        "$rows" 1,16,4,64,32768,2048 int-4 turboquant-4
        "$rows" 1,16,4,256,32768,1024 int-4 turboquant-4 ;;
    tests)
        for test in test_tiles test_prefill; do
            "$tests" $test > "$build/$test.log" 2>&1 || failed=1
            grep -E 'FAILED|ERROR|OK \]' "$build/$test.log" | head -n 5
            grep -E 'error / bound' "$build/$test.log" | sed 's/.*bound //' | sort -n | tail -n 1
        done ;;
    racecheck | synccheck | memcheck | initcheck)
        for problem in 1,4,1,128,300,40 2,2,1,64,200,20 1,4,1,128,200,16; do
            echo "$what $problem"
            KVANT_RUNS=1 timeout 200 compute-sanitizer --tool "$what" "$rows" "$problem" \
                ${CODECS:-int-4 octopus-4 trellis-4} 2>&1 |
                grep -vE 'COMPUTE-SANITIZER' |
                    sed 's/void kvant::tile_kernel<(int)/<D /; s/(kvant::TileArgs)//' | head -n 30
        done ;;
    ncu)
        stalls='regex:smsp__average_warps_issue_stalled_.*_per_issue_active'
        elapsed=avg.pct_of_peak_sustained_elapsed active=avg.pct_of_peak_sustained_active
        metrics="gpu__time_duration.sum,smsp__inst_executed.sum,smsp__issue_active.$active"
        metrics="$metrics,l1tex__data_pipe_lsu_wavefronts_mem_shared.$elapsed"
        metrics="$metrics,sm__inst_executed_pipe_tensor.$active,smsp__cycles_elapsed.max"
        metrics="$metrics,lts__t_sectors.$elapsed,sm__pipe_tensor_cycles_active.$active"
        kernels="attention_kernel|codes_kernel|tile_kernel|attend_kernel|unpack_kernel"
        for codec in ${CODECS:-int-4 octopus-4 trellis-4}; do
            echo "ncu $codec"
            KVANT_RUNS=1 timeout 100 ncu -k regex:"${KERNEL:-$kernels}" -c "${COUNT:-2}" \
                --metrics "$metrics,$stalls" "$rows" "${PROBLEM:-1,32,8,128,8192,2048}" \
                $codec 2>&1 |
                grep -E '__|rror|_kernel<' | grep -vE 'max_rate|\.pct .*[0-9]$.*per_issue' |
                    awk '$NF != "0.00" && $NF != "0" { print "   ", $1, $NF }' |
                grep -v '_per_issue_active\.[mp]' |
                    sed 's/smsp__average_warps_issue_stalled_//; s/_per_issue_active.ratio//' |
                    head -n 64
        done ;;
    esac
    echo "[$what: $(($(date +%s) - begin)) s]"
done
exit $failed
