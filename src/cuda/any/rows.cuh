/* rows.cuh - rows of any head_dim, with a warp per row: transforms, and the numbers of a page's
 * token. Lane l has channels l, l + 32, ... Numbers beyond head_dim are zero, which changes no sum
 * of format.md. */
#pragma once

#include "../pages/read_code.cuh"
#include "../rotate.cuh"
#include "../trellis/trellis_steps.cuh"
#include "general_decode.h"

namespace kvant
{

/* P below: the numbers of a lane, room for head_dim; fewer where head_dim is known to be small */
constexpr int MOST_DIM = KVANT_CUDA_MOST_DIM;

/* Calls use(number, channel) for the lane's numbers that exist. */
template <int P, class F>
__device__ __forceinline__ void each_of(Row<P> &row, int d, int lane, F &&use)
{
    row.each(lane, [&](float &x, int channel) {
        if (channel < d)
            use(x, channel);
    });
}

template <int P = MOST_DIM>
KVANT_INLINE Row<P> load_any(const void *from, size_t offset, kvant_cuda_type type, int d, int lane)
{
    Row<P> row{};
    each_of(row, d, lane,
            [&](float &x, int channel) { x = load_number(from, offset + channel, type); });
    return row;
}

KVANT_INLINE void store_number(void *to, size_t at, kvant_cuda_type type, float x)
{
    if (type == KVANT_CUDA_F32)
        static_cast<float *>(to)[at] = x;
    else
        static_cast<uint16_t *>(to)[at] = type == KVANT_CUDA_F16
                                              ? __half_as_ushort(__float2half_rn(x))
                                              : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

template <int P>
KVANT_INLINE void store_any(void *to, size_t offset, kvant_cuda_type type, int d, int lane,
                            Row<P> &row)
{
    each_of(row, d, lane,
            [&](float x, int channel) { store_number(to, offset + channel, type, x); });
}

/* space: P floats of the warp's memory. */
template <int P> KVANT_INLINE void share_row(Row<P> &row, float *space, int lane)
{
    __syncwarp(); /* the earlier contents have been read */
    row.each(lane, [&](float x, int channel) { space[channel] = x; });
    __syncwarp();
}

/* y = R W x, as transform of rotate.cuh. A full matrix is R W, or W: AppendRole::after follows. */
template <int P>
KVANT_INLINE void transform_any(Row<P> &row, const kvant_cuda_params &codec,
                                const kvant_cuda_any &any, const float *key_transform, float *space,
                                int lane)
{
    const int d = (int)codec.head_dim;
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL) {
        share_row(row, space, lane);
        each_of(row, d, lane, [&](float &x, int channel) {
            float sum = 0;
#pragma unroll 4
            for (int i = 0; i < d; i++)
                sum = __fadd_rn(sum, __fmul_rn(space[i], key_transform[(size_t)i * d + channel]));
            x = sum;
        });
        return;
    }
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL)
        each_of(row, d, lane,
                [&](float &x, int channel) { x = __fmul_rn(x, key_transform[channel]); });
    if (codec.rotation.block)
        rotate(row, any.rotation, lane);
}

/* x = W^-1 R^T y; sums are in the order of format.md, "Numbers" */
template <int P>
KVANT_INLINE void transform_back_any(Row<P> &row, const kvant_cuda_params &codec,
                                     const kvant_cuda_any &any, const float *inverse_key_transform,
                                     float *space, int lane)
{
    const int d = (int)codec.head_dim;
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_FULL) {
        share_row(row, space, lane);
        each_of(row, d, lane, [&](float &x, int channel) {
            const float *m = inverse_key_transform + (size_t)channel * d;
            float sum[16];
            rolled_for (int tile = 0; tile < d; tile += 16)
                unrolled_for (int i = 0; i < 16; i++)
                    sum[i] = __fadd_rn(tile ? sum[i] : 0, __fmul_rn(m[tile + i], space[tile + i]));
            unrolled_for (int width = 8; width > 0; width /= 2)
                unrolled_for (int i = 0; i < width; i++)
                    sum[i] = __fadd_rn(sum[i], sum[i + width]);
            x = sum[0];
        });
        return;
    }
    if (codec.rotation.block)
        rotate_back(row, any.rotation, lane);
    if (codec.key_transform_kind == KVANT_CUDA_TRANSFORM_DIAGONAL)
        each_of(row, d, lane,
                [&](float &x, int channel) { x = __fmul_rn(x, inverse_key_transform[channel]); });
}

/* ---- the numbers of pages ---- */

struct TrellisBook {
    float values[KVANT_CUDA_TRELLIS_LEVELS];
    uint16_t whole[KVANT_CUDA_TRELLIS_LEVELS]; /* levels as whole numbers, fp16 */
    uint16_t steps[MOST_DIM];
};

/* The tables that give codes their meaning, in shared memory. */
union AnyBook {
    float values[KVANT_CUDA_WIDE_LEVELS];
    TrellisBook trellis;

