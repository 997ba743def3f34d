/* cache.h - a cache in GPU memory and its tensors: rows, sealed pages, exact pages, and cells whose
 * rows were refused. All tensors of a buffer form one cache. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "../record_copy.h"
#include "transforms.h"

/* The state of an exact page. The plan (src/store/plan.h) decides which block has it. */
typedef struct kvp_open_page {
    int32_t block;  /* -1: free */
    uint64_t dirty; /* rows that are not encoded yet */
    /* rows whose keys a shift moved: the codes of these keys are out of date, the codes of values
     * are not */
    uint64_t moved;
} kvp_open_page;

/* A block without an exact page. Bit i of `rows` stands for a new row in its slot i. */
typedef struct kvp_gpu_staged_block {
    uint32_t block;
    uint64_t rows;
} kvp_gpu_staged_block;

/* Rows of codecs whose groups have several tokens, in blocks without exact pages (groups.c). */
typedef struct kvp_gpu_staging {
    kvp_gpu_staged_block *blocks;
    uint32_t n_blocks, n_decoded; /* the first n_decoded blocks have earlier rows */
    size_t n_rows;
    kvp_gpu_memory lists;
} kvp_gpu_staging;

/* Exact pages that are sealed as a whole (seal.c). */
typedef struct kvp_gpu_sealing {
    uint32_t n_whole, n; /* the first n_whole of n pages have 64 rows to encode */
    kvp_gpu_memory lists;
} kvp_gpu_sealing;

/* A thread that loads kernels (load.c), once for a cache. */
typedef struct kvp_gpu_loader {
    const struct kvp_gpu_cells *k, *v; /* of the first layer; NULL: the thread was not begun */
    uint32_t n_heads;
    pthread_t thread;
    bool runs;
} kvp_gpu_loader;

/* The tensors of one buffer. Their cells hold the same tokens. */
typedef struct kvp_gpu_cache {
    struct kvp_gpu_cache *next;
    const void *id;
    kvp_gpu *gpu;
    kvp_kv **tensors;
    size_t n_tensors;
    bool keeps;             /* the cache has exact pages; if not, all rows are encoded at once */
    kvant_exact_part exact; /* the largest exact part of its tensors */
    uint32_t sink_tokens;   /* the first tokens of a sequence, from which nothing is learned */
    uint32_t n_blocks, n_pages;
    kvant_plan *plan; /* NULL: no block has an exact page */
    /* the tensor whose rows were written first since the last graph; NULL: none */
    const kvp_kv *planner;
    int64_t planned_last; /* the last cell of these rows */
    /* position of the row behind it, counted from the first row of its sequence */
    int32_t planned_position;
    int32_t *table;    /* by block: the block itself, or -1 - its exact page */
    uint64_t *written; /* by block: one bit per cell that got a row since the cache was cleared */
    kvp_open_page pages[KVP_MOST_PAGES];
    bool table_changed;
    /* The current batch. waits: all of its rows are in exact pages only; any_open: some of its rows
     * go to exact pages. */
    bool all_pending, any_open;
    /* learns: centre or scale are learned from the first rows; learning: too few rows have come so
     * far */
    bool learns, learning;
    int64_t *first; /* the cells of these rows */
    size_t n_first;
    bool learns_key_transform,
        lacks_key_transform; /* keys have transform=first; of which some have no matrix yet */
    /* State of the first matrices (first_matrix.c). With `keeps_queries`, queries of the step at
     * hand are kept. With `teaches`, the graph of the step begins the lessons. */
    kvant_lesson lesson;
    bool keeps_queries, teaches;
    /* layers whose matrices come in force in the graph at hand (first_matrix.c); false between two
     * graphs */
    struct kvp_gpu_late {
        bool any;
        bool hands_over; /* these layers also go from f16 in place to pages (hand_over.c) */
        /* these layers have their matrices, and seal the pages of `sealing` (seal.c) */
        bool seals;
        bool has_slots; /* the GPU has the slots of their rows */
        kvp_gpu_held_rows held;
        kvp_gpu_memory arrays;                 /* of held */
        kvp_open_page leaving[KVP_MOST_PAGES]; /* as they were when the plan took them away */
    } late;
    /* by cell: position of a row in an exact page; -1: not known. NULL: no keys learn. */
    int32_t *positions;
    kvp_gpu_kept_queries kept_queries;
    kvp_gpu_memory expanded; /* of a layer, for one call: W or R W, and R W^-T */
    /* The compact form whose W the appends of a graph left in `expanded`; NULL: none. */
    const void *expanded_from;
    uint32_t n_streams;
    kvp_gpu_buckets buckets;
    struct kvp_gpu_shift {     /* the last context shift (shift.c) */
        uint32_t n;            /* number of shifts so far */
        const void *input;     /* address of the input with the distances by which cells move */
        struct kvp_gpu_mixed { /* blocks in which not all keys move by the same distance */
            uint32_t block;
            int32_t by[KVANT_PAGE_TOKENS]; /* by cell: the distance beyond the block's distance */
        } *mixed;
        size_t n_mixed;
        int32_t *all; /* by cell: by how many positions its key moves with this shift */
        bool failed;  /* some layers did not move yet */
        bool due;     /* llama.cpp asked for a shift, which it has to ask for again */
    } shift;
    struct kvp_gpu_marks { /* marks of cells whose rows were refused, for kernels (marks.c) */
        kvp_gpu_memory memory;
        /* a copy, as far as the computer knows of refusals, and room for another copy */
        uint32_t *host;
    } marks;
    kvp_gpu_loader loader;
    /* some tensors are in place (kvp_gpu_cells), not necessarily all */
    bool in_place;
    struct kvp_gpu_in_place *in_place_state; /* in_place.h; NULL: the tensors were never in place */
    unsigned restored; /* the number of the state that is being restored (restored.c) */
    /* by block: a bit for each cell that a sequence has, as far as this tensor was told
     * (kvp_gpu_hold) */
    uint64_t *held;
    const kvp_kv *holder;
    /* Until the next graph, the state's transforms become the cache's own: of keys, because no
     * layer has a matrix; of all tensors, because the cache has no other rows. */
    bool adopts_keys, adopts_all;
    unsigned forms;  /* grows when a tensor becomes in place or ceases to be */
    bool has_groups; /* groups of some codec have several tokens */
    /* the current batch, and rows that are stored without a graph (groups.c) */
    kvp_gpu_staging step_staging, row_staging;
    kvp_gpu_sealing sealing;
    kvp_gpu_memory device_table, slots,
        /* device_table: the page table; slots: exact-page slots of the batch; moved: ids of the
         * cache rows that are encoded or decoded */
        moved;
} kvp_gpu_cache;

