/* read_code.cuh - reads one code of a page; with one channel per code the page may lie in shared
 * memory. Chunks: what it stands for, too. */
#pragma once

#include "../chunks/chunk_numbers.cuh"
#include "../layout.cuh"
#include "../params.h"

namespace kvant
{

/* FAR: the page is in device memory, and nobody writes it. */
template <bool FAR = false>
__device__ __forceinline__ uint32_t read_code(const kvant_cuda_params &codec, const uint32_t *words, int token, int channel)
{
    const bool keys = codec.role == KVANT_ROLE_K;
    const int tiles = codec.head_dim / 16;
    uint32_t code = 0;
    for_each_plane((int)codec.bits, keys, tiles, [&](int log, int first, int shift) {
        const Place where = code_place(log, keys, tiles, token, channel);
        const uint32_t word = FAR ? __ldg(words + first + where.word) : words[first + where.word];
        code |= (word >> where.bit & ((1u << (1 << log)) - 1)) << shift;
    });
    return code;
}

KVANT_INLINE uint32_t read_chunk(const kvant_cuda_params &codec, int n_chunks, const uint32_t *words, int token,
                                 int chunk)
{
    uint32_t code = 0;
    for_each_chunk_plane((int)codec.bits, n_chunks, codec.role == KVANT_ROLE_K, [&](int p, int first, int shift) {
        const Place where = chunk_place(p, n_chunks, codec.role == KVANT_ROLE_K, token, chunk);
        code |= (__ldg(words + first + where.word) >> where.bit & ((1u << p) - 1)) << shift;
    });
    return code;
}

KVANT_INLINE float decode_channel(const OctopusLevels &levels, const kvant_cuda_book &book, uint32_t code, int i,
                                  float scale)
{
    const Point p = octopus_triplet(levels, book.direction_bits, code, scale);
    return i == 0 ? p.x : i == 1 ? p.y : p.z;
}

/* An index beyond the directions decodes to zero. */
KVANT_INLINE float decode_channel(const HqmqSecondaries &levels, const kvant_cuda_book &book, uint32_t code, int i,
                                  float scale)
{
    const uint32_t index = code & ((1u << book.index_bits) - 1), radius = code >> book.index_bits;
    return index < 24 * book.n_secondaries
               ? __fmul_rn(__fmul_rn(scale, (float)radius), hqmq_component(levels, index, i))
               : 0;
}

} // namespace kvant
