/* tiles.h - the arguments and the launch of attention for many query tokens. A thread block
 * processes a tile of query rows and unpacks every page once for all of them. */
#pragma once

#include "../attention/attention.h"

namespace kvant
{

/* Clears the counters before kernels that use them, unless they are zero already. */
inline cudaError_t clear_counters(const kvant_cuda_kernel_attention_args &args, cudaStream_t stream)
{
    return args.clear_counters ? cudaMemsetAsync(args.workspace, 0, COUNTER_BYTES, stream)
                               : cudaSuccess;
}

/* The data of a codec that unpacking reads. */
struct TileCodec {
    kvant_cuda_params params;
    kvant_cuda_trellis trellis;
    kvant_cuda_directions directions;     /* for chunks */
    float levels[KVANT_CUDA_WIDE_LEVELS]; /* for a wide codebook */
    bool looks_up; /* shared memory has room for the table of a trellis or of quaternions */
    int table_bytes;
};

/* Unpacked pages in device memory, for each pair (sequence, kv head) in order. A page is a matrix
 * of keys and a matrix of values, in the layout that they have in shared memory (operands.cuh). */
struct Unpacked {
    uint8_t *matrices;
    float4 *units; /* as in TileRows */
    int pages;     /* pages per pair */
};

/* The tiles of query rows of the pairs (sequence, kv head) of a launch. */
struct TileShape : AttentionArgs {
    int first_pair, pairs;
    int tiles;      /* the most tiles of a pair */
    int splits;     /* parts of a sequence, for different thread blocks */
    int row_groups; /* groups of 64 query rows per tile */
    int stages;     /* unpacked pages that shared memory holds */
    Unpacked unpacked;
};

struct TileArgs : TileShape {
    TileCodec keys, values;
    bool sealed_ready; /* as in cuda_kernels.h */
    int cleared;       /* counters that unpacking clears for the kernel behind it */
    /* pages of codes that shared memory holds: 4, 3, or 0 when codes are read from device memory */
    int ring;
    int k_table_at, v_table_at, ring_at, k_page,
        v_page; /* offsets in shared memory, and bytes of pages in the ring */
};

constexpr int MOST_STAGES = 4, MOST_RING = 4;

/* The most query rows of a thread block. */
constexpr int MOST_TILE_ROWS = 128;

struct TileKernel {
    const void *kernel;  /* its argument is TileArgs; NULL: there is no such kernel */
    int threads, groups; /* warpgroups that multiply, 64 rows each */
    int fixed_bytes
        [2][2]; /* bytes of shared memory without tables and the ring, by row groups and stages */
};

/* The kernel that unpacks pages into device memory, and the kernel that reads them there. */
struct UnpackedKernels {
    const void *unpack; /* its argument is TileArgs */
    const void *attend; /* its argument is TileShape */
    int unpack_threads, unpack_groups, attend_threads, attend_groups;
    int key_bytes, value_bytes;       /* bytes of a matrix */
    int shared_bytes[2][MOST_STAGES]; /* for attend, by row groups and stages */
};

/* A kernel of code_pairs.h, for up to 64 rows. */
struct CodesKernel {
    const void *kernel; /* its argument is TileArgs; NULL: there is no such kernel */
    int threads, shared_bytes;
};

template <class K, class V, int D> CodesKernel pair_codes(int rows);
template <int D> TileKernel tile_kernel_of();
template <int D> UnpackedKernels unpacked_kernels_of();

/* Bytes of the workspace behind the counters: room for a partial result per multiprocessor. */
size_t tile_workspace(uint32_t head_dim, uint32_t multiprocessors);

/* Whether a kernel of codes.cuh exists for the problem. If so, it is faster than decode kernels. */
bool prefers_codes(const kvant_cuda_kernel_attention_args &args, int shared_bytes);

/* Launches tile kernels. KVANT_ERR_UNSUPPORTED when no shape fits into shared_bytes. The
 * AttentionArgs part is filled as for a kernel without byte keys. Counters and partial results lie
 * in the first `used` bytes of the workspace, unpacked pages behind them. */
kvant_status launch_tiles(const kvant_cuda_kernel_attention_args &args, const AttentionArgs &common,
                          int multiprocessors, int shared_bytes, size_t used, cudaStream_t stream);

} // namespace kvant
