/* read_code.cuh - reads one code of a page with one code per channel; the page may lie in shared
 * memory. */
#pragma once

#include "../layout.cuh"
#include "../params.h"

namespace kvant
{

/* FAR: the page is in device memory and is not written. */
template <bool FAR = false>
__device__ __forceinline__ uint32_t read_code(const kvant_cuda_params &codec, const uint32_t *words,
                                              int token, int channel)
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

} // namespace kvant
