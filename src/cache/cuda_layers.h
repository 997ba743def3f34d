/* cuda_layers.h - what a cache keeps on a GPU.
 *
 *   cuda_layers.c     makes it: codecs, memory, numbers of a calibration
 *   cuda_versions.c   centres, scales and matrices of versions
 *   cuda_exact.c      fp16 pages of blocks that are encoded later, as the plan says
 *   device_cuda.c     writes rows: the tensors' kvant_page_device
 *   cuda_attention.c  reads pages
 *   cuda_steps.c      decode steps of a CUDA graph
 *   cuda_read.c       rows of pages */
#pragma once

#include "../base/error.h"
#include "../device/memory.h"
#include "../store/plan.h"
#include "device.h"
#include "tensor.h"

typedef struct cuda_memory cuda_memory;
typedef struct cuda_layer cuda_layer;

/* Keys or values of a layer. Their tensor has its states on the host and its pages on the GPU. */
typedef struct cuda_part {
    cuda_memory *memory;
    cuda_layer *layer;
    kvant_tensor *tensor;
    kvant_role role;
    kvant_cuda_codec *codec, *open_codec; /* of all kv heads */
    kvant_cuda_codec *full, *full_open;   /* the same for matrices; NULL: there was none */
    kvant_codec *made; /* what these were made of; NULL: they are another layer's */
    float *matrices
        [KVANT_MAX_VERSIONS]; /* device: of versions with one: R W, then R W^-1, of each kv head; NULL: none yet */
    float *queries[KVANT_MAX_VERSIONS]; /* device: matrices of queries, of versions without one */
    uint32_t query_stamps[KVANT_MAX_VERSIONS];
    bool owns_codecs;  /* else an earlier layer's */
    void *pages;       /* in the memory's pages: of the tensor, then exact ones */
    float *floats;     /* there too: exact rows before they are rounded; NULL: not kept */
    uint32_t n_open;   /* numbers of the tensor's open pages */
    uint32_t n_unused; /* the first of these, which have no memory: the plan keeps such rows */
    bool stores_fp16;  /* codes are as large as fp16 rows: no row has an exact page */
    uint32_t n_absent; /* page numbers that only the other role uses */
    float *statistics; /* device: of rows that centre and scale are learnt from */
    float *numbers;    /* device: weights, inverse weights, versions */
    size_t n_weights;  /* per kv head: 0, head_dim, or head_dim^2 */
    float *feedback;   /* device: pivots and columns of each kv head; NULL: none */
    float *centroids;  /* device: of kmeans, kv head after kv head; NULL: none */
    float *
        matrix; /* device: R^T, then R, of a dense rotation, of each kv head or of all; NULL: none */
    size_t matrix_stride;                /* from a kv head's to the next one's; 0: one for all */
    uint32_t stamps[KVANT_MAX_VERSIONS]; /* of versions as they are on the device; 0: not there */
} cuda_part;

/* Rows of a role in an exact page. */
typedef struct cuda_exact {
    bool there;     /* the block's rows lie in the page, all of them */
    uint64_t fresh; /* bit per slot: newer than its codes */
} cuda_exact;

struct cuda_layer {
    cuda_part parts[2];   /* by kvant_role */
    bool has_exact;       /* it has the plan's pages */
    uint32_t first_exact; /* number of the first of them, for keys and values */
    cuda_exact *exact[2]; /* by kvant_role, of each page */
};

/* Rows that wait to be written, so that keys and values go in one launch. */
typedef struct cuda_append {
    cuda_part *part; /* NULL: none */
    const float *rows;
    size_t stride, n;
    uint32_t version;
    bool open, exact; /* exact: in pages of the plan */
    int64_t
        slots[KVANT_CACHE_BATCH]; /* of open pages, or of sealed ones; below 0: another call's */
} cuda_append;

#define KVANT_CUDA_SEAL_TOGETHER 64u

/* Of the device: arrays of a call. Only addresses of members are taken. */
typedef struct cuda_arguments {
    uint32_t largest[2];
    int64_t slots[2][KVANT_CACHE_BATCH];
    int64_t rows[KVANT_CACHE_BATCH]; /* 0, 1, 2, ... */
    int64_t waiting[KVANT_PAGE_TOKENS];
    int32_t full[2][KVANT_CUDA_SEAL_TOGETHER]; /* exact pages, the blocks */
    int32_t seal[3][64];                       /* open blocks, sealed blocks, tokens */
} cuda_arguments;

