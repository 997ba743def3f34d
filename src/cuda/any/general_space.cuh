/* general_space.cuh - what kernels that encode the general form share: the memory of a warp, and
 * the open page of a block. */
#pragma once

#include "append_rows.cuh"
#include "general_encode.h"

namespace kvant
{

constexpr int WARPS = 4;

/* The memory of a warp. */
template <int P> struct GeneralSpace {
    alignas(16) float y[P], a[P], b[P], sums[16];
    uint32_t codes[P];

    KVANT_INLINE general_space view()
    {
        return general_space{ y, a, b, codes, sums };
    }
};

/* The page of a block and the tokens that were written to it. Other tokens count as copies of their
 * group's first token. */
struct OpenRows {
    const uint16_t *rows;
    uint8_t *page;
    int n_tokens, d;

    KVANT_INLINE general_run channel(int channel, int first) const
    {
        return general_run{ nullptr, rows + (size_t)first * d + channel, d, n_tokens - first };
    }
};

KVANT_INLINE OpenRows open_rows(const AnyAppendArgs &args)
{
    const AppendRole &role = args.roles[0];
    const int64_t from = args.from[blockIdx.x], to = args.to[blockIdx.x];
    const int n_tokens = args.tokens ? min(args.tokens[blockIdx.x], PAGE_TOKENS) : PAGE_TOKENS;
    return OpenRows{ static_cast<const uint16_t *>(role.rows) + from * role.row_block_stride +
                         blockIdx.y * role.row_head_stride,
                     role.base + to * role.block_stride + blockIdx.y * role.head_stride,
                     from < 0 || to < 0 ? 0 : n_tokens, (int)role.codec.head_dim };
}

} // namespace kvant
