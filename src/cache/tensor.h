/* tensor.h - the inside of kvant_tensor, for attention and for the files of this folder:
 *
 *   tensor.c      sizes, creation, clearing, reading
 *   write.c       a batch of rows: check, learn, seal what is old
 *   place.c       the same rows: their places and their codes
 *   open.c        what open pages hold: sealing, opening again
 *   steps.c       which blocks have an open page, as the plan says; pages that tensors share
 *   versions.c    centres and scales: estimates from rows; the version of each row
 *   learn.c       matrices of transform=first, from rows and queries
 *   judge.c       which version a sample of them errs least with
 *   weights.c     these matrices as transforms
 *   center.c      centres that turn with positions: one per block
 *   shift.c       keys that move to other positions without being encoded again
 *   shift_rows.c  rows next to them; copies, export and import of their shifts
 *   slots.c       a block without some of its slots
 *   transfer.c    copies, export, import */
#pragma once

#include <kvant/tensor.h>

#include <string.h>

#include "../codec/encode.h"
#include "../store/plan.h"

#define KVANT_NO_PAGE (-1)
#define KVANT_CANDIDATE KVANT_MAX_VERSIONS /* place of a version that is not in force */
#define KVANT_NO_POSITION INT32_MIN

typedef struct kvant_block {
    uint64_t written;  /* bit per slot */
    int32_t open_page; /* KVANT_NO_PAGE unless open or sink */
    uint32_t sequence, index;
    int32_t
        position; /* of its first slot, where it may have a centre of its own (center.h); KVANT_NO_POSITION: not known */
    uint8_t state, version;
    bool touched; /* its sealed pages were written; until then their memory is not */
} kvant_block;

/* Open pages from n_own_pages on lie in memory that tensors share (steps.c). */
typedef struct kvant_open_page {
    int64_t block; /* -1: free */
    uint64_t
        fresh; /* bit per slot: written since it was encoded, so its sealed bytes are not up to date */
} kvant_open_page;

typedef struct kvant_centers kvant_centers;

/* Different shifts of keys in a tensor, 0 among them (shift.h). With more, attention would prepare
 * queries for longer; with fewer, 16 conversations that shift would encode keys again. */
#define KVANT_MOST_SHIFTS 32u

/* Matrices of transform=first (weights.h). */
typedef struct kvant_weights {
    float *expanded;              /* (R W)^T of all kv heads, or NULL: only if R is dense */
    size_t idle;                  /* rows written since it was needed */
    uint16_t *triangles;          /* W^T in binary16 */
    kvant_centers *centers;       /* of blocks, or NULL: the version's serves all */
    kvant_transform transforms[]; /* per kv head */
} kvant_weights;

/* Centre and scale of all kv heads. Version 0 is what a calibration gives, or the identity. */
typedef struct kvant_tensor_version {
    float *center, *scale;  /* n_kv_heads x head_dim each */
    kvant_weights *weights; /* or NULL; in place of the scale */
    uint32_t n_blocks;      /* that use it */
    uint32_t stamp;         /* another one whenever the numbers change */
    uint32_t kin;           /* of the sums that it comes from (judge.h) */
    bool alive, learnt;     /* learnt: from rows, so center=first and norm=first are in force */
} kvant_tensor_version;

/* Rows seen, for estimates of centre and scale (versions.c). Rows are dealt into parts, each with
 * sum, minimum and maximum per channel. */
#define KVANT_STATISTICS_PARTS 8u

typedef struct kvant_statistics {
    uint32_t n;
    size_t width;           /* channels of all kv heads */
    float *sum, *min, *max; /* parts x width each, one allocation; NULL where nothing is learnt */
} kvant_statistics;

/* A stretch of neighbouring rows of a batch that go to one block. */
typedef struct kvant_run {
    size_t first, n; /* rows */
    uint32_t block;
    uint64_t mask;    /* slots it writes */
    int32_t position; /* of its last row, as the plan counts (steps.c) */
} kvant_run;

#define KVANT_MOST_RUNS 64u /* placed and encoded together */

typedef struct kvant_batch {
    const int64_t *slots;
    const float *rows; /* where the tensor's pages are */
    size_t stride;
    const kvant_run *runs; /* one after the other in the batch */
    uint32_t n_runs;
} kvant_batch;

/* Work on pages that the CPU cannot reach, because they lie on a GPU. States, windows and versions
 * of blocks are the tensor's on every device, so that all devices write the same bytes. The
 * functions are called in an order that they must keep. They do not fail at once: status says what
 * went wrong so far. */