    /* The bytes of it that a codec needs, a multiple of 16. */
    __host__ __device__ static int bytes(const kvant_cuda_codec &codec)
    {
        switch (codec.params.codes) {
        case KVANT_CUDA_CODES_CODEBOOK: return codec.params.bits < 2 ? 16 : 4 << codec.params.bits;
        case KVANT_CUDA_CODES_TRELLIS: return ((int)sizeof(AnyBook) + 15) / 16 * 16;
        default: return 0;
        }
    }

    /* Called by all threads of a block. */
    KVANT_INLINE void load(const kvant_cuda_codec &codec)
    {
        switch (codec.params.codes) {
        case KVANT_CUDA_CODES_CODEBOOK:
            for (int i = threadIdx.x; i < 1 << codec.params.bits; i += blockDim.x)
                values[i] = codec.params.kind == KVANT_CUDA_CODEBOOK_WIDE ? codec.wide.values[i]
                                                                          : codec.params.values[i];
            break;
        case KVANT_CUDA_CODES_TRELLIS:
            for (int i = threadIdx.x; i < KVANT_CUDA_TRELLIS_LEVELS; i += blockDim.x) {
                trellis.values[i] = codec.trellis.values[i];
                trellis.whole[i] = __half_as_ushort(__short2half_rn(codec.trellis.levels[i]));
            }
            for (int i = threadIdx.x; i < (int)codec.params.head_dim; i += blockDim.x)
                trellis.steps[i] = codec.any.steps[i];
            break;
        default: break;
        }
    }
};

/* The bytes of a warp's memory, aligned to 16, that read_any needs. Attention has its own decoder
 * for uniform codes. */
__host__ __device__ inline int any_scratch(const kvant_cuda_codec &codec)
{
    return (kvant_cuda_is_general(&codec.params) ? 3 * (int)sizeof(float) : 1) *
           (int)codec.params.head_dim;
}

/* Not inlined, because every other family would pay for its registers. */
__device__ static __noinline__ void decode_general(const kvant_general *g, const uint8_t *page,
                                                   int token, float *space, int lane, int kv_head)
{
    float *a = space + g->head_dim;
    const general_space s{ space, a, a + g->head_dim, reinterpret_cast<uint32_t *>(a), nullptr };
    general_decode(general_team{ lane, 32, kv_head }, g, page, token, &s);
}

template <int P>
KVANT_INLINE void read_general(Row<P> &row, const kvant_cuda_codec &codec, const uint8_t *page,
                               int token, uint8_t *scratch, int lane, int kv_head)
{
    const float *numbers = reinterpret_cast<float *>(scratch);
    decode_general(&codec.general, page, token, reinterpret_cast<float *>(scratch), lane, kv_head);
    each_of(row, (int)codec.params.head_dim, lane,
            [&](float &x, int channel) { x = numbers[channel]; });
}

/* bits: room for the trellis bits of the row. */
template <int P>
KVANT_INLINE void read_trellis(Row<P> &row, const kvant_cuda_codec &codec, const TrellisBook &book,
                               const uint32_t *words, int token, float scale, uint8_t *bits,
                               int lane)
{
    const int d = (int)codec.params.head_dim;
    __syncwarp(); /* the preceding row has been read */
    each_of(row, d, lane, [&](float &x, int channel) {
        const uint32_t code = read_code<true>(codec.params, words, token, channel);
        bits[book.steps[channel]] = code & 1;
        x = __uint_as_float(code);
    });
    __syncwarp();
    each_of(row, d, lane, [&](float &x, int channel) {
        const uint32_t subset = subset_at(bits, d, book.steps[channel]);
        x = __fmul_rn(scale, book.values[8 * (__float_as_uint(x) / 2) + subset]);
    });
}

/* Reads a token's row, transformed. bits: memory of the warp: 12 * head_dim bytes for uniform
 * codes, any_scratch for other codes. */
template <int P = MOST_DIM>
KVANT_INLINE Row<P> read_any(const kvant_cuda_codec &codec, const AnyBook &book,
                             const uint8_t *page, int token, uint8_t *bits, int lane, int kv_head)
{
    const kvant_cuda_params &c = codec.params;
    const int d = (int)c.head_dim;
    if (c.codes == KVANT_CUDA_CODES_OPEN)
        return load_any<P>(page, (size_t)token * d, KVANT_CUDA_F16, d, lane);
    Row<P> row{};
    if (kvant_cuda_is_general(&c) || c.codes == KVANT_CUDA_CODES_UNIFORM) {
        read_general(row, codec, page, token, bits, lane, kv_head);
        return row;
    }
    const uint32_t *words = reinterpret_cast<const uint32_t *>(page);
    const uint16_t *scales = reinterpret_cast<const uint16_t *>(page + c.metadata_offset);
    const float scale = __half2float(__ushort_as_half(__ldg(scales + token)));
    if (c.codes == KVANT_CUDA_CODES_TRELLIS)
        read_trellis(row, codec, book.trellis, words, token, scale, bits, lane);
    else
        each_of(row, d, lane, [&](float &x, int channel) {
            x = __fmul_rn(scale, book.values[read_code<true>(c, words, token, channel)]);
        });
    return row;
}

} // namespace kvant
