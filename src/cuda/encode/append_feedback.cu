/* append_feedback.cu - appends and seals rows of codebooks with error feedback (format.md,
 * "Feedback"): the numbers of a row are rounded one after another.
 *
 * A warp takes a row. All lanes know the number that is rounded; each passes its error on to its own
 * channels. In plain form: head_dim steps that wait for each other. */
#include "append_tokens.cuh"
#include "../launch.h"
#include "token_words.cuh"

#include <algorithm>

namespace kvant
{

constexpr int WARPS = 8;
constexpr float MAX_RATIO = 2; /* of a scale to the one for the row's length: codec/feedback.c */

using FeedbackArgs = BookedAppendArgs<kvant_cuda_wide_book>;

struct FeedbackSums {
    float own, product;
};

/* The number of thresholds below x, of which there are n. */
KVANT_INLINE uint32_t count_thresholds(const kvant_cuda_wide_book &book, uint32_t n, float x, int lane)
{
    uint32_t code = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < n; i += 32)
        code += __popc(__ballot_sync(FULL, i + lane < n && x > book.thresholds[i + lane]));
    return code;
}

template <int D>
KVANT_INLINE void load_column(float (&column)[Row<D>::PER_LANE], const float *columns, int j, int lane)
{
    unrolled_for (int i = 0; i < Row<D>::PER_LANE; i++)
        column[i] = columns[(size_t)j * D + lane + 32 * i];
}

/* matrices: of the kv head, pivots before columns. */
template <int D>
KVANT_INLINE FeedbackSums feedback_codes(uint32_t (&codes)[Row<D>::PER_LANE], const Row<D> &z,
                                         const kvant_cuda_wide_book &book, uint32_t bits, const float *matrices,
                                         int lane)
{
    Row<D> target = z, a = z;
    FeedbackSums sums{ 0, 0 };
    float column[Row<D>::PER_LANE], next[Row<D>::PER_LANE];
    load_column<D>(next, matrices + D, 0, lane);
    unrolled_for (int m = 0; m < Row<D>::PER_LANE; m++)
#pragma unroll 1
        for (int l = 0; l < 32; l++) {
            const int j = 32 * m + l;
            unrolled_for (int i = 0; i < Row<D>::PER_LANE; i++)
                column[i] = next[i];
            load_column<D>(next, matrices + D, min(j + 1, D - 1), lane);
            const float t = __shfl_sync(FULL, target.x[m], l), a_j = __shfl_sync(FULL, a.x[m], l),
                        z_j = __shfl_sync(FULL, z.x[m], l), weighted = __fmul_rn(matrices[j], a_j);
            const uint32_t code = count_thresholds(book, (1u << bits) - 1, t, lane);
            const float value = book.values[code], error = __fsub_rn(value, z_j);
            sums.own = __fadd_rn(sums.own, __fmul_rn(weighted, a_j));
            sums.product = __fadd_rn(sums.product, __fmul_rn(weighted, __fadd_rn(a_j, __fsub_rn(value, t))));
            codes[m] = lane == l ? code : codes[m];
            unrolled_for (int i = 0; i < Row<D>::PER_LANE; i++) {
                target.x[i] = __fsub_rn(target.x[i], __fmul_rn(column[i], error));
                a.x[i] = __fadd_rn(a.x[i], __fmul_rn(column[i], z_j));
            }
        }
    return sums;
}

template <int D>
KVANT_INLINE Quantized quantize_row(uint32_t (&codes)[Row<D>::PER_LANE], const AppendRole &role,
                                    const kvant_cuda_wide_book &book, const Row<D> &y, int kv_head, int lane)
{
    const float length = __fmul_rn(__fsqrt_rn(dot_rows<D>(y, y, lane)), role.codec.inverse_sqrt_dim),
                scale = to_half_and_back(length), inverse = scale > 0 ? __frcp_rn(scale) : 0;
    Row<D> z;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        z.x[j] = __fmul_rn(y.x[j], inverse);
        codes[j] = 0;
    }
    const FeedbackSums sums = feedback_codes<D>(codes, z, book, role.codec.bits,
                                                role.feedback + (size_t)kv_head * (D + D * D), lane);
    float stored = scale;
    if (role.codec.unbiased && sums.product > 0) {
        const float ratio = __fdiv_rn(sums.own, sums.product);
        stored = __fmul_rn(scale, ratio > MAX_RATIO ? MAX_RATIO : ratio < 1 / MAX_RATIO ? 1 / MAX_RATIO : ratio);
    }
    return Quantized{ stored, 0, length <= 65504.0f / MAX_RATIO };
}

template <int D> __global__ void __launch_bounds__(WARPS * 32) append_feedback_kernel(const __grid_constant__ FeedbackArgs args)
{
    __shared__ kvant_cuda_wide_book book;
    __shared__ int64_t slots[PAGE_TOKENS];
    const AppendRole &role = args.roles[0];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
    const uint32_t first = blockIdx.x * args.chunk;
    static_assert(KVANT_CUDA_WIDE_LEVELS == WARPS * 32, "a thread loads a level");
    book.thresholds[threadIdx.x] = args.books[0].thresholds[threadIdx.x];
    book.values[threadIdx.x] = args.books[0].values[threadIdx.x];
    if (threadIdx.x < PAGE_TOKENS)
        slots[threadIdx.x] = slot_of(args, first);
    __syncthreads();
    const int64_t slot = slots[warp];
    if (slot < 0)
        return;
    bool finite;
    uint32_t codes[Row<D>::PER_LANE];
    const Row<D> y = transformed_row<D>(args, role, row_place(args, role, first, warp, kv_head), kv_head, lane, finite);
    const Quantized q = quantize_row<D>(codes, role, book, y, kv_head, lane);
    if (!q.in_range) {
        if (lane == 0 && args.refused)
            atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
        return;
    }
    uint8_t *page = role.base + (size_t)page_number(slot) * role.block_stride + kv_head * role.head_stride;
    const int at = (int)(slot % PAGE_TOKENS);
    if (lane == 0)
        reinterpret_cast<__half *>(page + role.codec.metadata_offset)[at] = __float2half_rn(q.scale);
    if (role.codec.role == KVANT_ROLE_K)
        TokenWords<D, true>(at, lane).put(reinterpret_cast<uint32_t *>(page), codes, role.codec.bits);
    else
        TokenWords<D, false>(at, lane).put(reinterpret_cast<uint32_t *>(page), codes, role.codec.bits);
}

static kvant_cuda_wide_book book_of(const kvant_cuda_codec &codec)
{
    kvant_cuda_wide_book book = codec.wide;
    if (codec.params.kind != KVANT_CUDA_CODEBOOK_WIDE) {
        std::copy_n(codec.params.values, KVANT_CUDA_MAX_LEVELS, book.values);
        std::copy_n(codec.params.thresholds, KVANT_CUDA_MAX_LEVELS, book.thresholds);
    }
    return book;
}

cudaError_t launch_append_feedback(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                                   cudaStream_t stream)
{
    FeedbackArgs p = booked<kvant_cuda_wide_book>(args, n_roles, book_of);
    p.chunk = WARPS; /* a row for every warp */
    return with_head_dim(head_dim, [&](auto d) {
        append_feedback_kernel<decltype(d)::value><<<grid_of(p, n_roles, n_kv_heads), WARPS * 32, 0, stream>>>(p);
        return cudaGetLastError();
    });
}

} // namespace kvant
