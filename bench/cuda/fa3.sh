#!/bin/sh
# fa3.sh - builds libfa3_bench.so, FlashAttention-3 as a baseline of bench_attention.py (--fa3).
#
#     bench/cuda/fa3.sh FOLDER
#
# Takes the sources of FlashAttention-3 and CUTLASS (both BSD-3-Clause) at pinned commits from
# GitHub into FOLDER/flash-attention and FOLDER/cutlass, or uses what is there, and writes
# FOLDER/libfa3_bench.so. Needs git and nvcc 12.8 or later; minutes of one core. Runs on sm_90 only.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
flash=0251105a2fb19d2957484b7f023cd8c115286ced
cutlass=7127592069c2fe01b041e174ba4345ef9b279671 # as flash-attention pins it

fail() {
    echo "fa3.sh: $*" >&2
    exit 1
}

take() { # name, address, commit
    [ -d "$folder/$1" ] && return
    git init -q "$folder/$1.part" &&
        git -C "$folder/$1.part" fetch -q --depth 1 "$2" "$3" &&
        git -C "$folder/$1.part" checkout -q FETCH_HEAD || fail "$2 at $3 could not be fetched"
    mv "$folder/$1.part" "$folder/$1"
}

[ $# -eq 1 ] || fail "usage: bench/cuda/fa3.sh FOLDER"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || fail "nvcc is not there"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
take flash-attention https://github.com/Dao-AILab/flash-attention $flash
take cutlass https://github.com/NVIDIA/cutlass $cutlass
# The flags of hopper/setup.py.
"$nvcc" -gencode=arch=compute_90a,code=sm_90a -O3 -std=c++17 \
    --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda \
    -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 \
    -DCUTLASS_DEBUG_TRACE_LEVEL=0 -DNDEBUG \
    -DFLASHATTENTION_DISABLE_SM8x -I"$folder/flash-attention/hopper" -I"$folder/cutlass/include" \
    -Xcompiler -fPIC -shared \
    "$root/bench/cuda/fa3_bench.cu" -o "$folder/libfa3_bench.so" > "$folder/build.log" 2>&1 ||
    fail "it did not compile: $(
        grep -m 1 -i error "$folder/build.log" || tail -n 1 "$folder/build.log"
    )"
echo "$folder/libfa3_bench.so"
