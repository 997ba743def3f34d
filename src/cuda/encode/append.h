/* append.h - the arguments of the append kernels, as they are passed to launches, and functions for
 * rows that a warp transforms. */
#pragma once

#include "../rotate.cuh"
#include "queries.h"

#include <cuda_runtime.h>

namespace kvant
{

struct AppendRole {
    kvant_cuda_params codec;
    uint8_t *base;
    size_t block_stride, head_stride; /* strides of pages, in bytes */
    const void *rows;
    size_t token_stride, row_head_stride; /* row and head strides, in elements */
    const float *center, *scale;
    const float *key_transform; /* for each kv head, as many numbers as codec.weighting says */
    const void *compact;        /* launch_append_short: in place of key_transform; or NULL */
    /* The rotation that follows a full matrix W. block 0: none, or the matrix is R W */
    kvant_cuda_wide_rotation after;
    float *exact;                   /* for open pages: see kvant_cuda_kernel_append_args */
    const float *feedback;          /* as in kvant_cuda_kernel_append_args */
    const float *centroids;         /* as in kvant_cuda_kernel_append_args */
    size_t row_block_stride;        /* in elements; for the blocks of open pages that are sealed */
    bool wide;                      /* rows begin at multiples of 16 bytes; set by booked */
    const kvant_cuda_codec *source; /* in the computer's memory: it has the books */
};

struct AppendArgs {
    AppendRole roles[2];
    kvant_cuda_type type;
    uint32_t n_tokens, chunk; /* chunk: tokens per thread block, set by booked */
    const int64_t *slots;
    uint32_t *refused;
    uint32_t *marks;         /* as in cuda.h */
    const int64_t *mark_ids; /* as in cuda.h */
    bool slots_ready;        /* as in cuda.h */
    bool next_early;         /* as in cuda_kernels.h */
    /* the centres of keys, which are the first role if there are any; start NULL: none */
    kvant_cuda_block_centers block_centers;
    const int64_t *center_slots; /* as in cuda.h */
    /* queries of the same tokens, for launch_append_short with a matrix; q NULL: none */
    QueryArgs queries;
    /* Sealing: n_tokens is 64 per block, block i goes from open block from[i] to sealed block
     * to[i], with tokens[i] tokens or all 64. NULL when rows are appended. */
    const int32_t *from, *to, *tokens;
    /* Sealing of single rows (kvant_cuda_seal_rows): row i goes from row row_ids[i] of the open
     * pages to slots[i], for i below *n_rows. n_tokens is the most rows that there may be; with 0
     * nothing is launched. */
    bool listed;
    const int64_t *row_ids;
    const uint32_t *n_rows;
    bool clear_refused; /* an open page gets zeros in place of a refused row */
};

/* The same, with a book per role that defines codes beyond AppendRole::codec. */
template <class Book> struct BookedAppendArgs : AppendArgs {
    Book books[2];
};

/* Appends rows, or seals open pages, to sealed pages of kinds with one scale per token. */
cudaError_t launch_append(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream);

/* The same for codebooks, of which at least one is wide. */
cudaError_t launch_append_wide(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);

/* The same for trellis kinds. */
cudaError_t launch_append_trellis(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                  int n_kv_heads, cudaStream_t stream);

constexpr uint32_t MOST_FEW = 64;

/* Appends at most MOST_FEW rows to open pages, or to pages of uniform codes and codebooks. All
 * roles have kinds of launch_append, or of launch_append_wide, or all have open pages. */
cudaError_t launch_append_short(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                int n_kv_heads, cudaStream_t stream);

/* Appends rows to open pages. */
cudaError_t launch_append_open(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);
/* Seals open pages to pages of kinds with groups of 32. */
cudaError_t launch_seal_groups(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);

/* A number less its centre, divided by its scale; at: index among the channels of all kv heads. */
KVANT_INLINE float centered(float x, const AppendRole &role, int at)
{
    if (role.center)
        x = __fsub_rn(x, role.center[at]);
    if (role.scale)
        x = __fdiv_rn(x, role.scale[at]);
    return x;
}

/* Whether a full matrix is a triangle, whose row i has numbers up to channel i: only a W without R
 * is followed by a rotation. W of longer rows has several triangles. */
template <int D> KVANT_INLINE bool is_triangle(const AppendRole &role)
{
    return D <= 128 && role.after.block != 0;
}

KVANT_INLINE bool is_finite(float x)
{
    return fabsf(x) <= 3.4028234e38f;
}

/* Reports why the row of a token of the call is not stored, and marks the token. Called by one
 * thread. */
template <class Args>
KVANT_INLINE void note_refusal(const Args &args, uint32_t token, int64_t slot, bool finite)
{
    if (args.refused)
        atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
    if (!args.marks)
        return;
    const int64_t number = args.mark_ids ? args.mark_ids[token] : slot;
    atomicOr(args.marks + 1 + number / 32, 1u << number % 32);
    atomicOr(args.marks, 1u);
}

/* Loads and transforms a warp's row. finite: whether it was finite before the transform. */
template <int D>
KVANT_INLINE Row<D> transformed_row(const AppendArgs &args, const AppendRole &role, size_t row_at,
                                    int kv_head, int lane, bool &finite)
{
    Row<D> row = load_row<D>(role.rows, row_at, args.type, lane);
    finite = true;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        row.x[j] = centered(row.x[j], role, kv_head * D + lane + 32 * j);
        finite &= is_finite(row.x[j]);
    }
    finite = __all_sync(FULL, finite);
    transform(row, role.codec, key_transform_of(role.codec, role.key_transform, kv_head), lane);
    rotate(row, role.after, lane);
    return row;
}

/* The sum of products in the order of format.md: 16 partial sums, each of channels that are equal
 * modulo 16. All lanes get it. */
template <int D>
__device__ __forceinline__ float dot_rows(const Row<D> &a, const Row<D> &b, int lane)
{
    float sum = 0;
    unrolled_for (int j = 0; j < Row<D>::PER_LANE; j++) {
        const float own = __fmul_rn(a.x[j], b.x[j]), other = __shfl_xor_sync(FULL, own, 16);
        const float near = lane < 16 ? own : other, far = lane < 16 ? other : own;
        sum = __fadd_rn(j == 0 ? near : __fadd_rn(sum, near), far);
    }
    unrolled_for (int width = 8; width > 0; width /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, width));
    return sum;
}

} // namespace kvant