/* One cache tensor (cells.c). Arrays are in GPU memory, kv head after kv head. */
typedef struct kvp_gpu_cells {
    kvp_gpu *gpu;
    kvant_cuda_codec *codec;
    const kvant_codec *const *sources; /* the scheme's codecs, one per kv head, or `own` */
    kvant_codec **own;                 /* NULL: none */
    kvant_cuda_pages pages;
    uint32_t n_kv_heads, head_dim;
    uint32_t group; /* tokens that are encoded together; 1: each alone */
    /* key_transform_size: numbers of a matrix per kv head: 0, head_dim or head_dim^2 */
    size_t page_bytes, key_transform_size;
    size_t most_key_transform_size; /* the same for a key transform that may be learned later */
    /* Bytes of the matrices of a position bucket. Learned matrices are compact
     * (kvant_cuda_compact). Calibrated matrices are weights and inverse weights. */
    size_t matrix_bytes;
    kvp_gpu_memory numbers;                       /* matrices, centre, scale, query scale */
    kvp_gpu_memory further[KVP_MOST_BUCKETS - 1]; /* matrices of later position buckets */
    /* the first position bucket's centre in the form that attention takes (k_center) */
    kvp_gpu_memory key_center;
    /* By position bucket: the centre of a block at position 0. The array continues, again by
     * bucket, with the centre of blocks whose position is not known. */
    kvp_gpu_memory starts;
    /* rows are stored minus these centres, rotated to their blocks' positions */
    bool has_block_centers;
    uint32_t further_made; /* a bit for each position bucket that has `further` matrices */
    /* Rounded triangles and centres of n_learned position buckets (learner.c), and a bit for each
     * of these transforms that is in force. */
    kvp_gpu_memory results;
    uint32_t n_learned, learned_ids;
    struct kvp_gpu_moved { /* by id: the matrices of keys that moved; of.by 0: none */
        kvp_gpu_memory numbers;
        kvp_gpu_lineage of;
    } moved[KVP_MOST_MOVED];
    float *rotation; /* by which keys moved, while these matrices are made; NULL: no room */
    kvant_rope rope; /* the RoPE by which keys moved; size 0: no key moved */
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    /* the number of its cache's shifts in which its keys took part */
    uint32_t n_shifts;
    size_t n_mixed;                      /* blocks of the next one whose keys moved already */
    float *center, *scale, *query_scale; /* NULL: none */
    bool learns, learned;                /* centre or scale are learned from the first rows */
    bool uncentred;                      /* attention has a softcap, so keys have no centre */
    size_t n_outside; /* rows that were stored since the last graph, without one */
    /* there is room behind the outputs of attention nodes */
    bool has_room;
    kvp_gpu_cache *cache;
    /* rows are fp16 where llama.cpp puts them, and CUDA computes the nodes over them */
    bool in_place;
    kvant_cuda_pages open_pages; /* base NULL: no page was needed yet */
    kvp_gpu_memory open;         /* memory for exact pages when none is reserved */
    kvant_cuda_codec *open_codec;
    struct kvp_gpu_learner
        *learner; /* of keys with transform=first; NULL: none is needed yet, or any more */
    bool learns_key_transform,
        has_key_transform; /* has_key_transform: nothing is learned any more for the first range */
    bool late;             /* cache->late is for this tensor, too */
    uint32_t n_kept_batches; /* batches whose queries were kept (cache->kept_queries) */
    kvant_cuda_codec *codecs[2],
        *open_codecs[2]; /* without and with a matrix; codec and open_codec point to one of these */
    kvant_codec *made;   /* the codec that the latter were made from */
    /* By position bucket: the transform as saved states hold it (saved.c); NULL: none was learned.
     * form: a tensor with these codecs, for the sizes in states; NULL until it is needed. */
    void *kept[KVP_MOST_BUCKETS];
    kvp_record_copy form;
} kvp_gpu_cells;

