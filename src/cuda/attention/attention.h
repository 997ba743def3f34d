/* attention.h - the arguments of an attention launch and the table of kernels. The dispatcher
 * shares it with the files that instantiate kernels: one file per pair of code kinds, so that they
 * compile in parallel. */
#pragma once

#include "../params.h"

#include <cuda_runtime.h>

namespace kvant
{

/* Workspace: counters for every thread block, one per column, then two partial results for each
 * (attention.cuh says why two). A multiprocessor has one block, or two. */
constexpr uint32_t MAX_BLOCKS = 1024;
constexpr uint32_t TILE_COLUMNS = 8;  /* query rows that share an operand: the columns of an MMA */
constexpr uint32_t MOST_COLUMNS = 16; /* of a kernel: two MMAs an unpacked operand */
/* Pages of a thread block at least. Two open ones keep 8 warps busy, each with 16 tokens
 * (open.cuh). */
constexpr int LEAST_PAGES = 2;
constexpr size_t COUNTER_BYTES = MAX_BLOCKS * MOST_COLUMNS * sizeof(uint32_t);

__host__ __device__ constexpr size_t partial_floats(uint32_t head_dim)
{
    return MOST_COLUMNS * (head_dim + 2); /* rows, then maximum and sum of each column */
}

/* At least the bytes of a QueryTile (query.cuh). */
__host__ __device__ constexpr size_t query_tile_bytes(uint32_t head_dim)
{
    return MOST_COLUMNS * (2 * (head_dim + 8) + head_dim / 4 + 48);
}

struct PageSource {
    const uint8_t *base;
    size_t block_stride, head_stride;
    uint32_t bytes; /* of a page that are read: codes and metadata, without padding */
};

/* The places of the scales of groups: a group has 2^log channels or tokens, a page n_scales
 * groups. */
struct GroupPlaces {
    int log, n_scales;
    int hybrid; /* a scale's sign says that it has a zero point */
};

/* The newest token of sequence b is its token cells[b] - first - b * stride. */
struct NewTokens {
    const int64_t *cells; /* NULL: not known */
    int64_t first, stride;
};

/* In the order in which a kernel needs them: it begins with a cold constant cache. */
struct AttentionArgs {
    const int32_t *lengths;
    int batch, max_tokens;
    int kv_heads,
        groups; /* groups of query heads per kv head, when every sequence has one query token */
    const int32_t *table;
    size_t table_stride;
    PageSource k, v;   /* blocks that the table numbers 0 and up */
    int heads_a_group; /* query heads of a group; the last may have fewer */
    int heads_a_kv;    /* query heads of a kv head */
    kvant_cuda_type type;
    const void *q;
    size_t q_batch_stride, q_head_stride;
    void *out;
    kvant_cuda_type out_type;
    size_t out_batch_stride, out_head_stride;
    float *lse;
    const float *v_center, *k_scale, *v_scale;
    const float *k_center; /* as in cuda.h, like the next five */
    const float *page_offsets;
    /* If block_centers.start is not NULL, page_offsets has no numbers yet. Kernels that are not
     * general then compute them from block_centers. */
    kvant_cuda_block_centers block_centers;
    const float *plain_q; /* queries before any matrix */
    size_t plain_batch_stride, plain_head_stride;
    const uint8_t *matrices; /* NULL: all keys are alike */
    int n_matrices;
    size_t q_matrix_stride;
    uint8_t q_ids[KVANT_CUDA_MOST_MATRICES];
    float scale_log2; /* scale * log2(e) */
    uint32_t *counters;
    float *partials;
    uint8_t
        *further_tiles; /* of queries (further_tiles.cuh): n_matrices - 1 for each thread block */
    kvant_cuda_rotation k_rotation, v_rotation;
    uint32_t k_bytes[KVANT_CUDA_TABLE_WORDS],
        v_bytes[KVANT_CUDA_TABLE_WORDS]; /* codebooks, magnitudes of a trellis */
    int table_ready;                     /* as in cuda.h */
    int n_late;                          /* thread blocks that begin late (schedule.cuh) */
    NewTokens newest;
    uint32_t one; /* 1, unknown to the compiler (dequant.cuh) */
    float k_step, v_step, k_bias, v_bias;
    int k_symmetric, v_symmetric;
    float k_offset, v_offset; /* uniform codes: number = scale * (code + offset) when symmetric */
    GroupPlaces k_groups, v_groups; /* of uniform codes with groups */
    PageSource k_open, v_open;      /* block i of these is -1 - i in the table */

    /* Only general kernels read these. */
    int query_tokens;            /* per sequence, at most */
    const int32_t *query_starts; /* or NULL; as in cuda.h */
    size_t q_token_stride, out_token_stride;
    int causal, window; /* window: INT_MAX for none */
    float softcap_log2; /* softcap * log2(e), 0: none */
    float max_bias;     /* ALiBi, 0: none */
    const uint16_t *mask;
    size_t mask_token_stride;
    const float *sinks;

    /* Only kernels that compute page_offsets read these. */
    float *own_offsets; /* page_offsets */
    int queries_ready;  /* plain_q may be read before wait_for_prior */
};

/* The arguments of kernels of pairs whose keys have a codebook of 64 levels. */
struct WideAttentionArgs : AttentionArgs {
    float k_levels[64];
};

/* The arguments of kernels of pairs with codes of several channels. More than 4 KB: CUDA 12.1 and
 * its driver, or later. */
struct ChunkAttentionArgs : WideAttentionArgs {
    kvant_cuda_directions k_directions, v_directions;
};

struct AttentionKernel {
    /* takes AttentionArgs, or arguments that begin with them (WideAttentionArgs,
     * ChunkAttentionArgs); NULL: there is none */
    const void *kernel;
    int threads, shared_bytes;
    int shared_least; /* a device whose blocks have less shared memory may lack the kernel's body */
    int columns;      /* query rows per pass over the pages */
    bool byte_keys;   /* codebook keys are multiplied as signed bytes */
    int ptx_least;    /* code made from older PTX has no body */
    int blocks;       /* on a multiprocessor at once: 1 or 2 */
    bool finds_offsets; /* computes page_offsets from block_centers */
};

/* With `large`, a block has up to 227 KB of shared memory, for compute_90 and later. Otherwise it
 * has at most 99 KB, for every GPU. With `open`, the table may name exact pages. With `many`, keys
 * have several matrices, or centres. With `general`, a sequence has several query tokens, or there
 * are windows or masks, and open and many as well. With `wide`, a pass has 16 columns, not 8. With
 * `two_blocks`, two thread blocks share a multiprocessor if the pair has such a kernel. */
struct KernelChoice {
    bool large, open, many, general, wide, two_blocks;
};

/* The kernel for a pair of attention_pairs.h and a head_dim; .kernel is NULL when the choice does
 * not exist. */
template <class K, class V, int D> AttentionKernel pair_attention(KernelChoice choice);

} // namespace kvant
