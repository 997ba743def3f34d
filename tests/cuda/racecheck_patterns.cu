/* racecheck_patterns.cu - two correct ways to wait that racecheck (CUDA 13.0) reports as hazards.
 * It is for people who run racecheck on kernels of src/cuda/tiles and src/cuda/any.
 *
 *     nvcc -std=c++17 -arch=sm_90 racecheck_patterns.cu &&
 *         compute-sanitizer --tool racecheck ./a.out PATTERN
 *
 *     PATTERN     what waits                                              hazards on an H200
 *     one_lane    a warp, for a second warp: one lane arrives after __syncwarp             4
 *     all_lanes   the same, all lanes arrive                                               0
 *     unequal     all threads, after teams of 2 warps had 4, 5, 6 and 7 rounds             1
 *     equal       the same, 4 rounds each                                                  0
 *     no_teams    as unequal, without barriers of teams                                    0 */
#include <cstdint>
#include <cstdio>
#include <cstring>

__device__ static uint32_t address_of(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static void barrier_wait(uint64_t &barrier, int phase)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(address_of(&barrier)),
                 "r"(phase & 1)
                 : "memory");
}

template <int LANES> __device__ static void arrive_at(uint64_t &barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 < LANES)
        asm volatile(
            "{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(address_of(&barrier))
            : "memory");
}

/* One warp writes numbers that a second warp reads, four times. */
template <int LANES> __global__ void arrivals(float *out)
{
    __shared__ float numbers[32];
    __shared__ uint64_t full, empty;
    const int lane = threadIdx.x % 32;
    float sum = 0;
    if (threadIdx.x == 0)
        for (uint64_t *barrier : { &full, &empty })
            asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(LANES)
                         : "memory");
    __syncthreads();
    for (int round = 0; round < 4; round++)
        if (threadIdx.x < 32) {
            if (round > 0)
                barrier_wait(empty, round - 1);
            numbers[lane] = (float)(round + lane);
            arrive_at<LANES>(full);
        } else {
            barrier_wait(full, round);
            sum += numbers[31 - lane];
            arrive_at<LANES>(empty);
        }
    out[threadIdx.x] = sum;
}

/* Teams exchange numbers, each team `more` rounds longer than the team before it; then all threads
 * do. */
template <bool TEAMS> __global__ void teams(float *out, int more)
{
    extern __shared__ float numbers[];
    constexpr int TEAM = 64;
    const int team = threadIdx.x / TEAM, own = team * TEAM, n = blockDim.x / TEAM;
    float sum = 0;
    const auto meet = [&] {
        if (TEAMS)
            asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(TEAM) : "memory");
        else
            __syncwarp();
    };
    for (int round = 0; round < 4 + more * team; round++) {
        meet();
        numbers[threadIdx.x] = sum + (float)round;
        meet();
        sum += numbers[TEAMS ? own + (threadIdx.x + 1) % TEAM : threadIdx.x ^ 1];
    }
    numbers[blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    for (int i = 0; i < n; i++)
        sum += numbers[blockDim.x + i * TEAM + threadIdx.x % TEAM];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int argc, char **argv)
{
    const char *pattern = argc > 1 ? argv[1] : "";
    const auto is = [&](const char *name) { return strcmp(pattern, name) == 0; };
    float *out;
    cudaMalloc(&out, 2 * 256 * sizeof *out);
    if (is("one_lane"))
        arrivals<1><<<1, 64>>>(out);
    else if (is("all_lanes"))
        arrivals<32><<<1, 64>>>(out);
    else if (is("unequal") || is("equal"))
        teams<true><<<2, 256, 2 * 256 * sizeof *out>>>(out, is("unequal"));
    else
        teams<false><<<2, 256, 2 * 256 * sizeof *out>>>(out, 1);
    printf("%s: %s\n", pattern, cudaGetErrorString(cudaDeviceSynchronize()));
    cudaFree(out);
}