/* cells.c */
extern const kvp_remote kvp_gpu_remote;

/* The cells behind a tensor, or NULL. */
kvp_gpu_cells *kvp_gpu_cells_of(const abi_tensor *tensor);

/* These transfer the rows of a batch between the computer's memory and the GPU. The lock is
 * held. */
size_t kvp_gpu_width(const kvp_gpu_cells *cells);
bool kvp_gpu_upload(kvp_gpu *gpu, void *to, const void *from, size_t bytes);
float *kvp_gpu_batch_room(kvp_gpu *gpu, size_t n, size_t width, int64_t **slots);

/* Frees the room if it is larger than reading and writing of states needs. In that case it waits
 * for the stream. */
void kvp_gpu_batch_done(kvp_gpu *gpu);
kvant_status kvp_gpu_decode_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n,
                                   float *out);

/* rows.c. The kvp_remote's functions (kv_tensor.h). */
kvant_status kvp_gpu_read_rows(const kvp_kv *kv, size_t cell, size_t n, float *rows);
kvant_status kvp_gpu_write_rows(kvp_kv *kv, const int64_t *cell_numbers, size_t n,
                                const float *rows);
bool kvp_gpu_copy_blocks(const kvp_kv *from, uint32_t first, kvp_kv *to, uint32_t to_first,
                         uint32_t n);

/* Copies the rows of one block (open: of an exact page) to the computer's memory, where they are
 * when this returns. False with a message. */
bool kvp_gpu_fetch_block(const kvp_gpu_cells *cells, bool open, size_t block, float *rows);

/* Stores rows in sealed pages, or in fp16 pages (open). A codec whose groups have several tokens
 * can only store rows in fp16 pages. */
kvant_status kvp_gpu_append(const kvp_gpu_cells *cells, kvant_role role,
                            const kvant_cuda_pages *open, const float *rows, kvp_gpu_run run,
                            const int64_t *slots, atomic_uint *refused);
kvant_cuda_tables kvp_gpu_tables(const kvant_codec *source);
/* frees n codecs and the array; NULL: does nothing */
void kvp_gpu_free_codecs(kvant_codec **codecs, uint32_t n);

static inline bool kvp_gpu_is_learning(const kvp_gpu_cells *cells)
{
    return cells->learns && !cells->learned;
}

static inline bool kvp_gpu_lacks_key_transform(const kvp_gpu_cells *cells)
{
    return cells->learns_key_transform && !cells->has_key_transform;
}

