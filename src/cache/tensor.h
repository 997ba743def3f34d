/* tensor.h - the inside of kvant_tensor, for attention and for the files of this folder:
 *
 *   tensor.c      sizes, creation, clearing, reading
 *   write.c       writes a batch of rows: checks them, learns from them, seals old blocks
 *   write_encode.c chooses pages for the rows of a write and encodes them
 *   fp16_pages.c  what open pages hold: sealing, opening again
 *   steps.c       which blocks have an open page, as the plan says; pages that tensors share
 *   transforms.c  centres and scales: estimates from rows; the transform of each row
 *   learn.c       matrices of transform=first, from rows and queries
 *   select.c      which transform has the smallest error for a sample of rows and queries
 *   key_transform.c the matrices W as transforms
 *   center.c      centres that RoPE rotates: one per block
 *   shift.c       keys that move to other positions without being encoded again
 *   shift_rows.c  rows that are written next to shifted keys; copies, export and import of shifts
 *   slots.c       a block without some of its slots
 *   transfer.c    copies, export, import
 *   record.c      export and import of several blocks together
 *   record_outer.c  the same for blocks whose pages lie elsewhere
 *   transform_bytes.c  the bytes of a transform in exports
 *
 * In comments a transform is the centre and scale, or the centre and W, of the rows of some blocks.
 * Names still call it `transform_id`. */
#pragma once

#include <kvant/tensor.h>

#include <string.h>

#include "../codec/encode.h"
#include "../store/plan.h"

#define KVANT_NO_PAGE (-1)
#define KVANT_CANDIDATE KVANT_MAX_TRANSFORMS /* index of a new transform that is not in force yet */
#define KVANT_NO_POSITION INT32_MIN

/* Whether slot 0 of a block can have this position: positions of rows are not below 0, and the
 * position after the block's last row is an int32_t. */
static inline bool kvant_is_block_position(int64_t position)
{
    return position > -(int64_t)KVANT_PAGE_TOKENS && position <= INT32_MAX - KVANT_PAGE_TOKENS;
}

typedef struct kvant_block {
    uint64_t written;  /* bit per slot */
    int32_t open_page; /* KVANT_NO_PAGE unless the block is open or a sink */
    uint32_t sequence, index;
    /* The position of the block's first slot, if the block may have its own centre (center.h).
     * KVANT_NO_POSITION: not known. */
    int32_t position;
    uint8_t state, transform_id;
    bool resident; /* its sealed pages were written at least once, so their memory is in use */
} kvant_block;

/* Pages with numbers from n_own_pages on lie in memory that tensors share (steps.c). */
typedef struct kvant_open_page {
    int64_t block; /* -1: free */
    /* A bit per slot: the row is newer than its code in the sealed page. */
    uint64_t dirty;
    /* A bit per slot: the clock of the block's sequence has counted the row. `clock` is its value
     * after the last write to the block. */
    uint64_t counted, clock;
} kvant_open_page;

typedef struct kvant_centers kvant_centers;

/* The most different shifts of keys in a tensor, including 0 (shift.h). A larger limit makes
 * attention prepare queries for longer. A smaller limit makes 16 conversations that shift encode
 * their keys again. */
#define KVANT_MOST_SHIFTS 32u

/* The matrices W of transform=first (key_transform.h). */
typedef struct kvant_key_transform {
    float *expanded;              /* (R W)^T of all kv heads; NULL unless R is dense */
    size_t idle;                  /* rows written since `expanded` was last needed */
    uint16_t *triangles;          /* W^T (math/triangle.h) */
    kvant_centers *centers;       /* centres of blocks; NULL: all blocks share one centre */
    kvant_transform transforms[]; /* per kv head */
} kvant_key_transform;

