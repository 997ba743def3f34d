/* cache.h - a cache in GPU memory and its tensors: rows, sealed pages, open pages, and cells whose
 * rows were refused. All tensors of a buffer are one cache. */
#ifndef KVP_GPU_CACHE_H
#define KVP_GPU_CACHE_H

#include <stdatomic.h>

#include "../../../src/store/plan.h"
#include "transforms.h"

/* The rows of an open page. The plan (src/store/plan.h) decides whose page it is. */
typedef struct kvp_open_page {
    int32_t block;  /* -1: free */
    uint64_t fresh; /* rows that are not encoded yet */
    uint64_t moved; /* rows whose keys moved here: their codes are out of date, values' are not */
} kvp_open_page;

/* The tensors of one buffer, whose cells are the same tokens. */
typedef struct kvp_gpu_cache {
    struct kvp_gpu_cache *next;
    const void *id;
    kvp_gpu *gpu;
    kvp_kv **tensors;
    size_t n_tensors;
    bool keeps;             /* open pages; else all rows are encoded at once */
    kvant_exact_part exact; /* the most of what its tensors have */
    uint32_t sink_tokens;   /* first tokens of a sequence, which nothing is learnt from */
    uint32_t n_blocks, n_pages;
    kvant_plan *plan;      /* NULL: no block has a page */
    const kvp_kv *planner; /* whose rows were written first since the last graph; NULL: none were */
    int64_t planned_last;  /* the last cell of these rows */
    int32_t planned_position; /* of the row behind it, counted from where its sequence began */
    int32_t *table;           /* by block: itself, or -1 - its open page */
    uint64_t *written; /* by block: a bit per cell that got a row since the cache was cleared */
    kvp_open_page pages[KVP_MOST_PAGES];
    bool table_changed;
    /* The batch at hand: all of its rows are in open pages and in no sealed page yet; some of its
     * rows go to open pages. */
    bool waits, any_open;
    bool learns, learning; /* centre or scale from the first rows; of which too few came yet */
    int64_t *first;        /* their cells */
    size_t n_first;
    bool weighs, weighing; /* keys have transform=first; of which some have no matrix yet */
    /* Of first matrices (first.c): threads make them; it was tried since a page was given up last;
     * queries of the step at hand are kept. */
    bool begun, tried, asks;
    int32_t *positions; /* by cell, of rows in open pages; -1: not known. NULL: no keys learn */
    kvp_gpu_asked asked;
    uint32_t n_streams;
    kvp_gpu_ranges ranges;
    struct kvp_gpu_shift {     /* the last context shift (shift.c) */
        uint32_t n;            /* how many there were */
        const void *input;     /* where positions lie that cells move by */
        struct kvp_gpu_mixed { /* blocks in which not all keys move alike */
            uint32_t block;
            int32_t by[KVANT_PAGE_TOKENS]; /* by cell: beyond what the block moves by */
        } *mixed;
        size_t n_mixed;
    } shift;
    struct kvp_gpu_marks { /* cells whose rows were refused, as the GPU has them (marks.c) */
        kvp_gpu_memory memory;
        uint32_t *host; /* the same as far as the computer knows, and room for as many words */
    } marks;
    bool in_place;               /* some tensors are (kvp_gpu_cells), not always all of them */
    struct kvp_gpu_place *place; /* in_place.h; NULL: they never were */
    unsigned forms;              /* a larger number: a tensor is in place, or no longer */
    kvp_gpu_memory device_table, slots,
        /* slots: in open pages, of the batch; moved: numbers of rows that are encoded or decoded */
        moved;
} kvp_gpu_cache;

