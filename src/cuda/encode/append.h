/* append.h - the arguments of the append kernels, as they travel into the launch, and rows that a
 * warp transforms. */
#pragma once

#include "../rotate.cuh"
#include "queries.h"

#include <cuda_runtime.h>

namespace kvant
{

struct AppendRole {
    kvant_cuda_params codec;
    uint8_t *base;
    size_t block_stride, head_stride; /* of pages, bytes */
    const void *rows;
    size_t token_stride, row_head_stride; /* of rows, elements */
    const float *center, *scale;
    const float *weights;           /* as many for each kv head as codec.weighting says */
    float *exact;                   /* of open pages: see kvant_cuda_kernel_append_args */
    const float *feedback;          /* the same */
    const float *centroids;         /* the same */
    size_t row_block_stride;        /* elements; of blocks of open pages, when these are sealed */
    bool wide;                      /* rows begin at multiples of 16 bytes; set by booked */
    const kvant_cuda_codec *source; /* on the host: has the books */
};

struct AppendArgs {
    AppendRole roles[2];
    kvant_cuda_type type;
    uint32_t n_tokens, chunk; /* chunk: tokens a block of threads, set by booked */
    const int64_t *slots;
    uint32_t *refused;
    uint32_t *marks;             /* as in cuda.h */
    const int64_t *mark_numbers; /* the same */
    bool slots_ready;            /* the same */
    kvant_cuda_turning turning;  /* of keys, which are the first role then; start NULL: none */
    const int64_t *center_slots; /* the same as in cuda.h */
    QueryArgs queries; /* of the same tokens, for launch_append_few with a matrix; q NULL: none */
    /* Sealing: n_tokens is 64 per block, block i goes from open block from[i] to sealed block
     * to[i], with tokens[i] tokens or all 64. NULL when rows are appended. */
    const int32_t *from, *to, *tokens;
};

/* With what codes mean beyond AppendRole::codec, for each role. */
template <class Book> struct BookedAppendArgs : AppendArgs {
    Book books[2];
};

/* Rows, or open pages, into sealed pages of kinds with one scale per token. */
cudaError_t launch_append(const AppendArgs &args, uint32_t head_dim, int n_roles, int n_kv_heads,
                          cudaStream_t stream);

/* The same of wide codebooks. */
cudaError_t launch_append_wide(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);

/* The same of kinds whose codes are of several channels, all roles of one kind of chunk. */
cudaError_t launch_append_chunks(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                 int n_kv_heads, cudaStream_t stream);

/* The same of kinds of a trellis, all roles with as many states. */
cudaError_t launch_append_trellis(const AppendArgs &args, uint32_t head_dim, int n_roles,
                                  int n_kv_heads, cudaStream_t stream);

constexpr uint32_t MOST_FEW = 64;

/* At most MOST_FEW rows into open pages, or into pages of uniform codes and codebooks; all roles of
 * kinds that launch_append takes, or all wide, or all open. */
cudaError_t launch_append_few(const AppendArgs &args, uint32_t head_dim, int n_roles,
                              int n_kv_heads, cudaStream_t stream);

/* Rows into open pages. */
cudaError_t launch_append_open(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);
/* Open pages into sealed pages of kinds with groups of 32. */
cudaError_t launch_seal_groups(const AppendArgs &args, uint32_t head_dim, int n_roles,
                               int n_kv_heads, cudaStream_t stream);

/* Number `at` of all kv heads' channels less its centre, over its scale. */
KVANT_INLINE float centered(float x, const AppendRole &role, int at)
{
    if (role.center)
        x = __fsub_rn(x, role.center[at]);
    if (role.scale)
        x = __fdiv_rn(x, role.scale[at]);
    return x;
}

KVANT_INLINE bool is_finite(float x)
{
    return fabsf(x) <= 3.4028234e38f;
}

/* Says why the row of a token of the call is not stored, and marks the token. By one thread. */
template <class Args>
KVANT_INLINE void note_refusal(const Args &args, uint32_t token, int64_t slot, bool finite)
{
    if (args.refused)
        atomicOr(args.refused, finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE);
    if (!args.marks)
        return;
    const int64_t number = args.mark_numbers ? args.mark_numbers[token] : slot;
    atomicOr(args.marks + 1 + number / 32, 1u << number % 32);
    atomicOr(args.marks, 1u);
}

/* A warp's row, transformed; finite: before the transform. */
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
    transform(row, role.codec, weights_of(role.codec, role.weights, kv_head), lane);
    return row;
}

/* The sum of products as format.md orders it: 16 partial sums, of channels alike modulo 16;
 * all lanes have it. */
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
