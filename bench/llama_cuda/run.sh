#!/bin/bash
# Compares and measures the GPU devices of the plug-in in an unmodified llama.cpp with CUDA.
#
#   run.sh PACK SOURCE.tar.xz OUT [same] [depth] [bench]      default: all
#
# `same` compares answers (compare.c), `depth` measures decoding at depths that are not computed
# (depth.c), and `bench` is llama-bench.
#
# build.sh has packed PACK.tar.xz.00, ... from SOURCE, whose headers are needed. LC is the working
# folder (/tmp/lc). BUILD: a build of kvant with ggml-kvant and kvant_cuda; without it a build is
# made in LC. SPECS: the caches that `same` compares, "preset:NAME" or a spec. RUNS: the caches that
# `depth` and `bench` measure, as CACHE@DEPTHS, where CACHE is a spec, "preset:NAME",
# "stock:CACHE_TYPE" or "accel:CACHE_TYPE".
set -u
pack=$1 source=$2 out=$3
shift 3
what=" ${*:-same depth bench} "
LC=${LC:-/tmp/lc} REPS=${REPS:-1}
SPECS=${SPECS:-"int-8 turboquant-4 preset:balanced"}
depths=0,32768,131072
runs="turboquant-4@$depths preset:balanced@$depths stock:f16@$depths stock:q8_0@$depths"
RUNS=${RUNS:-$runs}
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
. "$here/libraries.sh"
mkdir -p "$LC" "$out"
[ -d "$LC/bin" ] || cat "$pack".tar.xz.* | tar xJ -C "$LC"
[ -d "$LC/llama" ] || tar xJf "$source" -C "$LC"
[ -d "$LC/libs" ] || find_toolkit "$LC/libs"
nvcc=${CUDACXX:-$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc 2>/dev/null | head -1)}
export LD_LIBRARY_PATH=$LC/bin:$LC/libs:${LD_LIBRARY_PATH:-}

begun=$SECONDS
generator=Ninja
command -v ninja >/dev/null || generator="Unix Makefiles"
[ -n "${BUILD:-}" ] || {
    BUILD=$LC/kvant
    cmake -S "$root" -B "$BUILD" -G "$generator" -DCMAKE_BUILD_TYPE=Release -DKVANT_CUDA=ON \
        -DCMAKE_CUDA_COMPILER="$nvcc" \
        -DCMAKE_CUDA_ARCHITECTURES=90-real -DKVANT_BUILD_TESTS=OFF -DKVANT_BUILD_TOOLS=OFF \
        -DKVANT_CUDA_PAIRS="Trellis4_Trellis4;Codebook4_Codebook4;Uniform4_Uniform4" \
        -DKVANT_CUDA_HEAD_DIMS="${DIMS:-64;128}" \
        >"$LC/kvant.log" 2>&1 &&
        cmake --build "$BUILD" -j "$(nproc)" --target ggml-kvant kvant_cuda >>"$LC/kvant.log" \
            2>&1 ||
        { tail -30 "$LC/kvant.log"; exit 1; }
}
echo "kvant built in $((SECONDS - begun)) s"
export GGML_BACKEND_PATH=$(find "$BUILD" -name libggml-kvant.so)
export KVANT_CUDA_LIBRARY=$(find "$BUILD" -name libkvant_cuda.so)
"$LC/bin/llama-bench" --list-devices 2>&1 | tail -4

setting() { # preset:NAME or a spec, as variables
    case $1 in
    preset:*) echo "KVANT_PRESET=${1#preset:}" ;;
    *) echo "KVANT_K=$1 KVANT_V=$1" ;;
    esac
}