/* One cache tensor; see cells.c. Arrays are in GPU memory, kv head after kv head. */
typedef struct kvp_gpu_cells {
    kvp_gpu *gpu;
    kvant_cuda_codec *codec;
    const kvant_codec *const *sources; /* the scheme's, per kv head; or own */
    kvant_codec **own;                 /* NULL: none */
    kvant_cuda_pages pages;
    uint32_t n_kv_heads, head_dim;
    size_t page_bytes, n_weights; /* per kv head: 0, head_dim or head_dim^2 */
    size_t most_weights;          /* the same, with a matrix of the first rows */
    kvp_gpu_memory numbers;       /* weights, inverse weights, centre, scale, query scale */
    kvp_gpu_memory further[KVP_MOST_RANGES - 1]; /* of later ranges: weights, inverse weights */
    kvp_gpu_memory key_center; /* as attention takes it (k_center): of the first range */
    /* by range centres of a block at position 0, then by range those of blocks whose position is
     * not known */
    kvp_gpu_memory starts;
    bool turns;            /* rows are about these */
    uint32_t further_made; /* a bit for each range that has some */
    struct kvp_gpu_moved { /* the same of keys that moved, by id; of.by 0: none */
        kvp_gpu_memory numbers;
        kvp_gpu_lineage of;
    } moved[KVP_MOST_MOVED];
    kvant_rope rope; /* that these moved by; size 0: none did */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    uint32_t n_shifts;                      /* of its cache, that its keys took part in */
    const float *weights, *inverse_weights; /* NULL: none */
    float *center, *scale, *query_scale;    /* NULL: none */
    bool learns, learnt;                    /* centre or scale from the first rows */
    bool uncentred;                         /* attention has a softcap */
    bool has_room;                          /* behind the outputs of attention on it */
    kvp_gpu_cache *cache;
    bool in_place; /* rows are fp16 where llama.cpp puts them: nodes over them are CUDA's */
    kvant_cuda_pages open_pages; /* base NULL: none was needed yet */
    kvp_gpu_memory open;         /* where nothing is reserved for them */
    kvant_cuda_codec *open_codec;
    struct kvp_gpu_learner
        *learner;         /* of keys with transform=first; NULL: none is needed yet, or any more */
    bool weighs, weighed; /* weighed: nothing is learned any more for the first range */
    uint32_t n_asked;     /* batches whose queries were kept (cache->asked) */
    kvant_cuda_codec *codecs[2],
        *open_codecs[2]; /* without and with a matrix: codec and open_codec are of these */
    kvant_codec *made;   /* what the latter were made of */
} kvp_gpu_cells;

/* cells.c */
extern const kvp_remote kvp_gpu_remote;

/* The cells behind a tensor, or NULL. */
kvp_gpu_cells *kvp_gpu_cells_of(const abi_tensor *tensor);

/* Rows of a batch in the computer's memory, which go to the GPU and come back. The lock is held. */
size_t kvp_gpu_width(const kvp_gpu_cells *cells);
bool kvp_gpu_upload(kvp_gpu *gpu, void *to, const void *from, size_t bytes);
float *kvp_gpu_batch_room(kvp_gpu *gpu, size_t n, size_t width, int64_t **slots);

/* Gives the room back where it is more than reading and writing of states takes. Waits for the
 * stream then. */
void kvp_gpu_batch_done(kvp_gpu *gpu);
kvant_status kvp_gpu_decode_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n,
                                   float *out);

/* rows.c. The kvp_remote's functions (kv_tensor.h). */
kvant_status kvp_gpu_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows);
kvant_status kvp_gpu_write_rows(kvp_kv *kv, const int64_t *cell_numbers, size_t n,
                                const float *rows);
bool kvp_gpu_copy_blocks(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first,
                         uint32_t n);

/* Rows of one, in the computer's memory when this returns; false with a message. */
bool kvp_gpu_fetch_block(const kvp_gpu_cells *cells, bool open, size_t block, float *rows);
kvant_status kvp_gpu_append(const kvp_gpu_cells *cells, kvant_role role, bool open,
                            const float *rows, kvp_gpu_run run, const int64_t *slots,
                            atomic_uint *refused);
kvant_cuda_tables kvp_gpu_tables(const kvant_codec *source);
void kvp_gpu_free_codecs(kvant_codec **codecs, uint32_t n); /* of n, and the array; NULL: none */

static inline bool kvp_gpu_is_learning(const kvp_gpu_cells *cells)
{
    return cells->learns && !cells->learnt;
}

static inline bool kvp_gpu_is_weighing(const kvp_gpu_cells *cells)
{
    return cells->weighs && !cells->weighed;
}

/* size.c. These tell the most bytes that a cache tensor takes on a GPU next to its pages. The first
 * counts its transforms without KVP_PLAIN, the second KVP_PLAIN, and the third what one layer needs
 * when its matrix comes in force. */
size_t kvp_gpu_transform_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                               uint32_t n_kv_heads, uint32_t n_positions);
size_t kvp_gpu_plain_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads);
size_t kvp_gpu_learning_room(const kvp_kv_shape *shape, const kvp_settings *settings);

/* The centre in numbers of a matrix; scale and query scale are behind it. */
static inline float *kvp_gpu_affine(const kvp_gpu_cells *cells, const kvp_gpu_memory *numbers)
{
    return (float *)numbers->at + 2 * cells->n_kv_heads * cells->most_weights;
}

/* open.c. holds: a cell has a row from now on. holds_copies: blocks have rows in the cells in which
 * other blocks have some. is_empty: no cell has a row. The lock is held. */