/* Keys in exact pages get centre and scale with their first matrix (first_matrix.c). Other tensors
 * learn them from their first rows alone (learn.c). */
static inline bool kvp_gpu_learns_alone(const kvp_gpu_cells *cells)
{
    return kvp_gpu_is_learning(cells) &&
           !(kvp_gpu_lacks_key_transform(cells) && cells->cache->keeps);
}

/* size.c. `kvp_gpu_further_buckets` is the number of a cache's position buckets after the first.
 * The other functions return the most bytes that a cache tensor takes on a GPU next to its pages:
 *   kvp_gpu_transform_bytes  its transforms without KVP_PLAIN
 *   kvp_gpu_plain_bytes      KVP_PLAIN
 *   kvp_gpu_matrix_room      the matrices of one layer (kvp_gpu_expand, kvp_gpu_expanded_bytes)
 *   kvp_gpu_learning_room    the room for a layer's key transform when it comes in force
 *   kvp_gpu_staging_bytes    staging pages (groups.c), if its codec has groups of several tokens
 *   kvp_gpu_staging_room     the same, or 0 if the settings have no such codec
 * All tensors share the largest of their rooms, and the staging pages. */
size_t kvp_gpu_further_buckets(const kvp_kv_shape *shape, uint32_t n_positions);
size_t kvp_gpu_transform_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                               uint32_t n_kv_heads, uint32_t n_positions);
size_t kvp_gpu_plain_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads);
size_t kvp_gpu_matrix_room(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads);
size_t kvp_gpu_expanded_bytes(uint32_t n_kv_heads, uint32_t head_dim);
size_t kvp_gpu_learning_room(const kvp_kv_shape *shape, const kvp_settings *settings);
size_t kvp_gpu_staging_bytes(const kvp_kv_shape *shape);
size_t kvp_gpu_staging_room(const kvp_kv_shape *shape, const kvp_settings *settings);

/* The centre among the numbers of a transform; scale and query scale follow it. */
static inline float *kvp_gpu_affine(const kvp_gpu_cells *cells, const kvp_gpu_memory *numbers)
{
    return (float *)(void *)((char *)numbers->at + cells->matrix_bytes);
}

/* fp16_pages.c. `kvp_gpu_cache_mark_written` notes that a cell has a row from now on.
 * `kvp_gpu_cache_mark_copied` notes that copies of blocks have rows in the same cells as the
 * originals. `kvp_gpu_cache_is_empty`: no cell has a row. The lock is held. */
void kvp_gpu_cache_mark_written(kvp_gpu_cache *cache, int64_t cell);
void kvp_gpu_cache_mark_copied(kvp_gpu_cache *cache, uint32_t first, uint32_t to, uint32_t n);
bool kvp_gpu_cache_is_empty(const kvp_gpu_cache *cache);

/* fp16_pages.c. `kvp_gpu_page_of`: the exact page with a cell, or KVP_NO_PAGE.
 * `kvp_gpu_block_memory`: the pages of a block, or exact pages with one number, for all kv heads.
 * `kvp_gpu_ensure_pages` creates n pages of a tensor in the memory reserved for them. */
#define KVP_NO_PAGE (-1)
int64_t kvp_gpu_page_of(const kvp_gpu_cache *cache, int64_t cell);
size_t kvp_gpu_open_page_bytes(const kvp_gpu_cells *cells); /* bytes per kv head */
static inline char *kvp_gpu_block_memory(const kvant_cuda_pages *pages, size_t number)
{
    return (char *)pages->base + number * pages->block_stride;
}
bool kvp_gpu_ensure_pages(const kvp_kv *kv, uint32_t n);

/* A run's rows on the GPU, in the form that an append takes. `kvp_gpu_use_matrices` adds to an
 * append the compact form of the keys' matrices, if they have one. Appends of a graph to a layer
 * follow each other and share W, which the first of them makes. `kvp_gpu_forget_expanded` has the
 * next append make it: before and after a graph, because other graphs and replays write there. */
kvant_cuda_rows kvp_gpu_rows(const kvp_gpu_cells *cells, const float *rows, size_t stride,
                             kvp_gpu_run run);
void kvp_gpu_use_matrices(const kvp_gpu_cells *keys, kvp_gpu_run run,
                          kvant_cuda_kernel_append_args *args);
void kvp_gpu_forget_expanded(kvp_gpu *gpu);

