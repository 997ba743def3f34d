/* transforms.h - transforms of a cache's rows on a GPU: how centres, scales and key transforms are
 * learned, which blocks use which, and how keys move to other positions. It does not own pages. */
#pragma once

#include "types.h"

/* The id of a transform stands for all steps that the keys of a block went through before they were
 * coded. Ids below KVP_MOST_BUCKETS are the key transforms of position buckets. All other ids
 * belong to keys that a context shift moved (shift.c). Each of these ids stands for the transform
 * of a bucket and for a distance: the keys moved by it since they were stored. An id with by = 0 is
 * free. */
typedef struct kvp_gpu_lineage {
    uint32_t bucket;
    int32_t by;
} kvp_gpu_lineage;

/* Consecutive rows of a batch in blocks whose keys have the same transform. */
typedef struct kvp_gpu_run {
    size_t first, n;
    uint32_t transform; /* its id */
} kvp_gpu_run;

/* The rotation of a position bucket's centre to the position of a block (centers.c, kvant/cuda.h:
 * kvant_cuda_block_centers). */
typedef struct kvp_gpu_centers {
    int32_t *positions;    /* by block: position of its first cell, or KVP_NO_POSITION */
    uint32_t first, end;   /* blocks whose phases the GPU does not have yet */
    bool used;             /* keys of some layer have centres per block */
    kvp_gpu_memory phases; /* by block, head_dim numbers each, once they are used */
    kvp_gpu_memory pairs;
    float *host; /* a copy of phases in the computer's memory */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope; /* the RoPE of the layers whose blocks have centres; size 0: not known */
    uint32_t head_dim;
    bool uneven; /* some layers have another RoPE, so there are no further position buckets */
} kvp_gpu_centers;

#define KVP_NO_POSITION INT32_MIN

/* The transform and the centre of each block's keys. */
typedef struct kvp_gpu_buckets {
    uint8_t *of;                                   /* by block: the id of its transform */
    kvp_gpu_lineage lineages[KVP_MOST_TRANSFORMS]; /* by id */
    bool moved;                                    /* some ids belong to keys that moved */
    bool plain;                                    /* some blocks have the id KVP_PLAIN */
    /* A bit for each id with the transform of a restored state, which serves no new rows except
     * those that continue its sequence, and the position bucket that it was made for. */
    uint32_t foreign;
    uint8_t foreign_bucket[KVP_MOST_BUCKETS];
    kvant_lesson_buckets lessons;      /* which position buckets have transforms */
    bool changed;                      /* the ids of blocks with rows have changed */
    uint8_t used[KVP_MOST_TRANSFORMS]; /* ids of all blocks with rows */
    uint32_t n;                        /* number of ids in `used` */
    /* by block, for attention: index in `used`; behind these, numbers of centres */
    kvp_gpu_memory numbers;
    uint8_t *host; /* room for these */
    kvp_gpu_centers centers;
    kvp_gpu_run *runs; /* runs of the current batch */
    size_t n_runs;
    int64_t *last; /* cells of that batch */
    size_t n_last, most_last;
} kvp_gpu_buckets;

/* Exact pages in the order of their blocks, with the transforms and written rows of these
 * blocks. */
typedef struct kvp_gpu_listed {
    uint32_t page;
    uint8_t transform;
    uint64_t written; /* a bit per row */
} kvp_gpu_listed;

typedef struct kvp_gpu_page_list {
    uint32_t n;
    kvp_gpu_listed pages[KVP_MOST_PAGES];
} kvp_gpu_page_list;

/* Rows of exact pages, which are decoded and stored again when their transform changes. */
typedef struct kvp_gpu_held_rows {
    kvp_gpu_page_list list;
    float *rows; /* on the GPU, of one layer */
    /* On the GPU, by row: its place in exact pages and its cell, or -1: it was never written. Then
     * the numbers of the pages. */
    const int64_t *slots, *cells;
    const int32_t *pages;
} kvp_gpu_held_rows;

