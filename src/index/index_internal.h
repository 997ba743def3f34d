/* index_internal.h - the inside of an index.
 *
 *   index.c     creates and changes indexes
 *   vectors.c   encodes and decodes vectors
 *   train.c     learns from rows
 *   search.c    searches on a CPU, with top.h
 *   gpu.c       searches on a GPU
 *   filter.c    evaluates filters
 *   file.c      reads and writes files
 *
 * Slot s is vector s % 32 of pack s / 32. Slots 0 to n - 1 are in use: removing a vector moves the
 * last vector into its slot. */
#pragma once

#include <stdbool.h>

#include <kvant/index.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../device/index.h"
#include "book.h"
#include "ids.h"
#include "rotation.h"
#include "top.h"

#define KVANT_INDEX_SPEC 184u /* bytes */

typedef struct kvant_list kvant_list; /* lists.h */

struct kvant_index {
    char spec[KVANT_INDEX_SPEC];
    kvant_metric metric;
    uint32_t dim, code_dim; /* numbers of a vector; numbers that are rotated and rounded */
    uint64_t seed;
    kvant_book book;
    kvant_rotation rotation; /* of code_dim numbers */
    const float *center;     /* dim; NULL: none */
    const float *projection; /* dim x code_dim: row i is the image of dimension i; NULL: none */
    bool project;            /* the spec has dims= */
    bool needs_training;     /* the spec has dims= or lists=, and nothing was trained yet */
    bool given_lists;   /* the caller gave the centroids; training subtracts the centre from them */
    size_t n, capacity; /* slots, a multiple of 32 */
    const uint64_t *ids;  /* by slot; NULL: slot s has id s */
    const float *factors; /* by slot, like all arrays below */
    const float *offsets; /* L2: -|u|^2 / 2; otherwise <x, center>, or NULL without a centre */
    const uint8_t *codes; /* packs */
    bool has_rows;        /* the spec has rows=int8 */
    const uint8_t *rows;  /* codes of whole vectors for rerank, dim per slot; NULL: none */
    const float *row_factors;
    kvant_book row_book;
    kvant_rotation row_rotation; /* of dim numbers */
    uint32_t n_lists;            /* 0: the index is flat, and the members up to n_packs are empty */
    const float *centroids;      /* n_lists x dim, without the centre */
    float *half_squares;         /* of centroids */
    float radius; /* root of the mean squared length of training rows, without the centre */
    kvant_list *lists;
    uint32_t *owners; /* by pack: its list */
    size_t n_packs;
    uint64_t next_id;
    uint64_t changes;     /* grows with every add or remove, so that a copy on a GPU detects them */
    kvant_id_table table; /* with ids only */
    const uint8_t *mapped; /* of a view: the mapped file, which owns the arrays */
    size_t mapped_bytes;
    kvant_mapped_file file; /* of a view */
};

/* Arrays that belong to the index, and not to a mapped file, may be written. */
#define KVANT_OWN(type, pointer) ((type *)(uintptr_t)(const void *)(pointer))

/* Leaves the message for KVANT_ERR_MEMORY, because functions that allocate leave none. */
static inline kvant_status kvant_index_report_error(kvant_status status)
{
    return status == KVANT_ERR_MEMORY
               ? kvant_fail(NULL, status, "out of memory for the index or a search")
               : status;
}

static inline uint64_t kvant_index_id(const kvant_index *index, size_t slot)
{
    return index->ids ? index->ids[slot] : slot;
}

static inline bool kvant_index_has_offsets(const kvant_index *index)
{
    return index->metric == KVANT_METRIC_L2 || index->center;
}