/* saved.c. Keep a transform of a tensor for saved states: the bytes, which are the cells' from now
 * on; a centre and a scale (NULL: none); or none of all ids. Without memory, states hold fp16
 * rows. */
void kvp_gpu_keep(kvp_gpu_cells *cells, uint32_t id, void *transform);
void kvp_gpu_keep_affine(kvp_gpu_cells *cells, uint32_t id, const float *center,
                         const float *scale);
void kvp_gpu_keep_none(kvp_gpu_cells *cells);

/* The numbers 0, 1, ... on the GPU. */
const int32_t *kvp_gpu_iota(const kvp_gpu *gpu);

/* fp16_pages.c. Makes a tensor's cells join or leave the cache of their buffer. The GPU's lock is
 * held for all of these. */
bool kvp_gpu_cache_join(kvp_kv *kv, const kvant_codec_info *info);
void kvp_gpu_cache_leave(kvp_kv *kv);

/* step.c. Prepares a cache for a graph: opens blocks for the rows of a batch, and brings the page
 * table and the slots to the GPU. The argument mask is the mask of attention over the cache, or
 * NULL. */
bool kvp_gpu_cache_prepare(kvp_gpu_cache *cache, const kvp_gpu_step *step, const kvp_gpu_mask *mask,
                           cu_stream stream);
const int64_t *kvp_gpu_open_slots(const kvp_gpu_cache *cache);

/* fp16_pages.c. Carries out a plan's changes for all tensors: first encodes blocks that are sealed,
 * then decodes blocks that are opened. After an error all pages, and the plan, are unchanged. With
 * `in_prompt`, each layer may encode its blocks later (kvp_gpu_seal_ahead). */
bool kvp_gpu_carry_out(kvp_gpu_cache *cache, const kvant_plan_changes *changes, bool in_prompt,
                       cu_stream stream);

/* seal.c. Encodes the rows of pages that are not encoded yet, as the pages were. kv: of its layer
 * alone; NULL: of all layers.
 *
 * In the graph of a prompt, each layer can do so by itself before its rows are stored, while CUDA
 * computes. `kvp_gpu_may_seal_ahead`: whether the rows of these pages can wait for that.
 * `kvp_gpu_seal_ahead` lists the pages, and `kvp_gpu_seal_layer` encodes them for the layer of a
 * tensor. */
bool kvp_gpu_may_seal_ahead(const kvp_gpu_cache *cache, const kvp_open_page *leaving);
bool kvp_gpu_seal_ahead(kvp_gpu_cache *cache, const kvp_open_page *leaving, cu_stream stream);
bool kvp_gpu_seal_layer(const kvp_kv *kv);
bool kvp_gpu_encode_pages(kvp_gpu_cache *cache, const kvp_open_page *pages, const kvp_kv *kv,
                          cu_stream stream);

/* groups.c, for codecs whose groups have several tokens. `kvp_gpu_stage` lists a step's rows in
 * blocks without an exact page, and notes that rows in exact pages have no codes. A cell below 0 is
 * no row. `kvp_gpu_staged` stores the rows that were listed, in passes: `append` appends them to
 * staging pages with a pass's slots, and then these pages are sealed. `kvp_gpu_stage_rows` does all
 * of it for n rows on the GPU. `kvp_gpu_have_staging` allocates memory for a step of n_rows rows in
 * n_blocks blocks. */
bool kvp_gpu_stage(kvp_gpu_cache *cache, const int64_t *cells, size_t n, kvp_gpu_staging *s,
                   cu_stream stream);
typedef kvant_status kvp_gpu_append_staged(void *context, const int64_t *slots,
                                           const kvant_cuda_pages *pages);
kvant_status kvp_gpu_staged(const kvp_kv *kv, const kvp_gpu_staging *s,
                            kvp_gpu_append_staged *append, void *context);
kvant_status kvp_gpu_stage_rows(const kvp_kv *kv, const int64_t *cells, size_t n, const float *rows,
                                atomic_uint *refused);
bool kvp_gpu_have_staging(kvp_gpu_cache *cache, kvp_gpu_staging *s, size_t n_rows, size_t n_blocks);
void kvp_gpu_staging_free(kvp_gpu_cache *cache);

/* The number of a block's tokens up to its last written one. llama.cpp fills cells in order, so all
 * of them are written. */