/* The transform of all kv heads. Transform 0 comes from a calibration or is the identity. */
typedef struct kvant_tensor_transform {
    float *center, *scale;              /* n_kv_heads x head_dim each */
    kvant_key_transform *key_transform; /* or NULL; used instead of the scale */
    uint32_t n_blocks;                  /* blocks that use it */
    uint32_t generation; /* generation: a new number whenever the coefficients change */
    uint32_t lineage;    /* lineage: the second moments that it was made from (learning.h) */
    bool alive, learned; /* center=first and norm=first apply, because it was made from rows */
} kvant_tensor_transform;

/* Row statistics, for estimates of centre and scale (transforms.c). Rows are dealt into parts.
 * Each part has the sum, the minimum and the maximum of every channel. */
#define KVANT_STATISTICS_PARTS 8u

typedef struct kvant_statistics {
    uint32_t n;
    size_t width;           /* channels of all kv heads */
    float *sum, *min, *max; /* parts x width each, one allocation; NULL: nothing is learned */
} kvant_statistics;

/* Neighbouring rows of a batch that go to one block. */
typedef struct kvant_run {
    size_t first, n; /* rows */
    uint32_t block;
    uint64_t mask;    /* the slots that it writes, a bit each */
    uint64_t clock;   /* of its sequence, after the run */
    int32_t position; /* of its last row, as the plan counts (steps.c) */
} kvant_run;

#define KVANT_MOST_RUNS 64u /* at most this many runs are placed and encoded together */

typedef struct kvant_batch {
    const int64_t *slots;
    const float *rows; /* in the memory that holds the tensor's pages */
    size_t stride;
    const kvant_run *runs; /* one after another in the batch */
    uint32_t n_runs;
} kvant_batch;

/* Work on pages that the CPU cannot reach because they lie on a GPU. The tensor decides states,
 * windows and transforms of blocks on every device, so that all devices write the same bytes. A
 * device must carry out the functions in the order of the calls. A function does not report its own
 * error: `status` returns the first error so far. */
typedef struct kvant_page_device {
    /* `read` copies to the host and waits for the bytes. `copy` copies to the device from
     * anywhere. */
    void (*read)(const kvant_tensor *tensor, void *to, const void *from, size_t bytes);
    void (*copy)(const kvant_tensor *tensor, void *to, const void *from, size_t bytes);
    void (*clear)(const kvant_tensor *tensor, void *at, size_t bytes);
    /* Transforms and encodes rows, each into its block's open or sealed page. */
    void (*encode)(const kvant_tensor *tensor, const kvant_batch *batch);
    /* Quantises open pages. In each page only the first slots were written, all of them since the
     * block was opened. */
    void (*seal)(const kvant_tensor *tensor, const int32_t *pages, size_t n);
    /* Adds `taken` of the n rows to statistics that lie on the device: rows 0, n / taken, 2 n /
     * taken and so on. */
    void (*note)(const kvant_tensor *tensor, const struct kvant_statistics *seen, const float *rows,
                 size_t stride, size_t n, size_t taken);
    /* Returns a batch's rows on the host; NULL when they cannot be read. */
    const float *(*look)(const kvant_tensor *tensor, const float *rows, size_t stride, size_t n);
    kvant_status (*status)(const kvant_tensor *tensor);
    /* A device may keep fp16 pages of blocks that are sealed for the tensor. `exact` returns a
     * block's fp16 pages, or NULL. `store_exact` copies `pages` to a block's fp16 pages; slots in
     * `dirty` have no codes yet. It returns false when the device keeps no such pages for the
     * block. With pages NULL it copies nothing and only returns that answer. */
    const void *(*exact)(const kvant_tensor *tensor, uint32_t block);
    bool (*store_exact)(const kvant_tensor *tensor, uint32_t block, uint64_t dirty,
                        const void *pages);
} kvant_page_device;