void kvp_gpu_cache_holds(kvp_gpu_cache *cache, int64_t cell);
void kvp_gpu_cache_holds_copies(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);
bool kvp_gpu_cache_is_empty(const kvp_gpu_cache *cache);

/* open.c: the open page with a cell, or -1. have_pages: n of a tensor, in the memory reserved for
 * them. close_all: no block has one any more. */
#define KVP_NO_PAGE (-1)
int64_t kvp_gpu_page_of(const kvp_gpu_cache *cache, int64_t cell);
size_t kvp_gpu_open_page_bytes(const kvp_gpu_cells *cells); /* of a kv head */
bool kvp_gpu_have_pages(kvp_kv *kv, uint32_t n);
void kvp_gpu_close_all(kvp_gpu_cache *cache);

/* Rows on the GPU as an append takes them: those of a run. */
kvant_cuda_rows kvp_gpu_rows(const kvp_gpu_cells *cells, const float *rows, size_t stride,
                             kvp_gpu_run run);

/* The numbers 0, 1, ... on the GPU. */
const int32_t *kvp_gpu_numbers(const kvp_gpu *gpu);

/* open.c. A tensor's cells join the cache of their buffer. The GPU's lock is held for all of
 * these. */
bool kvp_gpu_cache_join(kvp_kv *kv, const kvant_codec_info *info);
void kvp_gpu_cache_leave(kvp_kv *kv);

/* step.c. Prepares a cache for a graph: opens blocks for the rows of a batch, and brings table and
 * slots to the GPU. mask is that of attention over the cache, or NULL. */
bool kvp_gpu_cache_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                           cu_stream stream);
const int64_t *kvp_gpu_open_slots(const kvp_gpu_cache *cache);

/* open.c. Carries a plan's changes out for all tensors: encodes blocks that are sealed, then
 * decodes blocks that are opened. After an error all pages are as they were, in the plan, too. */
bool kvp_gpu_carry_out(kvp_gpu_cache *cache, const kvant_plan_changes *changes, cu_stream stream);

/* open.c. Gives a page to another block, or to none. The rows of its former block are forgotten. */
void kvp_gpu_put_page(kvp_gpu_cache *cache, uint32_t page, int32_t block);

/* step.c. Slots of cells in open pages, -1 for those without; how many have one. */
size_t kvp_gpu_slots_of(const kvp_gpu_cache *cache, const int64_t *cells, size_t n, int64_t *slots);

/* step.c. Before rows of a tensor are written without a graph, or blocks of 64 cells are copied:
 * opens blocks as the plan decides. The cache is settled. Rows without positions follow each other.
 * open_copies opens the copies of blocks that are open; their pages are still to be copied. */
bool kvp_gpu_open_written(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream);
bool kvp_gpu_open_copies(const kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n);

/* step.c. Opens blocks that have rows, as far as there are pages for them. */
bool kvp_gpu_open_blocks(kvp_gpu_cache *cache, const uint32_t *blocks, uint32_t n,
                         cu_stream stream);

/* open.c. Sealed pages hold all rows afterwards. forget: all rows are of the past. */
bool kvp_gpu_cache_settle(kvp_gpu_cache *cache, cu_stream stream);
void kvp_gpu_cache_forget(kvp_gpu_cache *cache);

/* A word in the computer's memory that kernels write to (KVANT_CUDA_ROW_*); NULL with a message.
 * take: what they wrote since. */
atomic_uint *kvp_gpu_new_word(void);
kvant_status kvp_gpu_take_word(atomic_uint *word);

/* The same word for kernels, which change it by atomic operations of their own. */
static inline uint32_t *kvp_gpu_word(atomic_uint *word)
{
    return (uint32_t *)(uintptr_t)word;
}

/* marks.c. create: before anything is stored. notice: what kernels marked since, for this reason;
 * waits for the stream. prepare: before a graph that writes a step's cells (NULL: none, or not
 * known), which lie in the graph's input `cells`. numbers: those cells on the GPU, during a graph
 * of at most KVP_FEW_TOKENS tokens. any: the computer knows of some. The lock is held. */
bool kvp_gpu_marks_create(kvp_gpu_cache *cache);
void kvp_gpu_marks_free(kvp_gpu_cache *cache);
bool kvp_gpu_marks_notice(kvp_gpu_cache *cache, kvant_status why);
bool kvp_gpu_marks_prepare(kvp_gpu_cache *cache, const abi_tensor *cells, const kvp_gpu_step *step,
                           cu_stream stream);
int64_t *kvp_gpu_marks_numbers(const kvp_gpu_cache *cache);
bool kvp_gpu_marks_any(const kvp_gpu_cache *cache);

#endif