same() {
    local spec
    compile compare || return
    [ -f "$LC/small.gguf" ] || python3 "$here/random_gguf.py" "$LC/small.gguf" layers=6 embd=1024 \
        ff=2816 heads=8 kv=2 ctx=4096
    run() { # name, device, cache type, variables
        local name=$1 device=$2 type=$3
        shift 3
        env "$@" timeout 40 "$LC/compare" "$LC/bin" "$LC/small.gguf" "$device" "$out/$name.logits" \
            "$type" >"$out/$name.txt" 2>"$out/$name.err"
        code=$?
        said=$(grep -h '^kvant' "$out/$name.err" | grep -v quantis | tail -3 | cut -c1-230)
        echo "$name rc $code $said"
    }
    run stock CUDA0 f16 X=0
    run stock_q8_0 CUDA0 q8_0 X=0
    run stock_q4_0 CUDA0 q4_0 X=0
    for spec in $SPECS; do
        name=${spec#preset:}
        run "gpu_$name" KVANT0 f16 KVANT_VERBOSE=1 $(setting "$spec")
        run "parts_$name" KVANT0 f16 KVANT_VERBOSE=1 KVANT_GRAPH=0 $(setting "$spec")
        run "cpu_$name" KVANT f16 CUDA_VISIBLE_DEVICES= KVANT_GPU=0 $(setting "$spec")
    done
    python3 "$here/compare.py" 32000 "$out/stock.logits" "$out"/stock_q*.logits "$out"/*_*.logits
    for spec in $SPECS; do
        name=${spec#preset:}
        echo "GPU against CPU plug-in:"
        python3 "$here/compare.py" 32000 "$out/cpu_$name.logits" "$out/gpu_$name.logits"
        cmp -s "$out/gpu_$name.txt" "$out/parts_$name.txt" && echo "graph = parts: text equal" ||
            echo "graph and parts DIFFER"
    done
    rm -f "$out"/*.logits
}

compile() { # NAME: a program of this folder, against the built llama.cpp
    gcc -O2 -o "$LC/$1" "$here/$1.c" -I"$LC/llama/include" -I"$LC/llama/ggml/include" -L"$LC/bin" \
        -lllama -lggml -lggml-base \
        -Wl,--allow-shlib-undefined
}

choose() { # WHAT@DEPTHS: name, device, cache type, depths, variables
    what_run=${1%@*} depths=${1#*@} device=KVANT0 type=f16 variables="KVANT_VERBOSE=1"
    name=${what_run##*:}
    case $what_run in
    stock:*) device=CUDA0 type=$name ;;
    accel:*) type=$name variables="$variables KVANT_ACCEL=1" name=accel_$name ;;
    *) variables="$variables $(setting "$what_run")" ;;
    esac
}

need_big() {
    while [ -f "$LC/big.part" ]; do sleep 1; done # written by somebody else
    [ -f "$LC/big.gguf" ] || python3 "$here/random_gguf.py" "$LC/big.gguf"
}

depth() {
    local run
    compile depth || return
    need_big
    for run in $RUNS; do
        choose "$run"
        printf '%-18s' "$name"
        env $variables timeout "${LIMIT:-80}" "$LC/depth" "$LC/bin" "$LC/big.gguf" "$device" \
            "$type" ${depths//,/ } 2>"$out/depth_$name.err" |
            tee "$out/depth_$name.txt"
        grep -h 'depth\|^pp\|^kvant' "$out/depth_$name.err" | grep -v 'cache_\|buffer\|_op' |
            tail -7 | cut -c1-150
        echo "after $SECONDS s"
    done
}

measure() { # WHAT@DEPTHS
    choose "$1"
    env $variables timeout 120 "$LC/bin/llama-bench" -m "$LC/big.gguf" \
        -ngl 99 -fa on -dev "$device" -ctk "$type" -ctv "$type" \
        -p "${PP:-0}" -n 64 -d "$depths" -r "$REPS" \
        -o jsonl >"$out/bench_$name-${depths##*,}.jsonl" 2>"$out/bench_$name-${depths##*,}.err" \
        </dev/null
    python3 - "$name" "$out/bench_$name-${depths##*,}.jsonl" <<'PY'
import json, sys
cells = []
for line in open(sys.argv[2]):
    if line.startswith("{"):
        r = json.loads(line)
        what = f"{'pp' if r['n_prompt'] else 'tg'}{r['n_prompt'] or r['n_gen']}"
        cells.append(f"{what}@{r['n_depth']} {r['avg_ts']:.1f}")
print(f"{sys.argv[1]:18s}", "  ".join(cells) or "FAILED")
PY
    grep -h '^kvant' "$out/bench_$name-${depths##*,}.err" | grep -v 'cache_\|buffer' | tail -3 |
        cut -c1-200
    [ -s "$out/bench_$name-${depths##*,}.jsonl" ] || tail -3 "$out/bench_$name-${depths##*,}.err"
}

bench() {
    local run
    need_big
    for run in $RUNS; do
        measure "$run"
        echo "after $SECONDS s"
    done
}

case $what in *" same "*) same ;; esac
case $what in *" depth "*) depth ;; esac
case $what in *" bench "*) bench ;; esac