/* Memory of the device, or of the host, that grows when a call needs more. */
typedef struct cuda_buffer {
    void *at;
    size_t bytes;
} cuda_buffer;

typedef struct cuda_steps cuda_steps;

struct cuda_memory {
    kvant_cuda_stream stream;
    cuda_steps *steps; /* NULL: none yet */
    cuda_layer *layers;
    void *pages; /* device: of all parts */
    uint32_t n_layers;
    kvant_plan *plan;       /* NULL: no row is exact */
    uint32_t n_exact;       /* pages */
    uint32_t n_first;       /* first tokens of a sequence that are exact; 0: no exact part */
    bool keeps_floats;      /* no exact part */
    kvant_plan_view *views; /* of a step */
    struct {
        size_t n;
        int64_t slots[KVANT_CACHE_BATCH];
    } planned; /* rows of the last plan */
    cuda_arguments *arguments;
    uint32_t *refused; /* on the host: of rows that append did not check; NULL: it checks all */
    cuda_append pending[2]; /* by kvant_role */
    struct {
        size_t n;
        int64_t slots[KVANT_CACHE_BATCH];
    } copied[2]; /* as they are on the device; layers of a step have the same ones */
    cuda_buffer seen[2],
        asked;      /* host: rows of a batch, by kvant_role, and queries that are learnt from */
    float *version; /* host: numbers of a version on their way */
    uint8_t *workspace;
    size_t workspace_bytes;
    int32_t *staging; /* host: tables of a call, and as they were copied to the device last */
    size_t staging_words, n_copied;
    cuda_buffer tables, queries, gathered, turned; /* turned: rows of a batch, values behind keys */
    cuda_buffer scratch;                           /* a workspace with room for unpacked pages */
    kvant_status
        status; /* the first error of work on pages: their bytes are unknown from then on */
    const char *failed;
};

/* The cache's device functions of the same names. */
kvant_status kvant_cuda_layers_create(kvant_cache *cache);
void kvant_cuda_layers_destroy(kvant_cache *cache);
kvant_status kvant_cuda_layers_attend(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                      uint32_t n_sequences, const kvant_attention_problem *problem);

kvant_status kvant_cuda_layers_read(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                                    uint32_t first, uint32_t n, float *k, float *v);
kvant_status kvant_cuda_steps_begin(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                                    kvant_steps_info *info);
kvant_status kvant_cuda_steps_next(kvant_cache *cache);
kvant_status kvant_cuda_step(kvant_cache *cache, uint32_t layer, const kvant_step *step);
void kvant_cuda_steps_destroy(kvant_cache *cache);

/* cuda_exact.c */

/* kvant_cuda_exact_create counts pages and makes the plan, before memory for pages is allocated.
 * kvant_cuda_exact_destroy also frees what a create that failed left. */
kvant_status kvant_cuda_exact_create(kvant_cache *cache);
void kvant_cuda_exact_destroy(cuda_memory *memory);

/* Plans for the n rows of cache->slots, which a layer is about to get, and carries the plan out in
 * all layers. */
void kvant_cuda_exact_plan(kvant_cache *cache, uint32_t layer, uint32_t n);

/* Plans for the rows of a block that come without a step: a copy, or an imported block. */
void kvant_cuda_exact_plan_block(cuda_part *part, uint32_t block);

/* The block holds no rows any more. */
void kvant_cuda_exact_release(kvant_cache *cache, uint32_t block);

static inline bool kvant_cuda_has_exact(const cuda_part *part)
{
    return part->layer->has_exact && !part->stores_fp16;
}

/* Returns the exact page that holds a block's rows, or KVANT_NO_PAGE. */
int32_t kvant_cuda_exact_page(const cuda_part *part, uint32_t block);

/* Returns the exact page for rows that the caller is about to write to `slots`, or KVANT_NO_PAGE:
 * the plan gives the block no page. The tensor counts these slots as written already. Other rows of
 * the block are decoded into the page first. */
int32_t kvant_cuda_exact_page_for(cuda_part *part, uint32_t block, uint64_t slots);