/* Queries of prompts (queries.c). A batch holds KVP_KEPT_TOKENS tokens' queries for each layer. */
typedef struct kvp_gpu_kept_queries {
    kvp_gpu_memory batches[KVP_KEPT_BATCHES];
    size_t row; /* bytes of one token's queries; 0: none were kept */
    uint32_t n; /* batches that were kept since the cache was cleared */
    bool alike; /* their tokens are too much alike, so the next batch begins again */
    int32_t positions[KVP_KEPT_BATCHES * KVP_KEPT_TOKENS];
    kvp_gpu_memory keys;      /* copies of keys, likewise (lesson.c), while they are learned from */
    size_t n_layers;          /* that keys has room for */
    kvp_gpu_memory workspace; /* of the layers' lessons, in parts (learner.c) */
} kvp_gpu_kept_queries;

/* learn.c. `kvp_gpu_learn` learns them from n rows on the GPU, at least KVANT_LEARN_ROWS. It waits
 * for the stream. */
bool kvp_gpu_learn(kvp_kv *kv, const float *rows, size_t stride, size_t n, cu_stream stream);

/* Called before a batch. Notes the batch's cells if there are too few rows so far, or learns from
 * the cells that were noted before. The lock is held. */
bool kvp_gpu_learn_before(kvp_gpu_cache *cache, const int64_t *batch, size_t n, cu_stream stream);

/* Learns from n rows in the computer's memory, at least KVANT_LEARN_ROWS, of a cache that noted no
 * cells. Values learn nothing from rows that are too much alike, and get neither centre nor scale.
 * False without a message. */
bool kvp_gpu_learn_from(kvp_gpu_cells *cells, const float *rows, size_t n);

/* `kvp_gpu_learn_written` is the same as learn_before for rows in the computer's memory that are
 * written. `kvp_gpu_copy_first` is for blocks that are copied. */
bool kvp_gpu_learn_written(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);
bool kvp_gpu_copy_first(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);

/* A restored transform: one codec per kv head, and the centres of a block at position 0 (NULL: all
 * blocks share the codecs' centres). */
typedef struct kvp_gpu_learned_transform {
    kvant_codec **codecs;
    float *start;
    void *kept; /* as records hold it; NULL without memory */
} kvp_gpu_learned_transform;

/* first_matrix.c. The caller holds the lock. On false there is a message.
 *
 * prepare comes after the plan decided for a step and before blocks are opened. Lessons are taken,
 * and matrices come in force if rows have to be sealed. kept: all rows of the step go to exact
 * pages only. changes: of the plan.
 *
 * mark comes after blocks were opened. Sealed blocks keep their transform.
 *
 * teach comes before each layer's attention in a graph from whose rows kvant learns. It takes the
 * layer's lesson, which is enqueued behind the graph.
 *
 * settle does the work of prepare, before another caller seals rows.
 *
 * seal comes before a tensor gets rows in a graph, and before attention on it. If the layers of the
 * cache take their matrices one by one in this graph, the tensor's layer takes its own now. Its
 * blocks are sealed, or its rows in place are compressed. The function `finish` does so after the
 * graph for all layers that are left. The function `next` does so for the first layer that is left,
 * unless the layer takes its matrix only because rows have to be sealed.
 *
 * affine learns centre and scale from n rows in the computer's memory, for keys that have no matrix
 * yet.
 *
 * join puts the matrix of a tensor in force.
 *
 * end finds out whether keys of the cache learn still.
 *
 * in_graph makes the matrix from the rows of a long step, which are sealed at once. values: the
 * values of the same tokens, or NULL. */
bool kvp_gpu_first_matrix_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step,
                                  const kvant_plan_changes *changes, bool kept);
