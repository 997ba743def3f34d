/* gpu_attention.h - decode attention of libkvant_cuda on one shape: pages, table, query, and the
 * call that `kvant bench cuda` times. */
#ifndef KVANT_TOOLS_GPU_ATTENTION_H
#define KVANT_TOOLS_GPU_ATTENTION_H

#include "gpu.h"

typedef struct gpu_shape {
    uint32_t batch, n_heads, n_kv_heads, head_dim;
    uint32_t n_tokens, query_tokens; /* of each sequence; the query tokens are its last ones */
} gpu_shape;

typedef struct gpu_attention {
    const gpu *gpu;
    gpu_shape shape;
    kvant_cuda_codec *k, *v, *k_open, *v_open;
    gpu_address pool, open_pool, rows, slots, table, lengths, from, q, out, workspace;
    size_t page_bytes[2], block_bytes, open_page_bytes; /* a block: the K pages of all kv heads, then the V pages */
    uint32_t n_blocks;
    double bytes; /* of keys and values that a call reads, as stored */
} gpu_attention;

/* Fills the pages with normally distributed rows, which repeat after a few thousand tokens; blocks
 * are in random order. False after complaining; gpu_attention_free may be called in any case. */
bool gpu_attention_create(gpu_attention *a, const gpu *g, const gpu_shape *shape, const char *k, const char *v);
void gpu_attention_free(gpu_attention *a);

/* Enqueues one call. */
bool gpu_attention_run(const gpu_attention *a);

/* ||out - want|| / ||want|| of the last call's first query head of the first sequence's last token,
 * want being softmax in double precision over the decoded pages. NaN after complaining. */
double gpu_attention_error(const gpu_attention *a);

#endif /* KVANT_TOOLS_GPU_ATTENTION_H */
