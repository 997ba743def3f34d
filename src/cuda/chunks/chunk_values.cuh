/* chunk_values.cuh - the numbers that codes of several channels stand for, with the same bits as
 * on the CPU, and the places of these codes. Encoding and decoding use it; attention looks the
 * numbers up as fp16 (chunks.cuh).
 *
 * All arithmetic is in single roundings. format.md, "Octahedral codes", "Direction codes" and
 * "Chunk codes", has the formulas. */
#pragma once

#include "../layout.cuh"
#include "../params.h"

namespace kvant
{

/* Codebooks in shared memory. */
struct OctopusLevels {
    float direction[32], direction_thresholds[32], norm[8], norm_thresholds[8];

    KVANT_INLINE void load(const kvant_cuda_book &book)
    {
        const int i = threadIdx.x;
        if (i < 32)
            direction[i] = book.direction[i],
            direction_thresholds[i] = book.direction_thresholds[i];
        if (i < 8)
            norm[i] = book.norm[i], norm_thresholds[i] = book.norm_thresholds[i];
    }
};

struct HqmqSecondaries {
    double exact[KVANT_CUDA_MAX_SECONDARIES][4];
    float4 rounded[KVANT_CUDA_MAX_SECONDARIES];

    KVANT_INLINE void load(const kvant_cuda_book &book)
    {
        for (int i = threadIdx.x; i < (int)book.n_secondaries; i += blockDim.x) {
            const double *s = book.secondaries[i];
            for (int k = 0; k < 4; k++)
                exact[i][k] = s[k];
            rounded[i] = make_float4((float)s[0], (float)s[1], (float)s[2], (float)s[3]);
        }
    }
};

template <int CHANNELS> struct ChunkBook;
template <> struct ChunkBook<3> {
    using Levels = OctopusLevels;
    using Code = uint16_t;
};
template <> struct ChunkBook<4> {
    using Levels = HqmqSecondaries;
    using Code = uint32_t;
};

struct Point {
    float x, y, z;
};

/* (a b + c d) + e f */
KVANT_INLINE float dot3(float a, float b, float c, float d, float e, float f)
{
    return __fadd_rn(__fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d)), __fmul_rn(e, f));
}

/* The point of the octahedron at (u, w) of the square. */
KVANT_INLINE Point octahedral_point(float u, float w)
{
    const float z = __fsub_rn(__fsub_rn(1, fabsf(u)), fabsf(w)), fold = z < 0 ? -z : 0;
    return Point{ __fsub_rn(u, copysignf(fold, u)), __fsub_rn(w, copysignf(fold, w)), z };
}

KVANT_INLINE Point octopus_triplet(const OctopusLevels &levels, uint32_t direction_bits,
                                   uint32_t code, float scale)
{
    const uint32_t mask = (1u << direction_bits) - 1;
    const Point p = octahedral_point(levels.direction[code & mask],
                                     levels.direction[code >> direction_bits & mask]);
    const float factor = __fdiv_rn(__fmul_rn(scale, levels.norm[code >> 2 * direction_bits & 7]),
                                   __fsqrt_rn(dot3(p.x, p.x, p.y, p.y, p.z, p.z)));
    return Point{ __fmul_rn(factor, p.x), __fmul_rn(factor, p.y), __fmul_rn(factor, p.z) };
}

/* Component i of Hurwitz unit p. */
KVANT_INLINE double hurwitz_component(uint32_t p, int i)
{
    return p >= 8 ? (p - 8) >> i & 1 ? -0.5 : 0.5 : (int)p / 2 != i ? 0.0 : p % 2 ? -1.0 : 1.0;
}

/* Component i of a direction: of unit (index mod 24) times secondary (index / 24). Signs as
 * Hamilton's product has them. */
KVANT_INLINE float hqmq_component(const HqmqSecondaries &levels, uint32_t index, int i)
{
    const double *s = levels.exact[index / 24];
    const uint32_t p = index % 24;
    /* terms k = 0 .. 3: the unit's component k times the secondary's component i ^ k, minus where
     * bit i of the mask is set */
    const uint32_t minus[4] = { 0u, 1u | 4u, 1u | 8u, 1u | 2u };
    double sum = __dmul_rn(hurwitz_component(p, 0), s[i]);
    unrolled_for (int k = 1; k < 4; k++) {
        const double term = __dmul_rn(hurwitz_component(p, k), s[i ^ k]);
        sum = __dadd_rn(sum, minus[k] >> i & 1 ? -term : term);
    }
    return __double2float_rn(sum);
}

/* Calls use(bits, first word, shift of the code) for each plane of codes of `bits` bits. */
template <class F>
KVANT_INLINE void for_each_chunk_plane(int bits, int n_chunks, bool keys, F &&use)
{
    int first = 0, shift = 0;
#pragma unroll 1
    for (int p = 16; p > 0; p /= 2)
        if (bits & p) {
            use(p, first, shift);
            first += chunk_plane_words(p, n_chunks, keys);
            shift += p;
        }
}

} // namespace kvant