static inline size_t kvant_index_packs(const kvant_index *index)
{
    return index->n_lists ? index->n_packs
                          : (index->n + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
}

/* The slot of an id. KVANT_NO_SLOT: no vector has the id. */
uint32_t kvant_index_slot(const kvant_index *index, uint64_t id);

/* Makes an empty index. It parses the spec and checks nothing else. */
kvant_status kvant_index_make(const char *spec, uint32_t dim, kvant_metric metric,
                              kvant_index **index, const kvant_error *error);

/* Frees the arrays of an empty index. */
void kvant_index_forget(kvant_index *index);

/* Makes room for n slots or more. KVANT_ERR_MEMORY: the index is unchanged. */
kvant_status kvant_index_grow(kvant_index *index, size_t n);

/* Makes the index keep ids from now on, with room for n. KVANT_ERR_MEMORY. */
kvant_status kvant_index_keep_ids(kvant_index *index, size_t n);

/* Enters n ids for n slots. ids NULL: new ids after the largest one. slots NULL: the slots after
 * the last one. On an error no id stays. */
kvant_status kvant_index_insert_ids(kvant_index *index, const uint64_t *ids, const uint32_t *slots,
                                    size_t n);
void kvant_index_forget_ids(kvant_index *index, const uint32_t *slots, size_t n);

/* kvant_index_move_slot moves a vector's id and factors to another slot. kvant_index_replace also
 * moves its codes, and slot `from` becomes zeros. */
void kvant_index_move_slot(kvant_index *index, size_t from, size_t to);
void kvant_index_replace(kvant_index *index, size_t from, size_t to);

/* How many floats of scratch a row needs. */
size_t kvant_index_scratch(const kvant_index *index);

/* The form in which a vector or query x is rounded: u = x - center. With cosine x is divided by its
 * length first. The length of a query for inner products does not matter, so its u is x - weight
 * center, where the weight is the query's part along the centre. Then <q, x> = <u_q, u_x> + weight
 * <x, center>. */
typedef struct kvant_index_row {
    float *y; /* R P u 2^-exponent, code_dim numbers in scratch; magnitudes of u are at most 1 */
    int exponent;
    float offset;  /* for a vector */
    float weight;  /* of offsets, for a query; 1 for L2 */
    float squared; /* |u|^2 */
} kvant_index_row;

#define KVANT_NO_LIST UINT32_MAX

/* Computes u = x - center, dim numbers, and all members of the row except y. */
void kvant_index_centre(const kvant_index *index, const kvant_kernels *kernels, const float *x,
                        bool is_query, float *u, kvant_index_row *row);

/* The same, then y = R u of all dim numbers, for rows=int8. */
kvant_index_row kvant_index_transform_row(const kvant_index *index, const kvant_kernels *kernels,
                                          const float *x, bool is_query, float *scratch);

/* The same, then y. For a vector in a list, u is its difference from the centroid. centred: gets u
 * without the centroid, unless it is NULL. */
kvant_index_row kvant_index_transform(const kvant_index *index, const kvant_kernels *kernels,
                                      const float *x, bool is_query, uint32_t list, float *scratch,
                                      float *centred);

/* Computes codes and factors of a vector. codes: scratch of kvant_index_code_room bytes. */
size_t kvant_index_code_room(const kvant_index *index);
void kvant_index_encode_row(kvant_index *index, const kvant_kernels *kernels, size_t slot,
                            uint32_t list, const float *x, float *scratch, uint8_t *codes);

/* Divides x by its length; zeros stay zeros. */
void kvant_index_normalise(const kvant_kernels *kernels, float *x, uint32_t n);

/* Checks that all rows are finite and no longer than 2^60. */
kvant_status kvant_index_check_rows(const kvant_index *index, const float *rows, size_t stride,
                                    size_t n);

/* Encodes n rows into the slots from `first` on. The arrays must have room. KVANT_ERR_MEMORY: no
 * slot in use has changed. */
kvant_status kvant_index_encode(kvant_index *index, size_t first, const float *rows, size_t stride,
                                size_t n, uint32_t n_threads);

/* Makes an index whose arrays lie in the bytes of a file. The bytes are aligned to 64 and stay the
 * caller's. On an error *index is NULL. The checksum of the whole file is not verified. */
kvant_status kvant_index_parse(const uint8_t *bytes, size_t n, kvant_index **index,
                               const kvant_error *error);

/* Frees an index, but not the bytes of a file in which its arrays lie. */
void kvant_index_drop(kvant_index **index);

/* KVANT_ERR_FORMAT: the file of a view became shorter, so its arrays cannot be read any more. Every
 * function that reads the arrays of an index calls this first. */
kvant_status kvant_index_check_view(const kvant_index *index, const kvant_error *error);

/* Sets in *passes a bit for each slot that passes the filters of a query. *passes NULL: all slots
 * pass. */
kvant_status kvant_index_filter(const kvant_index *index, const kvant_index_query *query,
                                uint32_t **passes);

/* kvant_index_search on the GPU that has the index's codes. gpu NULL: on the CPU. */
kvant_status kvant_index_search_on(kvant_cuda_index *gpu, const kvant_index *index,
                                   const kvant_index_query *query, float *scores, uint64_t *ids);
