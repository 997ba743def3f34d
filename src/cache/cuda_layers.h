/* cuda_layers.h - the memory of a cache on a GPU.
 *
 *   cuda_layers.c     makes it: codecs, memory, coefficients of a calibration
 *   cuda_transforms.c centres, scales and matrices of transforms
 *   cuda_exact.c      exact pages: fp16 pages of blocks that are encoded later, as the plan says
 *   device_cuda.c     writes rows: the tensors' kvant_page_device
 *   cuda_attention.c  reads pages; cuda_attention_stage.c finds their blocks
 *   cuda_steps.c      decode steps of a CUDA graph
 *   cuda_read.c       reads rows of pages */
#pragma once

#include <kvant/cuda_kernels.h>

#include "../base/error.h"
#include "../device/memory.h"
#include "../store/plan.h"
#include "device.h"
#include "tensor.h"

typedef struct cuda_memory cuda_memory;
typedef struct cuda_layer cuda_layer;

/* The keys or the values of a layer. The states of their tensor are on the host, its pages on the
 * GPU. */
typedef struct cuda_part {
    cuda_memory *memory;
    cuda_layer *layer;
    kvant_tensor *tensor;
    kvant_role role;
    kvant_cuda_codec *codec, *open_codec; /* of all kv heads */
    kvant_cuda_codec *full, *full_open;   /* the same with matrices; NULL: not needed so far */
    kvant_codec *made; /* the source of full and full_open; NULL: another layer owns them */
    /* device: for each transform with W: its compact form (kvant_cuda_compact). With a dense R: R
     * W, then R W^-T, of each kv head. NULL: not made yet. */
    void *matrices[KVANT_MAX_TRANSFORMS];
    float
        *queries[KVANT_MAX_TRANSFORMS]; /* device: matrices for queries, of transforms without W */
    uint32_t query_generations[KVANT_MAX_TRANSFORMS];
    bool owns_codecs;  /* false: an earlier layer owns them */
    void *pages;       /* in cuda_memory.pages: pages of the tensor, then exact pages */
    float *floats;     /* in cuda_memory.pages: exact rows before rounding; NULL: not kept */
    uint32_t n_open;   /* page numbers of the tensor's open pages */
    uint32_t n_unused; /* the first page numbers, without memory: the plan keeps these rows */
    bool stores_fp16;  /* codes are as large as fp16 rows, so no row has an exact page */
    uint32_t n_absent; /* page numbers that only the layer's second role uses */
    float *statistics; /* device: row statistics, from which centre and scale are learned */
    float *numbers;    /* device: weights, inverse weights, transforms */
    size_t key_transform_size; /* per kv head: 0, head_dim, or head_dim^2 */
    float *feedback;           /* device: pivots and columns of each kv head; NULL: none */
    float *centroids;          /* device: of kmeans, kv head after kv head; NULL: none */
    /* device: for a dense rotation R^T, then R, of each kv head or of all; NULL: none. */
    float *matrix;
    size_t matrix_stride; /* from the matrix of a kv head to the next one; 0: one for all */
    /* Generation of each transform that is on the device; 0: it is not there. */
    uint32_t generations[KVANT_MAX_TRANSFORMS];
} cuda_part;

/* The rows of a role in an exact page. */
typedef struct cuda_exact {
    bool there;     /* the page holds all of the block's rows */
    uint64_t dirty; /* a bit per slot: the row is newer than its code */
} cuda_exact;

struct cuda_layer {
    cuda_part parts[2];   /* by kvant_role */
    bool has_exact;       /* the plan's pages exist for this layer */
    uint32_t first_exact; /* the page number of the first of them, for keys and values */
    cuda_exact *exact[2]; /* by kvant_role, then by page */
};

/* Rows that are pending, so that one launch writes keys and values. */
typedef struct cuda_append {
    cuda_part *part; /* NULL: none */
    const float *rows;
    size_t stride, n;
    uint32_t transform_id;
    bool open, exact; /* exact: the rows go to the plan's pages */
    /* Slots of open pages, or of sealed ones. Below 0: another call writes the row. */
    int64_t slots[KVANT_CACHE_BATCH];
} cuda_append;

/* The most blocks that one launch seals. More blocks take several launches. */
#define KVANT_CUDA_SEAL_TOGETHER 64u

/* The arrays of a call, in the device's memory. The host only takes addresses of members. */
typedef struct cuda_arguments {
    uint32_t largest[2];
    int64_t slots[2][KVANT_CACHE_BATCH];
    int64_t rows[KVANT_CACHE_BATCH]; /* 0, 1, 2 and so on */
    int64_t pending_slots[KVANT_PAGE_TOKENS];
    int32_t full[2][KVANT_CUDA_SEAL_TOGETHER]; /* exact pages, then their blocks */
    int32_t seal[3][64];                       /* open blocks, sealed blocks, tokens */
} cuda_arguments;

/* Memory of the device or of the host. It grows when a call needs more. */
typedef struct cuda_buffer {
    void *at;
    size_t bytes;
} cuda_buffer;

typedef struct cuda_steps cuda_steps;