typedef struct kvant_page_device {
    /* read: to the host, at once. copy: to the device, from anywhere. */
    void (*read)(const kvant_tensor *tensor, void *to, const void *from, size_t bytes);
    void (*copy)(const kvant_tensor *tensor, void *to, const void *from, size_t bytes);
    void (*clear)(const kvant_tensor *tensor, void *at, size_t bytes);
    /* Transforms and encodes rows, each into its block's open or sealed page. */
    void (*encode)(const kvant_tensor *tensor, const kvant_batch *batch);
    /* Quantises open pages, of which the first slots were written, all of them since the block was
     * opened. */
    void (*seal)(const kvant_tensor *tensor, const int32_t *pages, size_t n);
    /* Adds rows first, first + n / taken, ... of n to statistics of rows seen, which lie on the device. */
    void (*note)(const kvant_tensor *tensor, const struct kvant_statistics *seen, const float *rows,
                 size_t stride, size_t n, size_t taken);
    /* A batch's rows on the host; NULL when they cannot be read. */
    const float *(*look)(const kvant_tensor *tensor, const float *rows, size_t stride, size_t n);
    kvant_status (*status)(const kvant_tensor *tensor);
    /* A device may keep fp16 pages of blocks that are sealed to the tensor. exact returns a
     * block's fp16 pages, or NULL. store_exact copies `pages` to a block's fp16 pages. Slots in
     * `fresh` have no codes yet. It returns false when the device keeps no such pages. With pages
     * NULL it only says whether the device does. */
    const void *(*exact)(const kvant_tensor *tensor, uint32_t block);
    bool (*store_exact)(const kvant_tensor *tensor, uint32_t block, uint64_t fresh,
                        const void *pages);
} kvant_page_device;

struct kvant_tensor {
    const kvant_page_device *device; /* NULL: pages lie in the computer's memory */
    void *device_context;
    size_t device_bytes;        /* of matrices that the device made of versions without one */
    uint8_t *staging;           /* of a device: the open page and the sealed pages of one block */
    const kvant_codec **codecs; /* per kv head */
    size_t *page_offsets;       /* of each kv head's sealed page in its block */
    uint32_t n_kv_heads, head_dim, n_sequences, n_blocks, blocks_per_sequence;
    size_t block_bytes, open_page_bytes, bytes;
    size_t block_stride;     /* from one block's pages to the next block's */
    uint32_t sink_blocks;    /* per sequence */
    uint32_t n_sink_pages;   /* of the own pages: as many as sinks of all sequences need */
    uint32_t n_absent_pages; /* the first ones, for which there is no memory */
    uint32_t n_own_pages, n_open_pages;
    kvant_step_pages *steps; /* NULL: all pages are the tensor's own */
    kvant_plan *plan;        /* of the open pages; NULL: there are none */
    int32_t *seen;           /* blocks of the plan's views */
    uint32_t newest_rows;    /* of a sequence, that stay open: its window */
    /* Rows of a write that stay open until the next one; 0: there is no exact part. */
    uint32_t step_rows;
    uint32_t step_blocks; /* that get an open page at once */
    bool always_open;     /* rows pass through open pages */
    bool learns;          /* center=first or norm=first */
    bool half_rows;       /* a device stores rows as fp16 in pages of its own, too */
    bool any_written;
    uint8_t *sealed, *open; /* the caller's memory */
    kvant_block *blocks;
    kvant_open_page *open_pages;
    uint64_t *clocks;           /* per sequence: rows written */
    uint64_t *begun;            /* per sequence: the clock that the newest rows count back from */
    uint8_t *sequence_versions; /* of each sequence's last block */
    kvant_tensor_version versions[KVANT_MAX_VERSIONS + 1];
    float *centers; /* of all versions, with the scales */
    uint32_t last_stamp;
    uint8_t newest;                 /* version of rows that nothing else decides */
    bool unfit[KVANT_MAX_VERSIONS]; /* for the rows judged last */
    /* Of rows that came a few at a time, of one long batch; NULL: none were noted
     * (kvant_versions_open). */
    kvant_statistics recent, batch;
    kvant_statistics fetched;        /* on the host, where those are on a device */
    struct kvant_learning *learning; /* of transform=first, or NULL */
    struct kvant_shifts *shifts;     /* of keys that were shifted, or NULL (shift.h) */
    float *scratch;                  /* KVANT_SEAL_WORKERS x block_tokens x head_dim */
};

#define KVANT_SEAL_WORKERS 8u

static inline const kvant_codec_info *kvant_tensor_codec_info(const kvant_tensor *tensor)
{
    return &tensor->codecs[0]->info;
}

static inline size_t kvant_tensor_width(const kvant_tensor *tensor)
{
    return (size_t)tensor->n_kv_heads * tensor->head_dim;
}

/* Centre and scale of one kv head in a version: each head has what its own codec asks for. Blocks may have a centre of their own
 * (kvant_block_affine). */