void kvp_gpu_first_matrix_mark(kvp_gpu_cache *cache, const kvp_gpu_step *step);
void kvp_gpu_first_teach(kvp_gpu_cells *cells);
bool kvp_gpu_first_matrix_settle(kvp_gpu_cache *cache);
bool kvp_gpu_first_seal(kvp_kv *kv);
bool kvp_gpu_first_next(kvp_gpu_cache *cache);
bool kvp_gpu_first_finish(kvp_gpu_cache *cache);
bool kvp_gpu_first_affine(kvp_gpu_cells *cells, const float *rows, size_t n);
bool kvp_gpu_first_matrix_join(kvp_kv *kv);
void kvp_gpu_first_matrix_end(kvp_gpu_cache *cache);
bool kvp_gpu_first_matrix_in_graph(kvp_gpu_backend *b, const abi_tensor *node,
                                   const abi_tensor *values);

/* lesson.c. Whether tokens of a batch differ enough to learn from. The first layer that asks
 * examines them for all layers. values: the node that stores its values, or NULL. */
bool kvp_gpu_tokens_differ(kvp_gpu_backend *b, const abi_tensor *values);

/* queries.c. keep: of an attention node, without an error where there is no memory. find: those
 * that were kept of a layer. unneeded: a cache has its first key transforms, so kept queries and
 * the workspace of lessons may be freed when the cache has no work left on the GPU. */
bool kvp_gpu_queries_keep(kvp_gpu_backend *b, const abi_tensor *node);
void kvp_gpu_queries_find(const kvp_gpu_cells *cells, struct kvp_gpu_learner_input *lesson);
void kvp_gpu_queries_forget(kvp_gpu_cache *cache);
bool kvp_gpu_queries_unneeded(const kvp_gpu_cache *cache);
void kvp_gpu_queries_free(kvp_gpu_cache *cache);

/* Whether this many bytes are less than a quarter of the free memory. The rest is left to other
 * programs. */
bool kvp_gpu_fits_free_memory(const kvp_gpu *gpu, size_t bytes);

/* learner.c. `kvp_gpu_learner_begin` resets the learner of a cache without rows.
 * `kvp_gpu_have_matrix_codecs` makes the kernels' codecs for keys with a matrix, whatever its
 * numbers; false without memory. `kvp_gpu_learned_bytes`: what a layer keeps of n transforms;
 * `kvp_gpu_learning_bytes`: working memory of all layers while they are made. */
void kvp_gpu_learner_begin(kvp_gpu_cells *cells);
void kvp_gpu_learner_free(kvp_gpu_cells *cells);
bool kvp_gpu_have_matrix_codecs(kvp_gpu_cells *cells);
size_t kvp_gpu_learned_bytes(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n);
size_t kvp_gpu_learning_bytes(uint32_t head_dim, uint32_t n_kv_heads, uint32_t n);

/* matrices.c. The matrices of a transform, of which one form is there: the compact one, or weights
 * and inverse weights. If its position bucket has none, the last bucket before it that has matrices
 * counts. `kvp_gpu_expand` makes the inverse weights (rows: both) of a compact form, in memory that
 * is the stream's until the next call, or an append, of any layer. */
typedef struct kvp_gpu_matrix {
    const void *compact;
    const float *key_transform, *inverse_key_transform;
} kvp_gpu_matrix;
kvp_gpu_matrix kvp_gpu_matrix_of(const kvp_gpu_cells *cells, uint32_t transform);
kvant_status kvp_gpu_expand(const kvp_gpu_cells *cells, bool rows, kvp_gpu_matrix *matrix);

/* centers.c. The lock is held for all of these functions.
 *
 * `kvp_gpu_centers_set_rope` notes how RoPE rotates a layer's keys, before the layer has a key
 * transform. It returns whether the layer's blocks can have centres.
 *
 * `kvp_gpu_centers_assign` says that the rows of a block begin at this position from now on.
 * `kvp_gpu_centers_move` says that the keys of a block moved, and that its transform has changed.
 * `kvp_gpu_centers_copy` copies the centre of a block to another block.
 *
 * `kvp_gpu_centers_upload` copies phases to the GPU: all of them when it has none, else the phases
 * that changed. False with a message.
 *
 * `kvp_gpu_block_centers_of` returns the rotating centres of keys, for blocks that are counted from
 * first_block on.
 *
 * `kvp_gpu_center_rows` subtracts the rows' centres from rows in cells of the GPU (add: adds them),
 * where keys have centres. `kvp_gpu_center_blocks` does so for the rows of blocks (open: of exact
 * pages). */
