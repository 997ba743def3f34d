/* transforms.h - transforms of rows on a GPU: how centres, scales and matrices are learned, which
 * blocks have which, and how keys move to other positions. It does not own pages. */
#ifndef KVP_GPU_TRANSFORMS_H
#define KVP_GPU_TRANSFORMS_H

#include "types.h"

/* Positions that have a matrix (ranges.c). Rows take it from `from` on. */
typedef struct kvp_gpu_range {
    uint32_t number;
    int32_t first, last, from;
} kvp_gpu_range;

/* What the keys of a block went through has an id. Ids below KVP_MOST_RANGES are the matrices of
 * ranges. The others are of keys that a context shift moved (shift.c): the matrix of a range, and
 * by how many positions these keys moved since they were stored. by 0: the id is free. */
typedef struct kvp_gpu_lineage {
    uint32_t range;
    int32_t by;
} kvp_gpu_lineage;

/* Rows of a batch one behind the other, in blocks whose keys have one transform. */
typedef struct kvp_gpu_run {
    size_t first, n;
    uint32_t transform; /* its id */
} kvp_gpu_run;

/* By what the centre of a range is turned to be a block's (centers.c, kvant/cuda.h:
 * kvant_cuda_turning). */
typedef struct kvp_gpu_centers {
    int32_t *positions;    /* by block: of its first cell, or KVP_NO_POSITION */
    uint32_t first, end;   /* blocks whose phases the GPU does not have yet */
    bool used;             /* by keys of some layer */
    kvp_gpu_memory phases; /* by block, head_dim each, once they are used */
    kvp_gpu_memory pairs;
    float *host; /* the same as phases */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope; /* of the layers whose blocks have centres; size 0: not known */
    uint32_t head_dim;
    bool uneven; /* others differ: there are no further ranges */
} kvp_gpu_centers;

#define KVP_NO_POSITION INT32_MIN

/* Which blocks' keys have which matrix and centre. */
typedef struct kvp_gpu_ranges {
    uint8_t *of;                                   /* by block: the id of its transform */
    kvp_gpu_lineage lineages[KVP_MOST_TRANSFORMS]; /* by id */
    bool moved;                                    /* some of these are of keys that moved */
    bool plain;                                    /* some blocks have the id KVP_PLAIN */
    uint32_t made;                     /* a bit for each range that has a matrix; bit 0 always */
    uint32_t asked;                    /* threads make that of this one; 0: of none */
    size_t since;                      /* rows that were stored since */
    bool ended;                        /* no others can be had */
    bool changed;                      /* of blocks with rows */
    int32_t position;                  /* the last one of the last step */
    uint8_t used[KVP_MOST_TRANSFORMS]; /* ids of all blocks with rows */
    uint32_t n;                        /* of these */
    kvp_gpu_memory numbers; /* by block, for attention: places in `used`, then numbers of centres */
    kvp_gpu_centers centers;
    kvp_gpu_run *runs; /* of the batch at hand */
    size_t n_runs;
    int64_t *last; /* its cells */
    size_t n_last, most_last;
} kvp_gpu_ranges;

/* Queries of prompts (queries.c). Each batch has them by layer, KVP_ASKED_TOKENS tokens each. */
typedef struct kvp_gpu_asked {
    kvp_gpu_memory batches[KVP_ASKED_BATCHES];
    size_t row; /* bytes of a token's; 0: none came */
    uint32_t n; /* batches that came since the cache was cleared */
    int32_t positions[KVP_ASKED_BATCHES * KVP_ASKED_TOKENS];
    cu_event ready; /* threads may read them */
} kvp_gpu_asked;

/* learn.c. Learns centre and scale from n rows on the GPU, at least so many; waits for the
 * stream. */
#define KVP_LEARN_ROWS 64u
bool kvp_gpu_learn(kvp_kv *kv, const float *rows, size_t stride, size_t n, cu_stream stream);

/* Before a batch: notes its cells if they are too few, or learns from those noted before. The lock
 * is held. */
bool kvp_gpu_learn_before(kvp_gpu_cache *cache, const int64_t *batch, size_t n, cu_stream stream);

/* From n rows in the computer's memory, at least so many, of a cache that noted none; false without
 * a message. */
bool kvp_gpu_learn_from(kvp_gpu_cells *cells, const float *rows, size_t n);

