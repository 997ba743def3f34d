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
    kvant_cuda_directions directions;     /* of chunks */
    uint32_t index_bits;                  /* of quaternions */
    float levels[KVANT_CUDA_WIDE_LEVELS]; /* of a wide codebook */
    bool looks_up; /* the table of a trellis, or of quaternions, has found room */
    int table_bytes;
};

/* Unpacked pages in device memory: those of a pair (sequence, kv head), then those of the next one.
 * A page is a matrix of keys and one of values as they lie in shared memory (operands.cuh). */
struct Unpacked {
    uint8_t *matrices;
    float4 *units; /* as in TileRows */
    int pages;     /* of a pair */
};

/* Tiles of query rows of the pairs (sequence, kv head) of a launch. */
struct TileShape : AttentionArgs {
    int first_pair, pairs;
    int tiles;      /* of a pair, at most */
    int splits;     /* parts of a sequence that different thread blocks take */
    int row_groups; /* of 64 query rows: of a tile */
    int stages;     /* unpacked pages in shared memory */
    Unpacked unpacked;
};

struct TileArgs : TileShape {
    TileCodec keys, values;
    int ring; /* pages of codes in shared memory: 4, 3, or 0 when codes are read where they lie */
    int k_table_at, v_table_at, ring_at, k_page,
        v_page; /* bytes: places in shared memory, and of pages in the ring */
};

constexpr int MOST_STAGES = 4, MOST_RING = 4;

/* Query rows of a thread block, at most. */
constexpr int MOST_TILE_ROWS = 128;

struct TileKernel {
    const void *kernel;  /* takes TileArgs; NULL: there is none */
    int threads, groups; /* warpgroups that multiply, 64 rows each */
    int fixed_bytes
        [2][2]; /* of shared memory, without tables and the ring: by row groups and stages */
};

/* Kernels that unpack pages into device memory, and that read them there. */
struct UnpackedKernels {
    const void *unpack; /* takes TileArgs */
    const void *attend; /* takes TileShape */
    int unpack_threads, unpack_groups, attend_threads, attend_groups;
    int key_bytes, value_bytes;       /* of a matrix */
    int shared_bytes[2][MOST_STAGES]; /* of attend: by row groups and stages */
};

/* For up to 64 rows, of code_pairs.h. */
struct CodesKernel {
    const void *kernel; /* takes TileArgs; NULL: there is none */
    int threads, shared_bytes;
};

template <class K, class V, int D> CodesKernel pair_codes(int rows);
template <int D> TileKernel tile_kernel_of();
template <int D> UnpackedKernels unpacked_kernels_of();

/* Bytes of the workspace behind the counters: a partial result for each multiprocessor. */
size_t tile_workspace(uint32_t head_dim, uint32_t multiprocessors);

/* Whether there is a kernel of codes.cuh for the problem: it is faster than decode kernels then. */
bool prefers_codes(const kvant_cuda_kernel_attention_args &args, int shared_bytes);

/* KVANT_ERR_UNSUPPORTED when no shape fits into shared_bytes. args' part of AttentionArgs is filled
 * for a kernel without byte keys; counters and partials lie in the first `needed` bytes of the
 * workspace, unpacked pages in what follows. */
kvant_status launch_tiles(const kvant_cuda_kernel_attention_args &args, const AttentionArgs &common,
                          int multiprocessors, int shared_bytes, size_t needed,
                          cudaStream_t stream);

} // namespace kvant
