/* select.cu - cuts each query's list to its best vectors: finds the k-th key by counting, and sorts
 * the vectors that reach it by key and then by id. */
#include "index.h"

#include "../../base/attributes.h"
#include "../launch.h"

namespace kvant
{

namespace
{

constexpr int OF_A_THREAD = 16; /* places of a list per thread */

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

/* An entry: a key's rank and, in the low half, NO_VECTOR - slot. Larger entries come first. 0: no
 * vector. */
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

template <int THREADS> KVANT_INLINE void sort(uint64_t *entries, uint32_t n, const uint64_t *ids)
{
    for (uint32_t run = 2; run <= n; run *= 2)
        for (uint32_t by = run / 2; by > 0; by /= 2) {
            for (uint32_t i = threadIdx.x; i < n / 2; i += THREADS) {
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

/* The largest rank that at least k of the block's ranks reach, found bit by bit; 1 if fewer than k
 * are above 0. */
template <int THREADS>
KVANT_INLINE uint32_t kth_rank(const uint32_t (&ranks)[OF_A_THREAD], uint32_t k)
{
    __shared__ uint32_t
        counts[3]; /* for three trials: one is counted, one is read, one is cleared */
    uint32_t best = 0;
    if (threadIdx.x < 3)
        counts[threadIdx.x] = 0;
    __syncthreads();
    for (int bit = 31, turn = 0; bit >= 0; bit--, turn = turn < 2 ? turn + 1 : 0) {
        const uint32_t trial = best | 1u << bit;
        uint32_t count = 0;
        unrolled_for (int j = 0; j < OF_A_THREAD; j++)
            count += ranks[j] >= trial;
        count = __reduce_add_sync(0xffffffffu, count);
        if (threadIdx.x % 32 == 0)
            atomicAdd(&counts[turn], count);
        if (threadIdx.x == 0)
            counts[turn < 2 ? turn + 1 : 0] = 0;
        __syncthreads();
        count = counts[turn];
        if (count >= k)
            best = trial;
        if (count == k)
            break;
    }
    return best > 0 ? best : 1;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    select_kernel(const __grid_constant__ ScanArgs args)
{
    extern __shared__ uint64_t entries[];
    __shared__ uint32_t there;
    const uint32_t query = blockIdx.x,
                   count =
                       args.keep_all ? (args.end - args.first) * GROUP_VECTORS : args.counts[query],
                   n = min(count, args.room);
    Found *list = args.lists + (size_t)query * args.room;
    uint32_t ranks[OF_A_THREAD], slots[OF_A_THREAD];
    unrolled_for (int j = 0; j < OF_A_THREAD; j++) {
        const uint32_t i = j * THREADS + threadIdx.x;
        const Found found = i < n ? list[i] : Found{ 0, NO_VECTOR };
        ranks[j] = found.slot == NO_VECTOR ? 0 : rank_of(found.key);
        slots[j] = found.slot;
    }
    if (threadIdx.x == 0)
        there = 0;
    const uint32_t least = kth_rank<THREADS>(ranks, args.k); /* this includes a barrier */
    unrolled_for (int j = 0; j < OF_A_THREAD; j++)
        if (ranks[j] >= least)
            entries[atomicAdd(&there, 1)] = (uint64_t)ranks[j] << 32 | (NO_VECTOR - slots[j]);
    __syncthreads();
    const uint32_t reached = there, kept = min(reached, args.k);
    uint32_t size = 2;
    while (size < reached)
        size *= 2;
    for (uint32_t i = reached + threadIdx.x; i < size; i += THREADS)
        entries[i] = 0;
    __syncthreads();
    sort<THREADS>(entries, size, args.ids);
    for (uint32_t i = threadIdx.x; i < kept; i += THREADS)
        args.best[(size_t)query * args.k + i] = list[i] =
            Found{ key_of((uint32_t)(entries[i] >> 32)), slot_of(entries[i]) };
    if (threadIdx.x != 0)
        return;
    const bool full = kept == args.k;
    const uint32_t worst = full ? slot_of(entries[args.k - 1]) : 0;
    args.counts[query] = kept;
    args.thresholds[query] = full ? key_of((uint32_t)(entries[args.k - 1] >> 32)) : -INFINITY;
    args.limits[query] = !full ? UINT64_MAX : args.ids ? args.ids[worst] : worst;
    if (args.keep_all ? query == 0 : count > args.room)
        *args.overflowed = !args.keep_all;
}

template <int THREADS> cudaError_t launch(const ScanArgs &args, cudaStream_t stream)
{
    const int shared = (int)(args.room * sizeof(uint64_t));
    const cudaError_t error =
        allow_shared(reinterpret_cast<const void *>(select_kernel<THREADS>), shared);
    if (error != cudaSuccess)
        return error;
    select_kernel<THREADS><<<args.n_queries, THREADS, shared, stream>>>(args);
    return cudaGetLastError();
}

} // namespace

cudaError_t launch_select(const ScanArgs &args, cudaStream_t stream)
{
    return args.room <= SHORT_LIST    ? launch<SHORT_LIST / OF_A_THREAD>(args, stream)
           : args.room <= MIDDLE_LIST ? launch<MIDDLE_LIST / OF_A_THREAD>(args, stream)
                                      : launch<LONG_LIST / OF_A_THREAD>(args, stream);
}

/* 1 KB is for the kernel's other variables. */
uint32_t longest_list()
{
    int most = 0;
    const bool fits =
        most_shared(most) == cudaSuccess && LONG_LIST * sizeof(uint64_t) + 1024 <= (size_t)most;
    return fits ? LONG_LIST : MIDDLE_LIST;
}

} // namespace kvant