/* The same before rows in the computer's memory are stored; and for blocks that are copied. */
bool kvp_gpu_learn_written(kvp_kv *kv, const int64_t *cells, size_t n, const float *rows);
bool kvp_gpu_copy_first(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);

/* A version that was learnt: codecs, one per kv head (NULL: there is none), and centres of a block
 * at position 0 (NULL: blocks share the codecs'). */
typedef struct kvp_gpu_version {
    kvant_codec **codecs;
    float *start;
} kvp_gpu_version;

/* first.c. The lock is held for all of these. False: with a message.
 * prepare comes after the plan decided for a step and before blocks are opened. Threads begin to
 * make matrices, and join if rows have to be sealed. kept: all rows of the step go to open pages
 * alone. takes: other blocks give up pages for the step.
 * mark comes after blocks were opened: what was sealed keeps its transform.
 * settle does what prepare does, before somebody else seals rows.
 * join waits for the thread of a tensor, whose matrix comes in force.
 * end finds out whether keys of the cache learn still.
 * in_graph makes the matrix from the rows of a long step, which are sealed at once. values: of the
 * same tokens, or NULL. */
bool kvp_gpu_first_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, bool kept, bool takes);
void kvp_gpu_first_mark(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_first_settle(kvp_gpu_cache *cache);
bool kvp_gpu_first_join(kvp_kv *kv);
void kvp_gpu_first_end(kvp_gpu_cache *cache);
bool kvp_gpu_first_in_graph(kvp_gpu_backend *b, const abi_tensor *node, const abi_tensor *values);

/* queries.c. keep: of an attention node, without an error where there is no memory. ready: work
 * that was enqueued is what threads may read. find: those that were kept of a layer. */
bool kvp_gpu_queries_keep(kvp_gpu_backend *b, const abi_tensor *node);
bool kvp_gpu_queries_ready(kvp_gpu_cache *cache);
void kvp_gpu_queries_find(const kvp_gpu_cells *cells, struct kvp_gpu_lesson *lesson);
void kvp_gpu_queries_forget(kvp_gpu_cache *cache);
void kvp_gpu_queries_free(kvp_gpu_cache *cache);

/* Whether so many bytes are less than a quarter of the free memory, which others need, too. */
bool kvp_gpu_are_few(const kvp_gpu *gpu, size_t bytes);

/* learner.c. begin: as new, for a cache without rows. free waits for the thread. */
void kvp_gpu_learner_begin(kvp_gpu_cells *cells);
void kvp_gpu_learner_free(kvp_gpu_cells *cells);

/* cells.c. The matrix of a transform's id. If its range has none, the last range before counts. */
typedef struct kvp_gpu_matrix {
    const float *weights, *inverse_weights;
} kvp_gpu_matrix;
kvp_gpu_matrix kvp_gpu_matrix_of(const kvp_gpu_cells *cells, uint32_t transform);

/* ranges.c. The range of this number. */
kvp_gpu_range kvp_gpu_range_at(uint32_t number);

/* centers.c. tell: how a layer's keys turn, before there is a matrix; whether its blocks can have
 * centres. assign: a block's rows are at position and those behind it from now on. bring: phases to
 * the GPU, of all blocks where it has none; false with a message. of: keys' centres, which turn;
 * first_block: of blocks that are counted from there. rows, blocks: subtracts (add: adds) centres,
 * where keys have some: of rows at cells of the GPU, of rows of blocks (open: of open pages). move:
 * the keys of a block moved, and its transform is another one. copy: of a block to another one. The
 * lock is held. */
bool kvp_gpu_centers_tell(const kvp_kv *kv, const abi_tensor *rows);
void kvp_gpu_centers_assign(kvp_gpu_cache *cache, size_t block, int32_t position);
void kvp_gpu_centers_move(kvp_gpu_cache *cache, size_t block, int32_t by);
void kvp_gpu_centers_copy(kvp_gpu_cache *cache, size_t block, size_t to);
bool kvp_gpu_centers_bring(kvp_gpu_cache *cache, cu_stream stream);
kvant_cuda_turning kvp_gpu_turning_of(const kvp_gpu_cells *keys, size_t first_block);
kvant_status kvp_gpu_center_rows(const kvp_gpu_cells *keys, const float *rows, size_t stride,
                                 size_t n, const int64_t *cells, bool add, float *out);
kvant_status kvp_gpu_center_blocks(const kvp_gpu_cells *keys, bool open, size_t first, size_t n,
                                   bool add, float *rows);
void kvp_gpu_centers_forget(kvp_gpu_cache *cache);
void kvp_gpu_centers_free(kvp_gpu_cache *cache);

/* shift.c. A ROPE node on keys, which moves them. True: it was done or failed, as *status says.
 * False: keys have to be decoded, rotated and encoded again. The lock is held. */
bool kvp_gpu_shift(kvp_gpu_backend *b, const abi_tensor *node, int32_t *status);

/* shift_keys.c. takes: whether keys of a layer can move by getting other matrices. matrices: makes
 * those of keys that moved, after a shift or after the matrices that they are made of changed.
 * mixed: moves keys that move by another number of positions than their block. reset: encodes all
 * keys that moved once more, so that their blocks have ids of ranges. free: when no work that uses
 * the matrices is left. False: the caller has to say so. The lock is held. */
bool kvp_gpu_shift_takes(const kvp_gpu_cells *cells);
bool kvp_gpu_shift_matrices(kvp_gpu_cells *cells);
bool kvp_gpu_shift_mixed(const kvp_gpu_cells *cells);
bool kvp_gpu_shift_reset(kvp_gpu_cache *cache);
void kvp_gpu_shift_free(kvp_gpu_cells *cells);

/* ranges.c. Whether a cache with matrices saw the step before: with -sm tensor it is several
 * graphs. */
bool kvp_gpu_ranges_saw(const kvp_gpu_cache *cache, const kvp_gpu_step *step);

/* ranges.c. Before a graph: which matrix the rows of a batch get, and which further one is to be
 * made; then, once blocks have these rows, their numbers. forget: all rows are of the past. The
 * lock is held. */
bool kvp_gpu_ranges_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step);
bool kvp_gpu_ranges_bring(kvp_gpu_cache *cache, cu_stream stream);

