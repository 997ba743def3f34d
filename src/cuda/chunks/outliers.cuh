/* outliers.cuh - outlier chunks, which a page stores separately from its codes (hqmq:med): adds
 * them to scores and sums of decode kernels. A token has a few slots for them behind the page's
 * scales, with four halves each, which are zeros in free slots. The code of such a chunk finds a
 * direction of zeros. Outliers are rare, so they are added one by one. */
#pragma once

#include "../attention/values.cuh"
#include "any_chunks.cuh"

namespace kvant
{

struct Outlier {
    int token, chunk;
    float x[4];

    /* A bit that selects the token's score among a lane's scores. With an index instead, the
     * compiler would put scores into memory. */
    KVANT_INLINE uint32_t bit() const
    {
        return 1u << (token / 8);
    }
};

/* The chunk of a token whose code says that it is in a slot; -1 if there is none. */
template <int CHUNKS, bool KEYS>
KVANT_INLINE int find_outlier(const uint8_t *page, const ChunkSizes &sizes, int token, int slot,
                              int lane)
{
    const uint32_t wanted = sizes.n_codewords | slot << sizes.index_bits;
    int found = -1;
#pragma unroll 1
    for (int chunk = lane; chunk - lane < CHUNKS; chunk += 32) {
        const uint32_t *plane = reinterpret_cast<const uint32_t *>(page);
        uint32_t code = 0;
#pragma unroll 1
        for (int p = 16, shift = 0; p > 0; p /= 2)
            if (sizes.bits & p) {
                const Place at = chunk_place(p, CHUNKS, KEYS, token, min(chunk, CHUNKS - 1));
                code |= (plane[at.word] >> at.bit & ((1u << p) - 1)) << shift;
                plane += chunk_plane_words(p, CHUNKS, KEYS);
                shift += p;
            }
        const uint32_t here = __ballot_sync(FULL, chunk < CHUNKS && code == wanted);
        found = here ? chunk - lane + __ffs(here) - 1 : found;
    }
    return found;
}

/* Calls use(outlier) for the outliers of a page's existing tokens. */
template <int CHUNKS, bool KEYS, class F>
KVANT_INLINE void for_each_outlier(const uint8_t *page, const ChunkSizes &sizes, int valid,
                                   int lane, F &&use)
{
    const uint2 *stored =
        reinterpret_cast<const uint2 *>(page + sizes.code_bytes + PAGE_TOKENS * sizeof(uint16_t));
#pragma unroll 1
    for (int i = 0; i < 2 * sizes.slots; i++) { /* each step reads one slot of 32 tokens */
        const uint2 own = stored[32 * i + lane];
        const int first = 32 * (i % 2);
#pragma unroll 1
        for (uint32_t there = __ballot_sync(FULL, (own.x | own.y) != 0 && first + lane < valid);
             there; there &= there - 1) {
            const int from = __ffs(there) - 1;
            const uint32_t low = __shfl_sync(FULL, own.x, from),
                           high = __shfl_sync(FULL, own.y, from);
            const float2 x = __half22float2(*reinterpret_cast<const __half2 *>(&low)),
                         y = __half22float2(*reinterpret_cast<const __half2 *>(&high));
            const Outlier outlier{ first + from,
                                   find_outlier<CHUNKS, KEYS>(page, sizes, first + from, i / 2,
                                                              lane),
                                   { x.x, x.y, y.x, y.y } };
            if (outlier.chunk >= 0)
                use(outlier);
        }
    }
}

/* Adds outliers to the scores (log2) of a page of keys. */
template <class C, int D, class Q>
KVANT_INLINE void score_outliers(const uint8_t *page, const ChunkSizes &sizes, const Q &tile,
                                 int valid, int lane, float (&s)[4][4])
{
    for_each_outlier<ChunkPlaces<C, D>::CHUNKS, true>(
        page, sizes, valid, lane, [&](const Outlier &o) {
            unrolled_for (int h = 0; h < 2; h++) {
                const int column = 2 * (lane & 3) + h;
                float sum = 0;
                unrolled_for (int k = 0; k < 4; k++)
                    sum += __half2float(tile.rows[column * Q::STRIDE + 4 * o.chunk + k]) * o.x[k];
                sum *= tile.factor[column];
                unrolled_for (int i = 0; i < 8; i++)
                    s[i / 2][2 * (i & 1) + h] +=
                        o.token % 8 == lane >> 2 && o.bit() >> i & 1 ? sum : 0;
            }
        });
}

/* Adds outliers to the sums of values, after the page's codes have been added. s: the scores from
 * which the weights were computed. */
template <class C, int D>
KVANT_INLINE void add_outliers(const uint8_t *page, const ChunkSizes &sizes, int valid, int lane,
                               const float (&s)[4][4], Accumulator<C, D> &sums)
{
    for_each_outlier<ChunkPlaces<C, D>::CHUNKS, false>(
        page, sizes, valid, lane, [&](const Outlier &o) {
            unrolled_for (int h = 0; h < 2; h++) {
                float own = NEVER;
                unrolled_for (int i = 0; i < 8; i++)
                    own = fmaxf(own, o.bit() >> i & 1 ? s[i / 2][2 * (i & 1) + h] : NEVER);
                const float score = __shfl_sync(FULL, own, 4 * (o.token % 8) + (lane & 3)),
                            weight = exp2_fast(score - sums.max[h]) * (1 / C::UNIT);
                unrolled_for (int g = 0; g < ChunkPlaces<C, D>::VALUE_GROUPS; g++)
                    unrolled_for (int k = 0; k < 4; k++)
                        sums.o[2 * g + k / 2][h + 2 * (k % 2)] +=
                            (8 * g + (lane >> 2) == o.chunk ? weight : 0) * o.x[k];
            }
        });
}

} // namespace kvant