struct kvant_tensor {
    const kvant_page_device *device; /* NULL: pages lie in the computer's memory */
    void *device_context;
    size_t device_bytes;        /* of matrices that the device made for transforms without W */
    uint8_t *staging;           /* of a device: the open page and the sealed pages of one block */
    const kvant_codec **codecs; /* per kv head */
    size_t *page_offsets;       /* of each kv head's sealed page in its block */
    uint32_t n_kv_heads, head_dim, n_sequences, n_blocks, blocks_per_sequence;
    size_t block_bytes, open_page_bytes, bytes;
    size_t block_stride;     /* from one block's pages to the next block's */
    uint32_t sink_blocks;    /* per sequence */
    uint32_t n_sink_pages;   /* own pages that the sinks of all sequences need */
    uint32_t n_absent_pages; /* the first own pages that have no memory */
    uint32_t n_own_pages, n_open_pages;
    kvant_step_pages *steps; /* NULL: all pages are the tensor's own */
    kvant_plan *plan;        /* of the open pages; NULL: there are none */
    int32_t *seen;           /* blocks of the plan's views */
    uint32_t newest_rows;    /* the window: newest rows of a sequence that stay open */
    /* Rows of a write that stay open until the next write. 0: there is no exact part. */
    uint32_t step_rows;
    uint32_t step_blocks; /* blocks of a step that can have an open page at the same time */
    bool always_open;     /* every row passes through an open page */
    bool learns;          /* some codec has center=first or norm=first */
    bool half_rows;       /* the device also stores rows as fp16, in its own pages */
    bool any_written;
    uint8_t *sealed, *open; /* the caller's memory */
    kvant_block *blocks;
    kvant_open_page *open_pages;
    /* Slots of an open page that count as sealed and whose codes kvant_open_encode_due makes. They
     * are 0 unless a write of one row is under way. */
    uint64_t due_slots;
    int32_t due_page;
    uint64_t *clocks; /* per sequence: how many rows were written */
    uint64_t *begun;  /* per sequence: the clock from which the newest rows count back */
    uint8_t *sequence_transforms; /* per sequence: the transform of its last block */
    kvant_tensor_transform transforms[KVANT_MAX_TRANSFORMS + 1];
    float *centers; /* the centres and scales of all transforms */
    uint32_t last_generation;
    uint8_t newest;                      /* the transform for rows when nothing else decides */
    bool rejected[KVANT_MAX_TRANSFORMS]; /* rejected for the rows that were judged last */
    /* `recent`: rows of short writes. `batch`: rows of one long write. sum is NULL while there are
     * no rows (kvant_transforms_reserve). */
    kvant_statistics recent, batch;
    kvant_statistics fetched;        /* a copy on the host, when the statistics are on a device */
    struct kvant_learning *learning; /* of transform=first, or NULL */
    struct kvant_shifts *shifts;     /* of keys that were shifted, or NULL (shift.h) */
    float *scratch;                  /* KVANT_SEAL_WORKERS x block_tokens x head_dim */
};

#define KVANT_SEAL_WORKERS 8u /* threads that seal at a time; each one has scratch of the tensor */

static inline const kvant_codec_info *kvant_tensor_codec_info(const kvant_tensor *tensor)
{
    return &tensor->codecs[0]->info;
}

static inline size_t kvant_tensor_width(const kvant_tensor *tensor)
{
    return (size_t)tensor->n_kv_heads * tensor->head_dim;
}

/* The centre and scale of one kv head in a transform. Each kv head gets only what its own codec
 * asks for. A block may have its own centre instead (kvant_block_affine). */
static inline kvant_affine kvant_tensor_transform_affine(const kvant_tensor *tensor,
                                                         uint32_t transform_id, uint32_t head)
{
    const kvant_codec_info *info = &tensor->codecs[head]->info;
    const kvant_tensor_transform *v = &tensor->transforms[transform_id];
    size_t first = (size_t)head * tensor->head_dim;
    bool center =
        info->center == KVANT_CENTER_FILE || (info->center == KVANT_CENTER_FIRST && v->learned);
    bool scale = info->norm == KVANT_NORM_FILE ||
                 (info->norm == KVANT_NORM_FIRST && v->learned && !v->key_transform);
    return (kvant_affine){ center ? v->center + first : NULL, scale ? v->scale + first : NULL };
}