bool kvp_gpu_centers_set_rope(const kvp_kv *kv, const abi_tensor *rows);
void kvp_gpu_centers_assign(kvp_gpu_cache *cache, size_t block, int32_t position);
void kvp_gpu_centers_move(kvp_gpu_cache *cache, size_t block, int32_t by);
void kvp_gpu_centers_copy(kvp_gpu_cache *cache, size_t block, size_t to);
bool kvp_gpu_centers_upload(kvp_gpu_cache *cache, cu_stream stream);
kvant_cuda_block_centers kvp_gpu_block_centers_of(const kvp_gpu_cells *keys, size_t first_block);
kvant_status kvp_gpu_center_rows(const kvp_gpu_cells *keys, const float *rows, size_t stride,
                                 size_t n, const int64_t *cells, bool add, float *out);
kvant_status kvp_gpu_center_blocks(const kvp_gpu_cells *keys, bool open, size_t first, size_t n,
                                   bool add, float *rows);
void kvp_gpu_centers_forget(kvp_gpu_cache *cache);
void kvp_gpu_centers_free(kvp_gpu_cache *cache);

/* shift.c. Executes a ROPE node on keys, which moves them. True: it was executed or failed, as
 * *status says. False: the keys have to be decoded, rotated and encoded again. The lock is held. */
bool kvp_gpu_shift(kvp_gpu_backend *b, const abi_tensor *node, int32_t *status);

/* shift_keys.c. The lock is held. A function that returns false leaves the message to its caller.
 *
 * `kvp_gpu_can_shift`: whether keys of a layer can move by getting other transforms.
 * `kvp_gpu_shift_matrices` computes the matrices of keys that moved, after a shift or after a
 * change of the matrices that they are made of. It needs no more memory after
 * `kvp_gpu_shift_reserve`, and overwrites the batch room. `kvp_gpu_shift_mixed` moves keys that
 * move by another number of positions than their block. `kvp_gpu_shift_reset` encodes all keys that
 * moved once more, so that their blocks have ids of position buckets again. `kvp_gpu_shift_free`
 * frees the matrices, when no work uses them any more. */
bool kvp_gpu_can_shift(const kvp_gpu_cells *cells);
bool kvp_gpu_shift_reserve(kvp_gpu_cells *cells);
bool kvp_gpu_shift_matrices(kvp_gpu_cells *cells);
bool kvp_gpu_shift_mixed(kvp_gpu_cells *cells);
bool kvp_gpu_shift_reset(kvp_gpu_cache *cache);
void kvp_gpu_shift_free(kvp_gpu_cells *cells);

/* buckets.c. Whether a cache with key transforms saw the step before. With -sm tensor a step is
 * several graphs. */
bool kvp_gpu_buckets_saw(const kvp_gpu_cache *cache, const kvp_gpu_step *step);

/* buckets.c. The lock is held. `kvp_gpu_buckets_prepare` comes before a graph: it decides which key
 * transform the rows of a batch get, and which further transform is to be learned.
 * `kvp_gpu_buckets_upload` comes once blocks have these rows, and brings their numbers to the
 * GPU. */
bool kvp_gpu_buckets_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_buckets_upload(kvp_gpu_cache *cache, cu_stream stream);

/* buckets.c. The lock is held. `kvp_gpu_buckets_prepare_next` comes before rows at positions up to
 * `last` are stored. It puts a requested key transform in force, and requests that of the next
 * position bucket. `kvp_gpu_buckets_begin_late` requests one after a graph in which first
 * transforms came in force. `kvp_gpu_buckets_begin_layer` does so for a layer within such a graph,
 * once the layer has its first transform. `kvp_gpu_buckets_forget` is for a cache whose rows have
 * all become unused. */
