/* seal.cu - seals open pages, for codes with one scale per group of numbers. The append kernels
 * seal pages with one scale per token: they then read their rows from open pages.
 *
 * A thread block seals the page of one kv head and one role. It finds the ranges of all groups,
 * writes codes as nibbles to shared memory, and writes the words of the page (pack.cuh). The rows
 * are read twice, the second time from the first-level cache. */
#include "append.h"
#include "../launch.h"
#include "pack.cuh"

namespace kvant
{

constexpr int SEAL_THREADS = 256;

/* Both groupings have 2 D groups of 32 numbers in a page. */
template <int D> struct SealSpace {
    float2 scaling[2 * D]; /* zero point, inverse of the scale */
    Nibbles<D> nibbles;
    PageTokens tokens;
};

template <int D> struct OpenPage {
    const __half *rows;
    int n_tokens;
    bool over_tokens; /* true: groups are tokens of a channel; false: channels of a token */

    /* A token that was not written counts as a copy of its group's first token, so that it widens
     * no range. */
    KVANT_INLINE float at(int token, int channel) const
    {
        return __half2float(rows[(token < n_tokens ? token : token / 32 * 32) * D + channel]);
    }
    /* False for groups and tokens that were not written; they are not changed. */
    KVANT_INLINE bool has(int token) const
    {
        return (over_tokens ? token / 32 * 32 : token) < n_tokens;
    }
    KVANT_INLINE int token_of_group(int group) const
    {
        return over_tokens ? group / D * 32 : group % PAGE_TOKENS;
    }
};

/* Number i of a group, in the order in which format.md has the scales. */
template <int D> KVANT_INLINE float number_of_group(const OpenPage<D> &page, int group, int i)
{
    return page.over_tokens ? page.at(group / D * 32 + i, group % D)
                            : page.at(group % PAGE_TOKENS, group / PAGE_TOKENS * 32 + i);
}

template <int D>
KVANT_INLINE void find_scales(const kvant_cuda_params &codec, const OpenPage<D> &page,
                              float2 *scaling, uint16_t *metadata)
{
    for (int group = threadIdx.x; group < 2 * D; group += SEAL_THREADS) {
        if (!page.has(page.token_of_group(group)))
            continue;
        float min = number_of_group<D>(page, group, 0), max = min;
#pragma unroll 8
        for (int i = 1; i < 32; i++) {
            float x = number_of_group<D>(page, group, i);
            min = fminf(min, x);
            max = fmaxf(max, x);
        }
        __half stored =
            __float2half_rn(codec.symmetric ? 0.0f : __fadd_rn(min, 0.0f)); /* -0 becomes 0 */
        float range = codec.symmetric ? fmaxf(fabsf(min), fabsf(max)) : __fsub_rn(max, min);
        __half scale = __float2half_rn(__fdiv_rn(range, codec.levels));
        metadata[group] = __half_as_ushort(scale);
        if (!codec.symmetric)
            metadata[2 * D + group] = __half_as_ushort(stored);
        scaling[group] = make_float2(__half2float(stored),
                                     __half2float(scale) > 0 ? __frcp_rn(__half2float(scale)) : 0);
    }
}

template <int D>
KVANT_INLINE uint32_t code_of(const kvant_cuda_params &codec, const OpenPage<D> &page,
                              const float2 *scaling, int token, int channel)
{
    const float2 s =
        scaling[page.over_tokens ? token / 32 * D + channel : channel / 32 * PAGE_TOKENS + token];
    float level = rintf(__fmul_rn(__fsub_rn(page.at(token, channel), s.x), s.y));
    level = fminf(fmaxf(level, codec.symmetric ? -codec.levels : 0), codec.levels);
    return (uint32_t)(level - codec.offset);
}

/* A thread makes 16 bits: one channel of 4 consecutive tiles. */
template <int D>
KVANT_INLINE void make_nibbles(const kvant_cuda_params &codec, const OpenPage<D> &page,
                               const float2 *scaling, Nibbles<D> &nibbles)
{
    constexpr int IN_ROW = 16 * Nibbles<D>::GROUPS;
    for (int i = threadIdx.x; i < PAGE_TOKENS * IN_ROW; i += SEAL_THREADS) {
        const int token = i / IN_ROW;
        if (!page.has(token))
            continue;
        const int at = i % IN_ROW, channel = at / 16 * 64 + at % 16;
        uint32_t bits = 0;
        unrolled_for (int k = 0; k < 4; k++)
            if (channel + 16 * k < D)
                bits |= code_of<D>(codec, page, scaling, token, channel + 16 * k) << 4 * k;
        reinterpret_cast<uint16_t *>(nibbles.words[0] + Nibbles<D>::at(token))[at] = (uint16_t)bits;
    }
}

template <int D>
__global__ void __launch_bounds__(SEAL_THREADS) seal_kernel(const __grid_constant__ AppendArgs args)
{
    __shared__ SealSpace<D> space;
    const AppendRole &role = args.roles[blockIdx.z];
    const int kv_head = blockIdx.y,
              n_tokens = args.tokens ? min(args.tokens[blockIdx.x], PAGE_TOKENS) : PAGE_TOKENS;
    const int64_t from = args.from[blockIdx.x], to = args.to[blockIdx.x];
    if (n_tokens <= 0 || from < 0 || to < 0)
        return;
    OpenPage<D> open{ static_cast<const __half *>(role.rows) + from * role.row_block_stride +
                          kv_head * role.row_head_stride,
                      n_tokens, role.codec.grouping == KVANT_CUDA_GROUP_TOKENS };
    uint8_t *page = role.base + to * role.block_stride + kv_head * role.head_stride;
    if (threadIdx.x < PAGE_TOKENS)
        space.tokens.at[threadIdx.x] = open.has(threadIdx.x) ? (uint8_t)threadIdx.x : NONE;
    find_scales<D>(role.codec, open, space.scaling,
                   reinterpret_cast<uint16_t *>(page + role.codec.metadata_offset));
    __syncthreads();
    make_nibbles<D>(role.codec, open, space.scaling, space.nibbles);
    __syncthreads();
    write_codes<D>(role.codec, space.nibbles, space.tokens, reinterpret_cast<uint32_t *>(page));
}

cudaError_t launch_seal_groups(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream)
{
    dim3 grid(args.n_tokens / PAGE_TOKENS, n_kv_heads, n_roles);
    return with_head_dim(head_dim, [&](auto d) {
        return launch_kernel(seal_kernel<decltype(d)::value>, grid, SEAL_THREADS, 0, stream, args);
    });
}

} // namespace kvant
