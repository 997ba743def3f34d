/* in_place.h - rows that are fp16 where llama.cpp puts them, as long as they fit.
 *
 * A cache on a GPU has two forms. In place: rows lie in llama.cpp's own f16 layout, and graphs
 * go to ggml-cuda, whose kernels write and read them; answers and speed are those of an f16
 * cache. Compressed: rows lie in pages. in_place.c decides which form a graph finds, hand_over.c
 * takes rows from the first form to the second.
 *
 * A cache is in place while the highest cell that its graphs attend to (n_kv) fits as fp16 into
 * the memory that its pages have. Caches of several streams never are: views of further streams
 * lie at nominal strides, outside of this memory. */
#ifndef KVP_CUDA_IN_PLACE_H
#define KVP_CUDA_IN_PLACE_H

#include "gpu.h"

#define KVP_ASKED_TOKENS 64u /* of a prompt, whose queries are kept */
#define KVP_ASKED_BATCHES 4u /* that are kept at once */

enum { KVP_NO_ROW = -1, KVP_ROW_SOMEWHERE = -2 }; /* in positions */

struct kvp_gpu_place {
    size_t room;        /* cells that fit, a multiple of 256; 0: the cache is never in place */
    size_t n;           /* behind the last cell with a row */
    int32_t *positions; /* of rows, by cell; or one of the two above */
    uint32_t n_prompts; /* batches that were long enough to ask */
    bool learns;        /* threads make the first matrices of these rows */
    /* queries of prompts: by tensor, then by batch, KVP_ASKED_TOKENS tokens each */
    kvp_gpu_memory asked;
    size_t asked_row;   /* bytes of a token's */
    uint32_t n_asked;   /* batches */
    int32_t asked_positions[KVP_ASKED_BATCHES * KVP_ASKED_TOKENS];
    cu_event ready;
};

/* in_place.c. any: whether a cache of the GPU may be in place at all. prepare: before a graph, decides the form of each cache that it uses; false
 * without memory. asks: attention node of a prompt whose queries are kept, which ask does before
 * the node is computed. queries: where they are. takes: the node is over a cache in place, so it
 * is CUDA's. The lock is held, and b->positions is known. */
bool kvp_gpu_place_any(kvp_gpu *gpu);
bool kvp_gpu_place_prepare(kvp_gpu_backend *b, const abi_graph *graph);
bool kvp_gpu_place_asks(const kvp_gpu_backend *b, const abi_tensor *node);
bool kvp_gpu_place_ask(kvp_gpu_backend *b, const abi_tensor *node);
char *kvp_gpu_place_queries(const kvp_gpu_cells *cells);
bool kvp_gpu_place_takes(const abi_tensor *node);

/* in_place.c. Outside of graphs. read, write: rows of a tensor; false: the cache is not in
 * place, and for write cannot be. */
bool kvp_gpu_place_read(const kvp_kv *kv, size_t cell, size_t n, float *rows, kvant_status *status);
bool kvp_gpu_place_write(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                         kvant_status *status);
void kvp_gpu_place_forget(kvp_gpu_cache *cache);
void kvp_gpu_place_free(kvp_gpu_cache *cache);

/* hand_over.c. Rows of the cache go to pages, if they are in place. Our stream comes after what
 * CUDA enqueued.
 * False with a message: without memory, when they stay where they are, or when the GPU failed.
 * learn: threads begin to make matrices of the first n of them, with the queries that were kept;
 * graph: the one at hand, which says how keys turn. What cannot be learnt is left out. */
bool kvp_gpu_hand_over(kvp_gpu_cache *cache);
void kvp_gpu_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                         size_t n);

#endif /* KVP_CUDA_IN_PLACE_H */
