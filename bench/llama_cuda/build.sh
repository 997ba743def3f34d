#!/bin/bash
# Builds an unmodified llama.cpp with CUDA from a source archive and packs what its programs need.
#
#   build.sh SOURCE.tar.xz PACK [SECONDS]     writes PACK.tar.xz.00, .01, ...: parts of 15 MiB;
#                                             the default is at most 540 s
#
# LC: working folder (/tmp/lc). ARCH: 90-real. TARGETS: programs. Exits 3 when time ran out; a
# second call goes on.
set -eu
source=$1 pack=$2 limit=${3:-540}
LC=${LC:-/tmp/lc} ARCH=${ARCH:-90-real}
targets="ggml-cuda ggml-cpu llama-bench llama-batched-bench llama-completion llama-perplexity"
TARGETS=${TARGETS:-"$targets llama-server"}
here=$(cd "$(dirname "$0")" && pwd)
. "$here/libraries.sh"
begun=$SECONDS
mkdir -p "$LC" && [ -f "$LC/llama/CMakeLists.txt" ] || tar xJf "$source" -C "$LC"
find_toolkit "$LC/libs"
export CPATH="$cublas_headers:${CPATH:-}" LIBRARY_PATH="$LC/libs:${LIBRARY_PATH:-}"
generator=Ninja
command -v ninja >/dev/null || generator="Unix Makefiles"

# GGML_BACKEND_DL: back ends are loaded as files, as in releases. No web interface, nothing
# downloaded.
[ -f "$LC/build/CMakeCache.txt" ] || cmake -S "$LC/llama" -B "$LC/build" -G "$generator" \
    -DCMAKE_BUILD_TYPE=Release \
    -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_OPENMP=ON -DGGML_CUDA=ON \
    -DGGML_CUDA_NCCL=OFF \
    -DGGML_CUDA_COMPRESSION_MODE=none -DGGML_CUDA_FA_QUANTS="q4_0-q4_0;q8_0-q8_0;f16-f16" \
    -DCMAKE_CUDA_ARCHITECTURES="$ARCH" -DCMAKE_CUDA_COMPILER="$nvcc" \
    -DCMAKE_CUDA_FLAGS="-I$cublas_headers --threads 1" -DCUDA_CUDART="$LC/libs/libcudart.so" \
    -DCUDA_cublas_LIBRARY="$LC/libs/libcublas.so" \
    -DCUDA_cublasLt_LIBRARY="$LC/libs/libcublasLt.so" \
    -DCUDA_cuda_driver_LIBRARY="$LC/libs/libcuda.so" -DCMAKE_BUILD_RPATH="$LC/libs" \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_SERVER=ON \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_ALL_WARNINGS=OFF \
    -DGGML_ALL_WARNINGS=OFF \
    -DLLAMA_BUILD_COMMIT=b11434 -DLLAMA_BUILD_NUMBER=11434 >"$LC/configure.log" 2>&1 ||
    { tail -30 "$LC/configure.log"; exit 1; }

timeout "$((limit - (SECONDS - begun) - 60))" cmake --build "$LC/build" -j "$(nproc)" \
    --target $TARGETS >"$LC/build.log" 2>&1 || {
    status=$?
    grep -n "error\|FAILED" "$LC/build.log" | head -20
    tail -c 300 "$LC/build.log"
    [ "$status" = 124 ] && exit 3
    exit 1
}
echo "built in $((SECONDS - begun)) s: $(ls "$LC/build/bin" | tr '\n' ' ')"
rm -rf "$LC/bin" && mkdir "$LC/bin"
cp -P "$LC/build/bin"/* "$LC/bin/"
find "$LC/bin" -type f -exec strip --strip-unneeded {} +
du -sh "$LC/bin" && ls -lS "$LC/bin" | head -8
rm -f "$pack".tar.xz.*
tar c -C "$LC" bin | xz -T0 -6 | split -b 15M -d - "$pack.tar.xz."
ls -l "$pack".tar.xz.*
echo "packed after $((SECONDS - begun)) s"