/* Copies a block's fp16 rows to its exact page. Slots in `fresh` have no codes yet. Returns false
 * when the plan gives the block no page. */
bool kvant_cuda_exact_store(cuda_part *part, uint32_t block, uint64_t fresh, const void *rows);

/* Brings the codes of a block's exact rows up to date. */
void kvant_cuda_exact_encode(cuda_part *part, uint32_t block);

/* Makes the block's codes, or its tensor's open page, count in place of its exact page. */
void kvant_cuda_exact_drop(cuda_part *part, uint32_t block);

kvant_cuda_pages kvant_cuda_exact_pages(const cuda_part *part);
void *kvant_cuda_exact_at(const cuda_part *part, int32_t page);

/* Returns the number of a block's fp16 page, which is an open page of its tensor or an exact page,
 * or KVANT_NO_PAGE when the block's codes count. */
int32_t kvant_cuda_page_of(const cuda_part *part, uint32_t block);

/* device_cuda.c */

/* KVANT_OK, or what is known of rows that were appended without a check; once. */
kvant_status kvant_cuda_refused(cuda_memory *memory);
extern const kvant_page_device kvant_cuda_page_device;

static inline cuda_layer *kvant_cuda_layer(const kvant_cache *cache, uint32_t layer)
{
    return &((cuda_memory *)cache->memory)->layers[layer];
}

kvant_cuda_tables kvant_cuda_tables_of(const cuda_part *part, uint32_t head);

/* cuda_versions.c */

kvant_status kvant_cuda_versions_create(cuda_part *part);
void kvant_cuda_versions_destroy(cuda_part *part);

/* Centre and scale of a version on the device, of all kv heads, or NULL; attention_scale: what
 * queries or outputs are multiplied by; turned_center: R W (c / s); weights: of all kv heads, or NULL. Copies
 * them there when they have changed. full: weights are matrices, with the rotation; turns: kernels do not
 * know the rotation. */
typedef struct cuda_version {
    const float *center, *scale, *attention_scale, *turned_center, *weights, *inverse_weights;
    const kvant_cuda_codec *codec, *open_codec;
    bool full, turns;
} cuda_version;

cuda_version kvant_cuda_version(cuda_part *part, uint32_t version);

/* Centres of all versions, each of all kv heads: as plain queries meet them, or turned, as queries
 * that went through the matrix of a version do. A version without a centre has zeros. */
const float *kvant_cuda_centers(const cuda_part *part, bool turned);

/* Attention over keys of several versions gets queries that went through the matrix of each, with
 * rotation and scale. So its codec of keys has no rotation: it is `full`, or one with a matrix
 * from a file. kvant_cuda_make_queries makes the matrix and `full` where they are missing. */
kvant_status kvant_cuda_make_queries(cuda_part *part, uint32_t version);
const float *kvant_cuda_query_matrix(cuda_part *part, uint32_t version);

/* Rows through a part's dense rotation, or back. */
kvant_cuda_turn_args kvant_cuda_turn_of(const cuda_part *part, bool back);

/* Whether rows, queries and outputs of a version pass through the part's dense rotation. */
static inline bool kvant_cuda_turns(const cuda_part *part, uint32_t version)
{
    return part->matrix && !part->tensor->versions[version].weights;
}

kvant_cuda_pages kvant_cuda_pages_of(const cuda_part *part, bool open);

/* n numbers of the device, in a buffer of the host, which grows; NULL and a status, without a message, where that
 * fails. Waits for the stream. */
const float *kvant_cuda_seen(cuda_memory *memory, cuda_buffer *buffer, const float *numbers,
                             size_t n, kvant_status *status);

kvant_status kvant_cuda_grow(cuda_buffer *buffer, size_t bytes, const char *what);

/* What append is told of rows; append's types are floats (device_cuda.c). */
kvant_cuda_rows kvant_cuda_rows_of(const cuda_append *append);

/* Remembers an error of work on pages. */
void kvant_cuda_note(cuda_memory *memory, kvant_status status, const char *what);

/* Leaves a message for a call of the GPU that failed. */
static inline kvant_status kvant_cuda_said(kvant_status status, const char *what)
{
    return status == KVANT_OK
               ? status
               : kvant_fail(NULL, status, "cache on cuda: %s: %s", what, kvant_strerror(status));
}