static inline int32_t kvp_gpu_tokens_of(uint64_t written)
{
    int32_t n = 0;

    for (; written != 0; written >>= 1)
        n++;
    return n;
}

/* load.c. A thread loads the kernels of pages, with and without a matrix of keys. load_finish waits
 * for the thread before a tensor of the cache goes. */
void kvp_gpu_load_kernels(const kvp_gpu_cells *keys, const kvp_gpu_cells *values, uint32_t n_heads);
void kvp_gpu_load_finish(kvp_gpu_cache *cache);

/* fp16_pages.c. Gives a page to another block, or to none. The rows of its former block are
 * discarded. */
void kvp_gpu_put_page(kvp_gpu_cache *cache, uint32_t page, int32_t block);

/* step.c. Finds the slots of cells in exact pages, -1 for cells without one. Returns the number of
 * cells with a slot. */
size_t kvp_gpu_slots_of(const kvp_gpu_cache *cache, const int64_t *cells, size_t n, int64_t *slots);

/* step.c. Called before rows of a tensor are written without a graph, or blocks of 64 cells are
 * copied, in a settled cache. `kvp_gpu_open_written` opens blocks as the plan decides; rows without
 * positions are consecutive. `kvp_gpu_count_positions` counts these positions.
 * `kvp_gpu_open_restored` opens blocks whose rows were exact when they were saved, as long as there
 * are pages. `kvp_gpu_open_copies` opens the copies of blocks that have exact
 * pages; the caller copies the pages. */
bool kvp_gpu_open_written(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream);
bool kvp_gpu_open_restored(const kvp_kv *kv, const kvp_gpu_step *step, cu_stream stream);
void kvp_gpu_count_positions(kvp_gpu_cache *cache, const kvp_gpu_step *step, int32_t *positions);
bool kvp_gpu_open_copies(const kvp_kv *kv, uint32_t first, uint32_t to, uint32_t n);

/* step.c. Opens blocks that have rows, as long as there are pages for them. */
bool kvp_gpu_open_blocks(kvp_gpu_cache *cache, const uint32_t *blocks, uint32_t n,
                         cu_stream stream);

/* fp16_pages.c. After kvp_gpu_cache_settle, sealed pages hold all rows. `kvp_gpu_cache_forget` is
 * for a cache whose rows have all become unused. */
bool kvp_gpu_cache_settle(kvp_gpu_cache *cache, cu_stream stream);
void kvp_gpu_cache_forget(kvp_gpu_cache *cache);

/* `kvp_gpu_new_word`: a word in the computer's memory to which kernels write (KVANT_CUDA_ROW_*);
 * NULL with a message. `kvp_gpu_read_word` returns what kernels wrote since its last call. */
atomic_uint *kvp_gpu_new_word(void);
kvant_status kvp_gpu_read_word(atomic_uint *word);

/* The same word for kernels, which change it by their own atomic operations. */
static inline uint32_t *kvp_gpu_word(atomic_uint *word)
{
    return (uint32_t *)(uintptr_t)word;
}

/* marks.c. The lock is held. `kvp_gpu_marks_create` comes before any row is stored.
 * `kvp_gpu_marks_notice` makes cells invalid that kernels marked since its last call, for the given
 * reason; it waits for the stream. `kvp_gpu_marks_notice_all` does so for all caches of the GPU,
 * unless the reason is KVANT_OK. `kvp_gpu_marks_prepare` comes before a graph that writes a
 * step's cells (NULL: none, or not known), whose numbers lie in the graph's input `cells`.
 * `kvp_gpu_marks_cells`: these numbers on the GPU, during a graph of at most KVP_SHORT_STEP_TOKENS
 * tokens. `kvp_gpu_marks_any`: the computer knows of marked cells. */
bool kvp_gpu_marks_create(kvp_gpu_cache *cache);
void kvp_gpu_marks_free(kvp_gpu_cache *cache);
bool kvp_gpu_marks_notice(kvp_gpu_cache *cache, kvant_status why);
void kvp_gpu_marks_notice_all(kvp_gpu *gpu, kvant_status why);
bool kvp_gpu_marks_prepare(kvp_gpu_cache *cache, const abi_tensor *cells, const kvp_gpu_step *step,
                           cu_stream stream);
int64_t *kvp_gpu_marks_cells(const kvp_gpu_cache *cache);
bool kvp_gpu_marks_any(const kvp_gpu_cache *cache);
