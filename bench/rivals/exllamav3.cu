// exllamav3.cu - reads halves, and writes what exllamav3's own cache kernels make of them. They
// quantise the halves and restore them. The kernels come unmodified from its source, the folder
// exllamav3/exllamav3_ext/cache of github.com/turboderp-org/exllamav3 (commit 4f8ad012).
// exllamav3.py writes the input and judges the output.
//
//     nvcc -O2 -arch=sm_90 -I exllamav3/exllamav3_ext/cache bench/rivals/exllamav3.cu -o exllamav3
//     ./exllamav3 BITS < rows.f16 > restored.f16
#include <array>
#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <cuda_fp16.h>
#include <q_cache_kernels.cuh>

static void check(cudaError_t error)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "exllamav3: %s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static std::vector<half> read_all()
{
    std::vector<half> rows(1 << 20);
    size_t n = 0, got;
    while ((got = fread(rows.data() + n, sizeof(half), rows.size() - n, stdin)) > 0)
        if ((n += got) == rows.size())
            rows.resize(2 * n);
    rows.resize(n / 32 * 32);
    return rows;
}

int main(int argc, char **argv)
{
    const int bits = argc == 2 ? atoi(argv[1]) : 0;
    if (bits < 2 || bits > 8) {
        fprintf(stderr, "usage: exllamav3 BITS < rows.f16 > restored.f16 (2 to 8 bits)\n");
        return 2;
    }
    std::vector<half> rows = read_all();
    const int groups = (int)(rows.size() / 32), each = 4 * MAX_WARPS;
    const int blocks = (groups + each - 1) / each;
    half *in, *scales;
    uint32_t *codes;
    check(cudaMalloc(&in, rows.size() * sizeof(half)));
    check(cudaMalloc(&codes, (size_t)groups * bits * sizeof(uint32_t)));
    check(cudaMalloc(&scales, groups * sizeof(half)));
    check(cudaMemcpy(in, rows.data(), rows.size() * sizeof(half), cudaMemcpyHostToDevice));
    quant_cache_cont_kernel_instances[bits - 2]<<<blocks, MAX_WARPS * 32>>>(in, codes, scales,
                                                                            groups, 0.0f);
    check(cudaMemset(in, 0, rows.size() * sizeof(half)));
    dequant_cache_cont_kernel_instances[bits - 2]<<<blocks, MAX_WARPS * 32>>>(codes, scales, in,
                                                                              groups, 0.0f);
    check(cudaGetLastError());
    check(cudaMemcpy(rows.data(), in, rows.size() * sizeof(half), cudaMemcpyDeviceToHost));
    return fwrite(rows.data(), sizeof(half), rows.size(), stdout) == rows.size() ? 0 : 1;
}