/* R W of one kv head in a transform. */
static inline const kvant_transform *kvant_tensor_head_transform(const kvant_tensor *tensor,
                                                                 uint32_t transform_id,
                                                                 uint32_t head)
{
    const kvant_key_transform *key_transform = tensor->transforms[transform_id].key_transform;
    return key_transform ? &key_transform->transforms[head] : &tensor->codecs[head]->transform;
}

/* One kv head's page of a block: a page of its codec, or transformed fp16 rows while the block is
 * open. */
typedef struct kvant_page_ref {
    const kvant_codec *codec;
    const void *page;
    bool open;
} kvant_page_ref;

static inline void *kvant_sealed_page(const kvant_tensor *tensor, uint32_t block, uint32_t kv_head)
{
    return tensor->sealed + block * tensor->block_stride + tensor->page_offsets[kv_head];
}

static inline void *kvant_open_page_of(const kvant_tensor *tensor, int32_t page, uint32_t kv_head)
{
    uint8_t *pages = tensor->open;
    if (page >= (int32_t)tensor->n_own_pages && tensor->steps) {
        pages = tensor->steps->memory;
        page -= (int32_t)tensor->n_own_pages;
    }
    return pages + ((size_t)page * tensor->n_kv_heads + kv_head) * tensor->open_page_bytes;
}

static inline kvant_page_ref kvant_tensor_page(const kvant_tensor *tensor, uint32_t block,
                                               uint32_t kv_head)
{
    int32_t open = tensor->blocks[block].open_page;
    return (kvant_page_ref){ tensor->codecs[kv_head],
                             open >= 0 ? kvant_open_page_of(tensor, open, kv_head)
                                       : kvant_sealed_page(tensor, block, kv_head),
                             open >= 0 };
}

static inline size_t kvant_page_ref_bytes(const kvant_tensor *tensor, const kvant_page_ref *ref)
{
    return ref->open ? tensor->open_page_bytes : ref->codec->info.page_bytes;
}

static inline bool kvant_is_sink(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->blocks[block].index < tensor->sink_blocks;
}

static inline uint32_t kvant_count_slots(uint64_t slots)
{
    uint32_t n = 0;
    for (; slots; slots &= slots - 1)
        n++;
    return n;
}

static inline size_t kvant_open_block_bytes(const kvant_tensor *tensor)
{
    return tensor->open_page_bytes * tensor->n_kv_heads;
}

/* Copies or clears bytes of pages, which may lie on a device. kvant_pages_read copies to the
 * host. */