void kvp_gpu_buckets_prepare_next(kvp_gpu_cache *cache, int32_t last);
void kvp_gpu_buckets_begin_late(kvp_gpu_cache *cache);
void kvp_gpu_buckets_begin_layer(const kvp_kv *kv);
void kvp_gpu_buckets_forget(kvp_gpu_cache *cache);
void kvp_gpu_buckets_free(kvp_gpu_cache *cache);
void kvp_gpu_buckets_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to,
                          uint32_t n); /* copies the transforms of n blocks */

/* The number of runs of the current batch. */
size_t kvp_gpu_runs(const kvp_gpu_cells *keys);

/* Whether keys of different blocks may have different transforms. If not, all have id 0. */
bool kvp_gpu_has_transforms(const kvp_gpu_cells *keys);

/* The number of transforms that attention on these keys has to apply to queries, and the id of
 * each. */
uint32_t kvp_gpu_matrices(const kvp_gpu_cells *keys);
uint32_t kvp_gpu_transform_at(const kvp_gpu_cells *keys, uint32_t number);

/* The block of an exact page (open) or of a sealed page; -1: the page is free. */
int64_t kvp_gpu_block_at(const kvp_gpu_cache *cache, bool open, size_t number);

/* The longest run whose keys have one transform. `kvp_gpu_run_of_blocks`: of n blocks (open: exact
 * pages), from the first-th on. `kvp_gpu_run_of_cells`: of cells before the n-th, from the first-th
 * on. */
kvp_gpu_run kvp_gpu_run_of_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n);
kvp_gpu_run kvp_gpu_run_of_cells(const kvp_gpu_cache *cache, const int64_t *numbers, size_t first,
                                 size_t n);

/* matrices.c. These functions bring a transform to the GPU. `kvp_gpu_upload_transform` brings the
 * first position bucket's and makes it the cells' transform; it waits for the stream (NULL: a
 * stream that orders nothing). kept: the learned transform as records hold it, or NULL.
 * `kvp_gpu_upload_bucket` brings matrices and centres of a later bucket. `kvp_gpu_upload_plain`
 * brings the transform KVP_PLAIN: a centre and a scale (NULL: none) in the computer's memory.
 *
 * `kvp_gpu_bring_triangles` makes the matrices of a bucket from triangles in GPU memory, by work in
 * the stream. `kvp_gpu_bring_all_triangles` does so for the first bucket of n tensors of one shape,
 * in the GPU's stream: layers have the triangles, and `at` is room for the layers in GPU memory.
 * `kvp_gpu_place_centers` brings the centres of n such tensors in the same way; cells is one of
 * them, and one tensor needs no room. `kvp_gpu_places_of` says where a bucket's centre and its
 * centre at position 0 (start) go to. */
bool kvp_gpu_upload_transform(kvp_gpu_cells *cells, const kvant_codec *const *codecs,
                              const void *kept, const float *start, cu_stream stream);
bool kvp_gpu_upload_bucket(kvp_gpu_cells *cells, uint32_t bucket,
                           const kvp_gpu_learned_transform *learned, const float *mean);
bool kvp_gpu_upload_plain(kvp_gpu_cells *cells, const float *center, const float *scale);
bool kvp_gpu_bring_triangles(kvp_gpu_cells *cells, uint32_t bucket, const uint16_t *triangles,
                             cu_stream stream);
bool kvp_gpu_bring_all_triangles(kvp_gpu_cells *const *cells, uint32_t n,
                                 kvant_cuda_compact_layer *layers, kvant_cuda_compact_layer *at);
kvant_cuda_center_layer kvp_gpu_places_of(const kvp_gpu_cells *cells, uint32_t bucket,
                                          const float *center, const float *start);
bool kvp_gpu_place_centers(const kvp_gpu_cells *cells, const kvant_cuda_center_layer *layers,
                           uint32_t n, kvant_cuda_center_layer *at);
void kvp_gpu_use_transform(kvp_gpu_cells *cells, const kvant_codec *const *codecs);

/* cells.c. Removes everything that was learned from the rows of a tensor: centre, scale and key
 * transforms. The tensor has no rows. */
void kvp_gpu_unlearn(kvp_gpu_cells *cells);