struct cuda_memory {
    kvant_cuda_stream stream;
    cuda_steps *steps; /* NULL: none yet */
    cuda_layer *layers;
    void *pages; /* device: the pages of all parts */
    uint32_t n_layers;
    kvant_plan *plan;       /* NULL: no row is exact */
    uint32_t n_exact;       /* pages of the plan */
    uint32_t n_first;       /* first tokens of a sequence that are exact; 0: no exact part */
    bool keeps_floats;      /* there is no exact part, so pages keep float rows */
    kvant_plan_view *views; /* of a step */
    struct {
        size_t n;
        int64_t slots[KVANT_CACHE_BATCH];
    } planned; /* the rows for which the plan decided last */
    cuda_arguments *arguments;
    /* On the host: error bits for rows that append did not check. NULL: append checks all rows. */
    uint32_t *refused;
    cuda_append pending[2]; /* by kvant_role */
    struct {
        size_t n;
        int64_t slots[KVANT_CACHE_BATCH];
    } copied[2]; /* slots that are on the device already; all layers of a step have the same ones */
    /* On the host: rows of a batch, by kvant_role; queries from which the cache learns. */
    cuda_buffer seen[2], queries_read;
    float
        *transform_values; /* on the host: coefficients of a transform on their way to the device */
    uint8_t *workspace;
    size_t workspace_bytes;
    int32_t *staging; /* on the host: tables of a call, then a copy of the tables on the device */
    size_t staging_words, n_copied;
    cuda_buffer tables, queries, gathered,
        rotated;         /* rotated: rows after a dense rotation, keys, then values */
    cuda_buffer scratch; /* a workspace with room for unpacked pages */
    cuda_buffer matrix;  /* W, or R W^-T, of a compact form, for one call */
    /* The first error of work on pages. After it the bytes of pages are unknown. */
    kvant_status status;
    const char *failed;
};

/* The functions of kvant_device with the same names. */
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

/* Copies a block's fp16 rows to its exact page. Slots in `dirty` have no codes yet. Returns false
 * when the plan gives the block no page. */
bool kvant_cuda_exact_store(cuda_part *part, uint32_t block, uint64_t dirty, const void *rows);

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

/* Returns and clears the error of an append that did not check its rows. KVANT_OK: there is
 * none. */
kvant_status kvant_cuda_refused(cuda_memory *memory);
extern const kvant_page_device kvant_cuda_page_device;

static inline cuda_layer *kvant_cuda_layer(const kvant_cache *cache, uint32_t layer)
{
    return &((cuda_memory *)cache->memory)->layers[layer];
}

kvant_cuda_tables kvant_cuda_tables_of(const cuda_part *part, uint32_t head);

/* cuda_transforms.c */

kvant_status kvant_cuda_transforms_create(cuda_part *part);
void kvant_cuda_transforms_destroy(cuda_part *part);

/* The coefficients of a transform on the device, each for all kv heads, or NULL. Queries or outputs
 * are multiplied by attention_scale. rotated_center is R W (c / s). full: `key_transform` are
 * matrices and include the rotation. rotates: the kernels do not know the rotation, so the caller
 * applies it. */
typedef struct cuda_transform {
    const float *center, *scale, *attention_scale, *rotated_center, *key_transform,
        *inverse_key_transform;
    const void *compact; /* in place of key_transform and inverse_key_transform */
    const kvant_cuda_codec *codec, *open_codec;
    bool full, rotates;
} cuda_transform;

/* Returns a transform, after copying its coefficients to the device if they have changed. */
cuda_transform kvant_cuda_transform(cuda_part *part, uint32_t transform_id);

/* R W^-T of a transform. It is made for the call at hand if the transform is compact; another call
 * then overwrites it. NULL: none, or an error was recorded. */
const float *kvant_cuda_inverse_matrix(cuda_part *part, const cuda_transform *transform);

/* The centres of all transforms, each for all kv heads. rotated: R W (c / s), for queries that went
 * through the matrix of a transform; otherwise c, for plain queries. A transform without a centre
 * has zeros. */
const float *kvant_cuda_centers(const cuda_part *part, bool rotated);

/* If the keys have several transforms, attention gets one query per transform, multiplied by the
 * transform's matrix, rotation and scale. Then the codec of keys must have no rotation: it is
 * `full`, or a codec with a matrix from a file. The function kvant_cuda_make_query_matrix makes
 * both if they are missing. */
kvant_status kvant_cuda_make_query_matrix(cuda_part *part, uint32_t transform_id);

/* Returns the matrix. compact: whether it has this form. */
const void *kvant_cuda_query_matrix(cuda_part *part, uint32_t transform_id, bool *compact);

/* The arguments that pass rows through a part's dense rotation, or back. */
kvant_cuda_rotate_rows_args kvant_cuda_rotation_of(const cuda_part *part, bool back);

/* Whether rows, queries and outputs with a transform pass through the part's dense rotation. */
static inline bool kvant_cuda_rotates(const cuda_part *part, uint32_t transform_id)
{
    return part->matrix && !part->tensor->transforms[transform_id].key_transform;
}

kvant_cuda_pages kvant_cuda_pages_of(const cuda_part *part, bool open);

/* Copies n numbers from the device to a buffer on the host, which grows. Waits for the stream. On
 * an error returns NULL and sets a status, without a message. */
const float *kvant_cuda_read_back(cuda_memory *memory, cuda_buffer *buffer, const float *numbers,
                                  size_t n, kvant_status *status);

kvant_status kvant_cuda_grow(cuda_buffer *buffer, size_t bytes, const char *what);

/* Adds rows, which are floats, and their matrices to the arguments of an append (device_cuda.c). */
void kvant_cuda_add_rows(const cuda_append *append, kvant_cuda_kernel_append_args *args);

/* Records the first error of work on pages. */
void kvant_cuda_record_error(cuda_memory *memory, kvant_status status, const char *what);

/* Leaves a message for a call of the GPU that failed. */
static inline kvant_status kvant_cuda_report_error(kvant_status status, const char *what)
{
    return status == KVANT_OK
               ? status
               : kvant_fail(NULL, status, "cache on cuda: %s: %s", what, kvant_strerror(status));
}
