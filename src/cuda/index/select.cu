/* select.cu - cuts each query's list to its best: a sort in shared memory, by key and then by id. */
#include "index.h"

#include "../../base/attributes.h"
#include "../launch.h"

#include <algorithm>

namespace kvant
{

namespace
{

constexpr int SORTERS = 1024;

/* Keys as whole numbers in the same order; -0 and 0 are equal. */
KVANT_INLINE uint32_t rank_of(float key)
{
    const uint32_t bits = __float_as_uint(__fadd_rn(key, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

KVANT_INLINE float key_of(uint32_t rank)
{
    return __uint_as_float(rank >> 31 ? rank & 0x7fffffffu : ~rank);
}

/* The larger comes first; of slots the smaller. 0 in the low half: no vector. */
KVANT_INLINE uint64_t entry_of(Found found)
{
    return found.slot == NO_VECTOR ? 0 : (uint64_t)rank_of(found.key) << 32 | (NO_VECTOR - found.slot);
}

KVANT_INLINE uint32_t slot_of(uint64_t entry)
{
    return NO_VECTOR - (uint32_t)entry;
}

KVANT_INLINE bool is_before(uint64_t a, uint64_t b, const uint64_t *ids)
{
    if (!ids || a >> 32 != b >> 32 || (uint32_t)a == 0 || (uint32_t)b == 0)
        return a > b;
    return ids[slot_of(a)] < ids[slot_of(b)];
}

__device__ void sort(uint64_t *entries, uint32_t n, const uint64_t *ids)
{
    for (uint32_t run = 2; run <= n; run *= 2)
        for (uint32_t by = run / 2; by > 0; by /= 2) {
            for (uint32_t i = threadIdx.x; i < n / 2; i += SORTERS) {
                const uint32_t low = i / by * 2 * by + i % by, high = low + by;
                const uint64_t a = entries[low], b = entries[high];
                if ((low & run) == 0 ? is_before(b, a, ids) : is_before(a, b, ids)) {
                    entries[low] = b;
                    entries[high] = a;
                }
            }
            __syncthreads();
        }
}

__global__ void __launch_bounds__(SORTERS) select_kernel(const __grid_constant__ ScanArgs args)
{
    extern __shared__ uint64_t entries[];
    __shared__ uint32_t there;
    const uint32_t query = blockIdx.x,
                   count = args.keep_all ? (args.end - args.first) * GROUP_VECTORS : args.counts[query],
                   n = min(count, args.room);
    Found *list = args.lists + (size_t)query * args.room;
    uint32_t size = 2;
    while (size < n)
        size *= 2;
    for (uint32_t i = threadIdx.x; i < size; i += SORTERS)
        entries[i] = i < n ? entry_of(list[i]) : 0;
    if (threadIdx.x == 0)
        there = 0;
    __syncthreads();
    sort(entries, size, args.ids);
    uint32_t found = 0;
    for (uint32_t i = threadIdx.x; i < args.k && i < size; i += SORTERS)
        if ((uint32_t)entries[i] != 0) {
            list[i] = Found{ key_of((uint32_t)(entries[i] >> 32)), slot_of(entries[i]) };
            found++;
        }
    atomicAdd(&there, found);
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    const bool full = there == args.k;
    const uint32_t worst = full ? slot_of(entries[args.k - 1]) : 0;
    args.counts[query] = there;
    args.thresholds[query] = full ? key_of((uint32_t)(entries[args.k - 1] >> 32)) : -INFINITY;
    args.limits[query] = !full ? UINT64_MAX : args.ids ? args.ids[worst] : worst;
    if (count > args.room)
        *args.overflowed = 1;
}

} // namespace

cudaError_t launch_select(const ScanArgs &args, cudaStream_t stream)
{
    const int shared = (int)(std::max(args.room, 2u) * sizeof(uint64_t));
    const cudaError_t error = allow_shared(reinterpret_cast<const void *>(select_kernel), shared);
    if (error != cudaSuccess)
        return error;
    select_kernel<<<args.n_queries, SORTERS, shared, stream>>>(args);
    return cudaGetLastError();
}

} // namespace kvant
