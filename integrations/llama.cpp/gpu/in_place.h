/* in_place.h - rows that are fp16 where llama.cpp puts them, as long as they fit.
 *
 * A layer's cache on a GPU has two forms. In place, rows lie in llama.cpp's own f16 layout, and
 * ggml-cuda's kernels write and read them. Answers and speed are as with an f16 cache. Compressed,
 * rows lie in pages. The form of a layer in each graph is decided in in_place.c. While all layers
 * are in place, ready.c learns transforms. Then hand_over.c takes rows from the first form to the
 * second.
 *
 * A cache is in place while the highest cell that its graphs attend to (n_kv) fits as fp16 into the
 * memory that its pages have. Before that memory is full its layers go to pages one after another.
 * So for some steps the first layers are compressed and the last layers are in place. A batch of a
 * prompt that does not fit takes all layers to pages, one after another in its graph. All layers
 * share the page table, which also says where the rows of a layer in place will be stored. Caches
 * of several streams are never in place, because views of further streams lie at nominal strides,
 * outside of this memory. */
#pragma once

#include "gpu.h"

/* values in positions: a cell without a row; a row at an unknown position */
enum { KVP_NO_ROW = -1, KVP_ROW_SOMEWHERE = -2 };

struct kvp_gpu_in_place {
    size_t room; /* cells that fit, a multiple of 256; 0: the cache is never in place */
    kvant_lesson_in_place lesson;
    bool whole;            /* all cells fit, so nothing is ever compressed */
    size_t n;              /* the last cell with a row, plus one */
    int32_t *positions;    /* by cell: the position of its row, or one of the two values above */
    uint32_t n_prompts;    /* batches that were long enough to keep queries of */
    bool learns;           /* first key transforms are learned from these rows */
    bool teaches;          /* the graph at hand takes these lessons, layer by layer */
    size_t n_plain;        /* tensors that have no centre because none could be learned */
    bool planned;          /* blocks have transforms and pages, and some layers are compressed */
    bool short_of_memory;  /* a hand-over lacked memory when it was not yet necessary */
    kvp_gpu_memory beside; /* room for a tensor's rows while they are stored */
};

/* in_place.c. The lock is held for all of these. */

/* Whether some cache of the GPU may be in place at all. */
bool kvp_gpu_in_place_any(kvp_gpu *gpu);

/* Decides before a graph which form each layer has. b->positions must be known. False: there is no
 * memory to compress rows that do not fit, or the GPU failed. */
bool kvp_gpu_in_place_prepare(kvp_gpu_backend *b, const abi_graph *graph);

/* Comes after such a graph was enqueued. If a prompt ends with it near the end of the room, some
 * layers are compressed, so that no token after it has to compress several. False: the GPU
 * failed. */
bool kvp_gpu_in_place_end_graph(kvp_gpu_backend *b, const abi_graph *graph);

/* Whether the queries of an attention node are kept before the node is computed, which is so for
 * prompts. */
bool kvp_gpu_in_place_keeps_queries(const kvp_gpu_backend *b, const abi_tensor *node);

/* Whether a node uses a layer in place, so that ggml-cuda computes it. */
bool kvp_gpu_in_place_uses(const abi_tensor *node);

/* Read and write rows of a tensor outside of graphs. False: the tensor is not in place, and write
 * cannot put the whole cache in place. */
bool kvp_gpu_in_place_read(const kvp_kv *kv, size_t cell, size_t n, float *rows,
                           kvant_status *status);
bool kvp_gpu_in_place_write(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                            kvant_status *status);
void kvp_gpu_in_place_forget(kvp_gpu_cache *cache);
void kvp_gpu_in_place_free(kvp_gpu_cache *cache);

/* lesson.c. Whether the tokens of the first n rows are too much alike to learn a transform for all
 * later rows from. False without memory. */
bool kvp_gpu_in_place_rows_are_alike(const kvp_gpu_cache *cache, size_t n);

/* ready.c. These functions need all layers in place. A tensor from which nothing can be learned is
 * stored without a transform. */

/* Begins, once, to learn key transforms from the first n rows, and from queries if some were kept.
 * The current graph shows how RoPE rotates keys. */
void kvp_gpu_in_place_learn(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                            size_t n);

/* Decides before a graph whose queries are kept whether it takes the lesson of each layer when the
 * layer's rows are enqueued. The record has the graph's rows already. */
void kvp_gpu_in_place_plan_teaching(kvp_gpu_cache *cache, const abi_graph *graph);

/* Takes the lesson of a layer in such a graph, before the layer's attention. */
void kvp_gpu_in_place_teach(kvp_gpu_backend *b, const abi_tensor *node);

/* Whether transforms are learned that are not in force yet. */
bool kvp_gpu_in_place_waits(const kvp_gpu_cache *cache);

/* Puts the transforms of at most n further tensors in force; the GPU's stream waits for them. b:
 * the back end whose graphs use the cache, or NULL outside of graphs. `settle_tensor` does so for
 * one tensor. */
void kvp_gpu_in_place_settle(kvp_gpu_backend *b, kvp_gpu_cache *cache, size_t n);
void kvp_gpu_in_place_settle_tensor(kvp_gpu_backend *b, kvp_kv *kv);

/* Does the part of learn and settle that is due before a graph with n earlier rows. It also
 * requests the transforms of further position buckets. short_step: the graph has few tokens. */
void kvp_gpu_in_place_prepare_next(kvp_gpu_backend *b, kvp_gpu_cache *cache, const abi_graph *graph,
                                   size_t n, bool short_step);

/* hand_over.c */

size_t kvp_gpu_n_layers_in_place(const kvp_gpu_cache *cache);

/* Compresses the rows of the next n layers. The work is enqueued on our stream, which must follow
 * CUDA's. Without memory all rows stay where they are; with `must` this is an error with a message,
 * and without it the result is true. So without `must`, false means that the GPU failed. */
bool kvp_gpu_hand_over_layers(kvp_gpu_cache *cache, size_t n, bool must);

/* Compresses all layers, as with `must`, one by one in the graph at hand. A layer takes its
 * transform and is compressed before the graph's rows of the layer are stored. The GPU computes the
 * layers before it meanwhile. first_matrix.c calls `layer` for a layer, and `finish` after the
 * graph. */
bool kvp_gpu_hand_over_in_graph(kvp_gpu_cache *cache);
bool kvp_gpu_hand_over_layer(kvp_kv *kv);
void kvp_gpu_hand_over_finish(kvp_gpu_cache *cache);

/* Compresses all layers outside of graphs, as with `must`. */
bool kvp_gpu_hand_over(kvp_gpu_cache *cache);

/* Frees the memory that a hand-over needed, and reports rows that kernels refused. The GPU must
 * have done its work. */
void kvp_gpu_hand_over_end(kvp_gpu_cache *cache);