/* ranges.c. Before rows at positions up to last are stored: the matrix that was asked for comes in
 * force, and threads begin to make that of the next range. The lock is held. */
void kvp_gpu_ranges_foresee(kvp_gpu_cache *cache, int32_t last);
void kvp_gpu_ranges_forget(kvp_gpu_cache *cache);
void kvp_gpu_ranges_free(kvp_gpu_cache *cache);
void kvp_gpu_ranges_copy(kvp_gpu_cache *cache, uint32_t first, uint32_t to,
                         uint32_t n); /* n blocks */

/* Whether rows of the last step are of the first range. */
bool kvp_gpu_in_first_range(const kvp_gpu_cache *cache);

/* How many runs the batch at hand has. */
size_t kvp_gpu_runs(const kvp_gpu_cells *keys);

/* Whether blocks' keys may have different transforms; else all have id 0. */
bool kvp_gpu_has_transforms(const kvp_gpu_cells *keys);

/* How many matrices attention on the keys has, and the id of each. */
uint32_t kvp_gpu_matrices(const kvp_gpu_cells *keys);
uint32_t kvp_gpu_transform_at(const kvp_gpu_cells *keys, uint32_t number);

/* The block of an open page, or of a sealed one; -1: of none. */
int64_t kvp_gpu_block_at(const kvp_gpu_cache *cache, bool open, size_t number);

/* The longest run of blocks (open: of open pages), or of cells, whose keys have one transform: from
 * the first-th on, of n blocks, or before the n-th cell. */
kvp_gpu_run kvp_gpu_run_of_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n);
kvp_gpu_run kvp_gpu_run_of_cells(const kvp_gpu_cache *cache, const int64_t *numbers, size_t first,
                                 size_t n);

/* cells.c: what a version of the first range says is brought to the GPU (which waits for the
 * stream; NULL: one that orders nothing), and becomes the cells'; or weights and centres of a later
 * one. plain: what KVP_PLAIN stands for, a centre and a scale (NULL: none) in the computer's
 * memory. */
bool kvp_gpu_bring_numbers(kvp_gpu_cells *cells, const kvant_codec *const *codecs,
                           const float *start, cu_stream stream);
bool kvp_gpu_bring_range(kvp_gpu_cells *cells, uint32_t range, const kvp_gpu_version *version,
                         const float *mean);
bool kvp_gpu_bring_plain(kvp_gpu_cells *cells, const float *center, const float *scale);
void kvp_gpu_take_numbers(kvp_gpu_cells *cells, const kvant_codec *const *codecs);

/* cells.c. A tensor without rows has neither centre nor scale nor matrix of some any more. */
void kvp_gpu_unlearn(kvp_gpu_cells *cells);

#endif
