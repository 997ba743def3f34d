/* read_code.cuh - reads one code of a page with one channel per code. The page may lie in shared
 * memory. */
#pragma once

#include "../layout.cuh"
#include "../params.h"

namespace kvant
{

KVANT_INLINE uint32_t read_code(const kvant_cuda_params &codec, const uint32_t *words, int token, int channel)
{
    bool keys = codec.role == KVANT_ROLE_K;
    int d = codec.head_dim / 16, rows = keys ? 4 : d, columns = keys ? d : 4;
    int row = keys ? token : channel, column = keys ? channel : token, first = 0, shift = 0;
    uint32_t code = 0;
    for (int i = 0; i < PLANES; i++) {
        int bits = plane_bits(codec.bits, i);
        if (bits == 0)
            break;
        Place where = place(bits, rows, columns, row, column);
        code |= (words[first + where.word] >> where.bit & ((1u << bits) - 1)) << shift;
        first += plane_words(bits, rows, columns);
        shift += bits;
    }
    return code;
}

} // namespace kvant
