/* index_internal.h - what an index is made of. index.c creates and changes indexes, vectors.c
 * encodes, train.c learns, search.c and top.h search, gpu.c on a GPU, filter.c filters, file.c reads and writes.
 *
 * Slot s is vector s % 32 of pack s / 32. Slots 0 .. n - 1 are in use: removing a vector moves the
 * last one into its slot. */
#pragma once

#include <stdbool.h>

#include <kvant/index.h>

#include "../base/error.h"
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
    uint32_t dim, code_dim; /* of vectors; of what is rotated and rounded */
    uint64_t seed;
    kvant_book book;
    kvant_rotation rotation; /* of code_dim numbers */
    const float *center;     /* dim; NULL: none */
    const float *projection; /* dim x code_dim: row i is where number i goes; NULL: none */
    bool project;            /* dims= was asked for */
    bool needs_training;     /* dims= or lists= was asked for, and there was no training yet */
    bool given_lists;     /* the centroids are the caller's; training takes the centre from them */
    size_t n, capacity;   /* slots, a multiple of 32 */
    const uint64_t *ids;  /* by slot; NULL: slot s has id s */
    const float *factors; /* by slot, as everything below */
    const float *offsets; /* L2: -|u|^2 / 2; else <x, center>, or NULL without a centre */
    const uint8_t *codes; /* packs */
    bool has_rows;        /* rows=int8 was asked for */
    const uint8_t *rows;  /* codes of whole vectors for rerank, dim per slot; NULL: none */
    const float *row_factors;
    kvant_book row_book;
    kvant_rotation row_rotation; /* of dim numbers */
    uint32_t n_lists;            /* 0: flat, and what follows is empty */
    const float *centroids;      /* n_lists x dim, of vectors without the centre */
    float *half_squares;         /* of centroids */
    float radius; /* root of the mean squared length of training rows, without the centre */
    kvant_list *lists;
    uint32_t *owners; /* by pack: its list */
    size_t n_packs;
    uint64_t next_id;
    uint64_t changes; /* grows with every call that adds or removes: a copy knows that it is old */
    kvant_id_table table;  /* with ids only */
    const uint8_t *mapped; /* a view: the file, to which the arrays belong */
    size_t mapped_bytes;
};

/* Arrays of an index that is no view are its own, and may be written. */
#define KVANT_OWN(type, pointer) ((type *)(uintptr_t)(const void *)(pointer))

/* No memory is told here: who asks for it says nothing. */
static inline kvant_status kvant_index_said(kvant_status status)
{
    return status == KVANT_ERR_MEMORY
               ? kvant_fail(NULL, status, "no memory for the index or a search")
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

/* KVANT_NO_SLOT when no vector has the id. */
uint32_t kvant_index_slot(const kvant_index *index, uint64_t id);

/* An empty index: spec is parsed, nothing else is checked. */
kvant_status kvant_index_make(const char *spec, uint32_t dim, kvant_metric metric,
                              kvant_index **index, const kvant_error *error);

/* Frees the arrays of an empty index. */
void kvant_index_forget(kvant_index *index);

/* Room for n slots and more. KVANT_ERR_MEMORY: the index is as it was. */
kvant_status kvant_index_grow(kvant_index *index, size_t n);

/* From now on ids are kept, with room for n. KVANT_ERR_MEMORY. */
kvant_status kvant_index_keep_ids(kvant_index *index, size_t n);

/* Enters n ids (NULL: behind the largest) for slots (NULL: those behind the last). On an error none
 * stays. */
kvant_status kvant_index_insert_ids(kvant_index *index, const uint64_t *ids, const uint32_t *slots,
                                    size_t n);
void kvant_index_forget_ids(kvant_index *index, const uint32_t *slots, size_t n);

/* A vector's id and factors go to another slot; its codes, too, and slot `from` is zeros (replace). */
void kvant_index_move_slot(kvant_index *index, size_t from, size_t to);
void kvant_index_replace(kvant_index *index, size_t from, size_t to);

/* Floats of scratch for one row. */
size_t kvant_index_scratch(const kvant_index *index);

/* What is rounded of a vector or a query x, which is x / |x| for cosine: u = x - center. A query for
 * inner products has no length of its own: u = x - weight center, with the weight of its part along the
 * centre, and <q, x> = <u_q, u_x> + weight <x, center>. */
typedef struct kvant_index_row {
    float *y; /* R P u 2^-exponent, code_dim numbers in scratch; no magnitude of u is above it */
    int exponent;
    float offset;  /* of a vector */
    float weight;  /* of offsets, for a query: 1 for L2 */
    float squared; /* |u|^2 */
} kvant_index_row;

#define KVANT_NO_LIST UINT32_MAX

/* u = x - center, dim numbers, and everything of the row but y. */
void kvant_index_centre(const kvant_index *index, const kvant_kernels *kernels, const float *x,
                        bool is_query, float *u, kvant_index_row *row);

/* The same, then y = R u of all dim numbers, as rows=int8 keep it. */
kvant_index_row kvant_index_transform_row(const kvant_index *index, const kvant_kernels *kernels,
                                          const float *x, bool is_query, float *scratch);

/* The same, then y; of a vector in a list, its difference from the centroid. centred, unless NULL: gets
 * u. */
kvant_index_row kvant_index_transform(const kvant_index *index, const kvant_kernels *kernels,
                                      const float *x, bool is_query, uint32_t list, float *scratch,
                                      float *centred);

/* Codes and factors of a vector; codes: kvant_index_code_room bytes. */
size_t kvant_index_code_room(const kvant_index *index);
void kvant_index_encode_row(kvant_index *index, const kvant_kernels *kernels, size_t slot,
                            uint32_t list, const float *x, float *scratch, uint8_t *codes);

/* x = x / |x|; 0 stays 0. */
void kvant_index_normalise(const kvant_kernels *kernels, float *x, uint32_t n);

/* Finite, and no longer than 2^60. */
kvant_status kvant_index_check_rows(const kvant_index *index, const float *rows, size_t stride,
                                    size_t n);

/* Encodes n rows into slots from first on; the arrays have room. KVANT_ERR_MEMORY: nothing that
 * counts was written. */
kvant_status kvant_index_encode(kvant_index *index, size_t first, const float *rows, size_t stride,
                                size_t n, uint32_t n_threads);

/* An index on the bytes of a file, aligned to 64, which stay the caller's; NULL on an error. The
 * checksum of the whole is not looked at. */
kvant_status kvant_index_parse(const uint8_t *bytes, size_t n, kvant_index **index,
                               const kvant_error *error);

/* Frees an index, but not the bytes of a file that it is on. */
void kvant_index_drop(kvant_index **index);

/* A bit per slot that passes the filters of a query; NULL in *passes: all do. */
kvant_status kvant_index_filter(const kvant_index *index, const kvant_index_query *query,
                                uint32_t **passes);

/* kvant_index_search; gpu: where the index's codes were copied to, or NULL. */
kvant_status kvant_index_search_on(kvant_cuda_index *gpu, const kvant_index *index,
                                   const kvant_index_query *query, float *scores, uint64_t *ids);