static inline kvant_affine kvant_version_affine(const kvant_tensor *tensor, uint32_t version,
                                                uint32_t head)
{
    const kvant_codec_info *info = &tensor->codecs[head]->info;
    const kvant_tensor_version *v = &tensor->versions[version];
    size_t first = (size_t)head * tensor->head_dim;
    bool center =
        info->center == KVANT_CENTER_FILE || (info->center == KVANT_CENTER_FIRST && v->learnt);
    bool scale = info->norm == KVANT_NORM_FILE ||
                 (info->norm == KVANT_NORM_FIRST && v->learnt && !v->weights);
    return (kvant_affine){ center ? v->center + first : NULL, scale ? v->scale + first : NULL };
}

/* R W of one kv head in a version. */
static inline const kvant_transform *kvant_version_transform(const kvant_tensor *tensor,
                                                             uint32_t version, uint32_t head)
{
    const kvant_weights *weights = tensor->versions[version].weights;
    return weights ? &weights->transforms[head] : &tensor->codecs[head]->transform;
}

/* One kv head's page of a block: of its codec, or of fp16 rows behind the same transform while the
 * block is open. */
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

/* Bytes of pages, wherever they lie; kvant_pages_read: to the host. */
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

/* What went wrong on the device, KVANT_OK for the computer's memory. */
static inline kvant_status kvant_pages_status(const kvant_tensor *tensor)
{
    return tensor->device ? tensor->device->status(tensor) : KVANT_OK;
}

static inline const void *kvant_exact_page(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->device ? tensor->device->exact(tensor, block) : NULL;
}

static inline bool kvant_exact_store(const kvant_tensor *tensor, uint32_t block, uint64_t fresh,
                                     const void *pages)
{
    return tensor->device && tensor->device->store_exact(tensor, block, fresh, pages);
}

/* tensor.c: kvant_tensor_create in a device's memory. device and context outlive the tensor. */
kvant_status kvant_tensor_create_on(const kvant_page_device *device, void *context,
                                    const kvant_tensor_params *params, void *memory,
                                    kvant_tensor **tensor);

/* tensor.c: a block becomes empty. */
void kvant_block_clear(kvant_tensor *tensor, uint32_t block);

/* New rows of a tensor, on its device. seen: the same rows on the host, or NULL when their numbers
 * are at most kvant_tensor_safe_input, or when the device checks them. */
typedef struct kvant_rows {
    kvant_tensor *tensor;
    const float *rows, *seen;
    size_t stride;
} kvant_rows;

/* write.c: kvant_tensor_write for one tensor or two, all or nothing for both. */
kvant_status kvant_tensor_write_seen(const kvant_rows *rows, size_t n_tensors, const int64_t *slots,
                                     size_t n, uint32_t n_threads);
float kvant_tensor_safe_input(const kvant_tensor *tensor);

/* open.c */

/* Gives the block an open page, sealing another block when none is free, and decodes what the block
 * holds into it, in the terms of a version that may differ from the block's. False, and the block
 * as before, when a row would leave fp16's range there or when there are no open pages. */
bool kvant_open_block(kvant_tensor *tensor, uint32_t block, uint32_t version, uint32_t n_threads);

/* The same for a block to which the plan gave a page. */
bool kvant_open_fill(kvant_tensor *tensor, uint32_t block, uint32_t version, uint32_t n_threads);

/* Expresses the rows of an open block in another version; false, and nothing changed, when one
 * leaves fp16's range. */
bool kvant_open_reexpress(kvant_tensor *tensor, uint32_t block, uint32_t version);