static inline void kvant_pages_read(const kvant_tensor *tensor, void *to, const void *from,
                                    size_t bytes)
{
    if (tensor->device)
        tensor->device->read(tensor, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static inline void kvant_pages_copy(const kvant_tensor *tensor, void *to, const void *from,
                                    size_t bytes)
{
    if (tensor->device)
        tensor->device->copy(tensor, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static inline void kvant_pages_clear(const kvant_tensor *tensor, void *at, size_t bytes)
{
    if (tensor->device)
        tensor->device->clear(tensor, at, bytes);
    else
        memset(at, 0, bytes);
}

/* The first error of work on the device; KVANT_OK when pages lie in the computer's memory. */
static inline kvant_status kvant_pages_status(const kvant_tensor *tensor)
{
    return tensor->device ? tensor->device->status(tensor) : KVANT_OK;
}

static inline const void *kvant_exact_page(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->device ? tensor->device->exact(tensor, block) : NULL;
}

static inline bool kvant_exact_store(const kvant_tensor *tensor, uint32_t block, uint64_t dirty,
                                     const void *pages)
{
    return tensor->device && tensor->device->store_exact(tensor, block, dirty, pages);
}

/* tensor.c: kvant_tensor_create with pages in a device's memory. The device and its context must
 * outlive the tensor. */
kvant_status kvant_tensor_create_on(const kvant_page_device *device, void *context,
                                    const kvant_tensor_params *params, void *memory,
                                    kvant_tensor **tensor);

/* tensor.c: makes a block empty. */
void kvant_block_clear(kvant_tensor *tensor, uint32_t block);

/* New rows of a tensor, in the memory of its device. seen: the same rows on the host. It may be
 * NULL when no magnitude exceeds kvant_tensor_safe_input, or when the device checks the rows. */
typedef struct kvant_rows {
    kvant_tensor *tensor;
    const float *rows, *seen;
    size_t stride;
} kvant_rows;

/* write.c: kvant_tensor_write for one tensor or two. On an error neither tensor changes. */
kvant_status kvant_tensor_write_seen(const kvant_rows *rows, size_t n_tensors, const int64_t *slots,
                                     size_t n, uint32_t n_threads);
float kvant_tensor_safe_input(const kvant_tensor *tensor);

/* fp16_pages.c */

/* Gives the block an open page and decodes the block's rows into it, expressed in a transform that
 * may differ from the block's own. Seals another block when no page is free. Returns false and
 * leaves the block unchanged when a row would leave fp16's range, or when there are no open
 * pages. */
bool kvant_open_block(kvant_tensor *tensor, uint32_t block, uint32_t transform_id,
                      uint32_t n_threads);

/* The same for a block to which the plan has already given a page. */
bool kvant_open_fill(kvant_tensor *tensor, uint32_t block, uint32_t transform_id,
                     uint32_t n_threads);

/* Expresses the rows of an open block in another transform. Returns false and changes nothing when
 * a row would leave fp16's range. */
bool kvant_open_reexpress(kvant_tensor *tensor, uint32_t block, uint32_t transform_id);

/* Records that a run was written to an open block. */
void kvant_open_mark_dirty(kvant_tensor *tensor, const kvant_run *run);

/* Seals rows older than their sequence's window, for one tensor or for the keys and values of a
 * layer. With an exact part the window is counted in rows; otherwise complete blocks are sealed.
 * With `all`, seals every open block. */
void kvant_open_seal_due(kvant_tensor *const *tensors, size_t n_tensors, bool all,
                         uint32_t n_threads);

/* For a write of one row into `block`: lists what kvant_open_seal_due would seal. If that is at
 * most one open page, of another block that stays open, returns true, and its rows count as sealed.
 * kvant_open_encode_due must then make their codes, for each kv head, on any threads, before the
 * write ends. Nobody reads these codes while the block is open. kvant_open_finish_due makes the
 * codes that are still missing, all at once. */
bool kvant_open_take_due(kvant_tensor *tensor, uint32_t block);
void kvant_open_encode_due(kvant_tensor *tensor, uint32_t kv_head);
void kvant_open_finish_due(kvant_tensor *tensor);

/* Seals the blocks from which the plan took pages. */
void kvant_open_seal(kvant_tensor *tensor, const kvant_plan_change *list, uint32_t n,
                     uint32_t n_threads);

/* Limits a decoded row to fp16's range. */
void kvant_limit_to_half(float *y, uint32_t n);

/* steps.c */

/* Makes the plan of a tensor's open pages. KVANT_ERR_MEMORY. */
kvant_status kvant_steps_create(kvant_tensor *tensor);

/* Tells the plan that the tensor has no pages for its first tokens, so that these need not be open.
 * Call it before anything is written. KVANT_ERR_MEMORY. */
kvant_status kvant_steps_leave_out_first(kvant_tensor *tensor);

/* kvant_open_begin starts a write of n rows; kvant_open_end finishes it. When the write begins, the
 * newest rows count back from the first of the n rows; if the write has more than step_rows rows,
 * from its last step_rows rows. When the write ends, they count back from its last row. */
void kvant_open_begin(kvant_tensor *tensor, const int64_t *slots, size_t n);
void kvant_open_end(kvant_tensor *tensor, const int64_t *slots, size_t n);

/* Counts the rows of a run and finds the run's position. Call it before the rows are marked as
 * written. A row that replaces a row that is not sealed makes no other row older. */
void kvant_open_count(kvant_tensor *tensor, kvant_run *run);

/* Lets the plan give open pages to the blocks of at most KVANT_MOST_RUNS runs, whose blocks differ.
 * If there are at least as many pages as blocks, every block gets one. Seals other blocks to free
 * their pages. */
void kvant_open_acquire_runs(kvant_tensor *tensor, const kvant_run *runs, uint32_t n,
                             uint32_t n_threads);

/* The block begins to use the page that the plan gave it. KVANT_NO_PAGE: the plan gave none. */
int32_t kvant_open_enter(kvant_tensor *tensor, uint32_t block, uint32_t n_threads);

/* The block gives its open page back. Then its sealed page counts, or with `emptied` the block is
 * empty. */
void kvant_open_leave(kvant_tensor *tensor, uint32_t block, bool emptied);

/* Returns an open page for the block, with unspecified bytes. age: how many rows were written after
 * the block's last row. Seals another block when no page is free. KVANT_NO_PAGE when the tensor has
 * no open pages. */
int32_t kvant_open_acquire(kvant_tensor *tensor, uint32_t block, uint64_t age, uint32_t n_threads);

/* The last n_rows rows of a sequence were removed, so its window moves back by as many rows. */
void kvant_open_rewind(kvant_tensor *tensor, uint32_t sequence, uint32_t n_rows);

/* How many blocks of open pages fit into the memory that tensors share. */
size_t kvant_steps_blocks(const kvant_step_pages *steps, size_t open_block_bytes);

/* Makes the tensor the owner of the shared pages, before it uses one of them. The former owner
 * seals its rows there or moves them to its own pages. Allocates nothing, so it cannot fail. */
void kvant_steps_acquire(kvant_tensor *tensor, uint32_t n_threads);

/* The tensor gives up the shared pages, because it is about to be freed. */
void kvant_steps_release(kvant_tensor *tensor);

/* slots.c */

/* Whether codes of `slots` share scales with written rows of other slots. */
bool kvant_slots_share_scales(const kvant_tensor *tensor, uint64_t written, uint64_t slots);

/* Whether kvant_slots_read writes open pages. It does when the block is open, when it is exact on
 * its device, or when rows of other slots contributed to the scales of the sealed rows of
 * `slots`. */
bool kvant_slots_as_open(const kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* Writes the pages that the block would have if only the rows of `slots` had been written to it.
 * `pages` has kvant_open_block_bytes or block_bytes bytes and any alignment. KVANT_ERR_MEMORY,
 * errors of the device. */
kvant_status kvant_slots_read(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                              uint8_t *pages);

/* Removes all bits of other slots from fp16 pages or sealed pages. `slots` are whole groups.
 * KVANT_ERR_MEMORY. */
void kvant_slots_erase_rows(const kvant_tensor *tensor, uint64_t slots, uint8_t *pages);
kvant_status kvant_slots_erase_codes(const kvant_tensor *tensor, uint64_t slots, uint8_t *pages);

/* Keeps the rows of `slots`. All other slots count as never written. */
void kvant_block_keep(kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* Gives the block to another sequence, which goes on writing to it. */
void kvant_block_adopt(kvant_tensor *tensor, uint32_t block, uint32_t sequence);

/* The slots of `slots` in an open block that have codes, too: their rows left the window, or the
 * block was opened again. 0 when these codes depend on rows of other slots. */
uint64_t kvant_slots_coded(const kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* Writes the codes of these slots. The bits of all other slots are 0. KVANT_ERR_MEMORY. */
kvant_status kvant_slots_read_codes(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                                    uint8_t *pages);

/* record.c */

struct kvant_block_slots;

/* kvant_tensor_export_record, where ages[i] rows of its sequence follow the rows of blocks[i]. */
kvant_status kvant_record_export(const kvant_tensor *tensor, const struct kvant_block_slots *blocks,
                                 uint32_t n, const uint32_t *ages, void *data, size_t bytes,
                                 uint32_t n_threads);

/* A record that was checked. */
typedef struct kvant_record {
    const uint8_t *transforms[KVANT_MAX_TRANSFORMS]; /* their headers */
    uint32_t n_transforms;
    bool of_any_slots; /* the caller accepts whatever slots the record has */
    bool is_checked;   /* the caller has compared the checksum */
    bool elsewhere;    /* the blocks are no blocks of the tensor (record_outer.c) */
    bool any_written;
    const uint8_t *blocks; /* the first block's header */
} kvant_record;

/* The two steps of kvant_tensor_import_record. The caller sets of_any_slots and
 * is_checked before. */
kvant_status kvant_record_check(kvant_tensor *tensor, const struct kvant_block_slots *blocks,
                                uint32_t n, const void *data, size_t bytes, kvant_record *r);
kvant_status kvant_record_import(kvant_tensor *tensor, const struct kvant_block_slots *blocks,
                                 uint32_t n, const kvant_record *r, uint32_t n_threads);

/* transfer.c */

/* How many rows of its sequence were written after the block's rows; of a sink, all rows of its
 * sequence. */
uint64_t kvant_block_age(const kvant_tensor *tensor, uint32_t block);

/* Gives an empty block of this age an open page, whose bytes are not specified. KVANT_NO_PAGE as
 * kvant_open_acquire. */
int32_t kvant_block_acquire(kvant_tensor *tensor, uint32_t block, uint64_t age);

/* Whether there is an open page for the block. */
bool kvant_block_finds_page(const kvant_tensor *tensor, uint32_t block);

/* Fills an empty block, which may have an open page, with slots, transform, position and sealed
 * pages (NULL: none). */
void kvant_block_fill(kvant_tensor *tensor, uint32_t block, uint32_t transform, int32_t position,
                      uint64_t written, const void *sealed);

/* KVANT_ERR_FULL with a message. */
kvant_status kvant_no_page(void);

/* transforms.c */

kvant_status kvant_transforms_create(kvant_tensor *tensor);

/* On a device, row statistics need memory for two times kvant_statistics_bytes. */
size_t kvant_statistics_bytes(const kvant_tensor *tensor);
void kvant_transforms_set_memory(kvant_tensor *tensor, float *memory);
void kvant_transforms_destroy(kvant_tensor *tensor);
void kvant_transforms_reset(kvant_tensor *tensor);

/* Counts a block in or out of its transform. A transform that no block uses may be replaced, unless
 * it is the newest. */
void kvant_transforms_join(kvant_tensor *tensor, uint32_t block, uint32_t transform_id);
void kvant_transforms_leave(kvant_tensor *tensor, uint32_t block);

/* The coefficients of a transform. */
typedef struct kvant_transform_values {
    const float *center, *scale;  /* NULL: as in transform 0 */
    const uint16_t *triangles;    /* NULL: no matrices */
    const kvant_centers *centers; /* NULL: blocks have no centres of their own */
    bool learned;
    uint32_t n_threads; /* for making matrices; 0: one */
} kvant_transform_values;

/* *version = the id of a transform in force with these coefficients. Makes the transform when there
 * is none. KVANT_ERR_FULL when all ids are in use; errors as kvant_key_transform_create. */
kvant_status kvant_transforms_find(kvant_tensor *tensor, const kvant_transform_values *numbers,
                                   uint32_t *transform_id);

/* Puts the first learned transform into force: pending rows are expressed in it, and new blocks
 * begin with it. */
void kvant_transforms_begin(kvant_tensor *tensor, uint32_t transform_id);

/* When rows of `from` are copied to `to` while both wait for a first transform, the statistics of
 * these rows are copied, too. */
void kvant_transforms_share(const kvant_tensor *from, kvant_tensor *to);

/* Whether rows are pending in open blocks because there is no learned transform yet. */
static inline bool kvant_transforms_pending(const kvant_tensor *tensor)
{
    return tensor->learns && !tensor->transforms[tensor->newest].learned;
}
