#!/bin/bash
# Mean KLD of presets on the GPU device, compared with llama.cpp's own f16 cache on the same GPU.
#
#   quality.sh BIN MODEL TEXT OUT BUILD...     BIN: llama.cpp's programs; BUILD: builds of kvant
#
# PRESETS: balanced, small and tiny. CTX: 4096 tokens, of which llama-perplexity judges the second
# half. CHUNKS: 3. BATCH: 512. ROWS: tokens that a graph has (BATCH). Prints a line for each build
# and preset. MODEL should have float weights: with others f16 caches differ by .004, too.
set -u
bin=$1 model=$2 text=$3 out=$4
shift 4
PRESETS=${PRESETS:-"balanced small tiny"} CTX=${CTX:-4096} CHUNKS=${CHUNKS:-3}
BATCH=${BATCH:-512} ROWS=${ROWS:-$BATCH}
mkdir -p "$out"
export LD_LIBRARY_PATH=$bin:${LD_LIBRARY_PATH:-} KVANT_VERBOSE=1

perplexity() { # DEVICE LOG, further arguments
    local device=$1 log=$2
    shift 2
    timeout "${LIMIT:-200}" "$bin/llama-perplexity" -m "$model" -f "$text" \
        -ngl 99 -fa on -dev "$device" \
        -c "$CTX" -b "$BATCH" -ub "$ROWS" --chunks "$CHUNKS" "$@" >"$log" 2>&1
}

base=$out/base-$CTX.kld
[ -s "$base" ] || perplexity CUDA0 "$out/base.txt" --save-all-logits "$base" ||
    tail -5 "$out/base.txt"
for build in "$@"; do
    export GGML_BACKEND_PATH KVANT_CUDA_LIBRARY
    GGML_BACKEND_PATH=$(find "$build" -name libggml-kvant.so)
    KVANT_CUDA_LIBRARY=$(find "$build" -name libkvant_cuda.so)
    for preset in $PRESETS; do
        log=$out/$(basename "$build")-$preset.txt
        KVANT_PRESET=$preset perplexity KVANT0 "$log" --kl-divergence --kl-divergence-base "$base"
        printf '%-24s %-9s -c %s -b %s: %s  %s\n' "$(basename "$build")" "$preset" "$CTX" "$BATCH" \
            "$(grep -m1 'Mean *KLD' "$log" || echo FAILED)" \
            "$(grep -m1 '^kvant: KV cache' "$log" | cut -c1-120)"
    done
done
