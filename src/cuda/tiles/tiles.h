/* tiles.h - the arguments and the launch of attention for many query tokens: a thread block takes
 * a tile of query rows and unpacks every page once for all of them. */
#pragma once

#include "../attention/attention.h"

namespace kvant
{

/* What unpacking needs to know of a codec. */
struct TileCodec {
    kvant_cuda_params params;
    kvant_cuda_trellis trellis;
    kvant_cuda_directions directions;                    /* of chunks */
    uint32_t index_bits;                                 /* of quaternions */
    float levels[KVANT_CUDA_WIDE_LEVELS];                /* of a wide codebook */
    bool looks_up; /* the table of a trellis, or of quaternions, has found room */
    int table_bytes;
};

struct TileArgs : AttentionArgs {
    TileCodec keys, values;
    int tiles;  /* per sequence and kv head, at most */
    int splits; /* parts of a sequence that different thread blocks take */
    int row_groups; /* of 64 query rows: of a tile */
    bool by_pages;  /* several warpgroups multiply the same rows, each with pages of its own */
    int stages; /* unpacked pages in shared memory: 1 or 2 */
    int ring;   /* pages of codes in shared memory: 4, 3, or 0 when codes are read where they lie */
    int k_table_at, v_table_at, ring_at, k_page, v_page; /* bytes: places in shared memory, and of pages in the ring */
};

constexpr int MOST_STAGES = 2;

struct TileKernel {
    const void *kernel; /* takes TileArgs; NULL: there is none */
    int threads, groups; /* warpgroups that multiply, 64 rows each */
    int fixed_bytes[2][MOST_STAGES]; /* of shared memory, without tables and the ring: by row groups and stages */
};

template <int D> TileKernel tile_kernel_of();

constexpr int MOST_RING = 4;

/* Query rows of a thread block, at most. */
__host__ __device__ constexpr int most_tile_rows(uint32_t head_dim)
{
    return head_dim > 128 ? 64 : 128;
}

/* Bytes of the workspace behind the counters: a partial result for each multiprocessor. */
size_t tile_workspace(uint32_t head_dim, uint32_t multiprocessors);

/* KVANT_ERR_UNSUPPORTED when no shape fits into shared_bytes. args' part of AttentionArgs is filled
 * for a kernel without byte keys; counters and partials lie in the workspace. */
kvant_status launch_tiles(const kvant_cuda_attention_args &args, const AttentionArgs &common, int multiprocessors,
                          int shared_bytes, cudaStream_t stream);

} // namespace kvant