/* Notes a write to slots (a bit each) of an open block. */
void kvant_open_touch(kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* Seals what is older than its sequence's window, of one tensor or of the keys and values of a layer:
 * rows of a tensor with an exact part, otherwise blocks that are complete. With all, whatever the
 * pool holds. */
void kvant_open_seal_due(kvant_tensor *const *tensors, size_t n_tensors, bool all,
                         uint32_t n_threads);

/* Seals blocks that the plan took pages from. */
void kvant_open_seal(kvant_tensor *tensor, const kvant_plan_change *list, uint32_t n,
                     uint32_t n_threads);

/* Limits a decoded row to fp16's range. */
void kvant_limit_to_half(float *y, uint32_t n);

/* steps.c */

/* Makes the plan of a tensor's open pages. KVANT_ERR_MEMORY. */
kvant_status kvant_steps_create(kvant_tensor *tensor);

/* The tensor has no pages for its first tokens: these need not be open. Before anything is written.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_steps_leave_out_first(kvant_tensor *tensor);

/* A write of n rows begins, or these n rows were written. The newest rows count back from the first
 * of the n rows when the write begins, and from the last one when it ends. If a write has more than
 * step_rows rows, they count back from its last step_rows rows when it begins. */
void kvant_open_begin(kvant_tensor *tensor, const int64_t *slots, size_t n);
void kvant_open_end(kvant_tensor *tensor, const int64_t *slots, size_t n);

/* Counts the rows of a run, before they are marked as written, and finds the run's position. Rows in
 * place of others that are not sealed make no row older. */
void kvant_open_count(kvant_tensor *tensor, kvant_run *run);

/* The plan gives the blocks of at most KVANT_MOST_RUNS runs, which differ, open pages: to all of
 * them, if there are no more of them than pages. Seals other blocks for that. */
void kvant_open_take_runs(kvant_tensor *tensor, const kvant_run *runs, uint32_t n,
                          uint32_t n_threads);

/* The block begins to use the page that the plan gave it. KVANT_NO_PAGE: it has none. */
int32_t kvant_open_enter(kvant_tensor *tensor, uint32_t block, uint32_t n_threads);

/* The block gives its open page back: its sealed bytes count, or it is empty from now on. */
void kvant_open_leave(kvant_tensor *tensor, uint32_t block, bool emptied);

/* Takes an open page for the block, with unspecified bytes; its last row is `age` rows old. Seals
 * another block when no page is free. KVANT_NO_PAGE when the tensor has no open pages. */
int32_t kvant_open_take(kvant_tensor *tensor, uint32_t block, uint64_t age, uint32_t n_threads);

/* The last n rows of a sequence were cut: its window goes back by as many. */
void kvant_open_rewind(kvant_tensor *tensor, uint32_t sequence, uint32_t n_rows);

/* How many blocks the pages that a tensor shares have room for. */
size_t kvant_steps_blocks(const kvant_step_pages *steps, size_t open_block_bytes);

/* Makes the tensor the owner of the pages that it shares, before it uses one. Another owner's rows
 * are sealed or moved to that tensor's own pages. Allocates nothing, so it cannot fail. */
void kvant_steps_acquire(kvant_tensor *tensor, uint32_t n_threads);

/* The tensor uses no shared page any more and is about to go. */
void kvant_steps_release(kvant_tensor *tensor);

/* slots.c */

/* Whether kvant_slots_read writes open pages: the block is open or exact on its device, or its
 * sealed rows of `slots` have scales that rows of other slots gave, too. */
bool kvant_slots_as_open(const kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* Writes the pages that the block would have if rows of `slots` alone had been written to it, at
 * any alignment: kvant_open_block_bytes or block_bytes. KVANT_ERR_MEMORY, errors of the device. */
kvant_status kvant_slots_read(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                              uint8_t *pages);

/* Forgets the rows of other slots: these slots count as never written. */
void kvant_block_keep(kvant_tensor *tensor, uint32_t block, uint64_t slots);

/* The block is of another sequence from now on, which goes on writing it. */
void kvant_block_adopt(kvant_tensor *tensor, uint32_t block, uint32_t sequence);

/* transfer.c: kvant_tensor_export of some slots. */
kvant_status kvant_block_export(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                                void *data, size_t bytes, size_t *used);

/* versions.c */

kvant_status kvant_versions_create(kvant_tensor *tensor);

/* Statistics of rows seen on a device: memory for two of kvant_statistics_bytes there. */
size_t kvant_statistics_bytes(const kvant_tensor *tensor);
void kvant_versions_place(kvant_tensor *tensor, float *memory);
void kvant_versions_destroy(kvant_tensor *tensor);
void kvant_versions_reset(kvant_tensor *tensor);

/* Counts a block in or out of its version. A version that nothing uses may be taken again, unless
 * it is the newest. */
void kvant_version_join(kvant_tensor *tensor, uint32_t block, uint32_t version);
void kvant_version_leave(kvant_tensor *tensor, uint32_t block);

typedef struct kvant_version_numbers {
    const float *center, *scale;  /* NULL: as in version 0 */
    const uint16_t *triangles;    /* NULL: no matrices */
    const kvant_centers *centers; /* NULL: none of blocks */
    bool learnt;
} kvant_version_numbers;

/* *version = the number of an alive version with these numbers, which is made when there is none. KVANT_ERR_FULL when all are
 * taken; errors as kvant_weights_create. */
kvant_status kvant_version_find(kvant_tensor *tensor, const kvant_version_numbers *numbers,
                                uint32_t *version);

/* The first learnt version is there: rows that waited for it are expressed in it, new blocks begin
 * with it. */
void kvant_versions_begin(kvant_tensor *tensor, uint32_t version);

/* Rows of `from` that wait for a first version take what was seen of them along. */
void kvant_versions_share(const kvant_tensor *from, kvant_tensor *to);

/* Whether rows wait in open blocks for the first version. */
static inline bool kvant_versions_wait(const kvant_tensor *tensor)
{
    return tensor->learns && !tensor->versions[tensor->newest].learnt;
}
