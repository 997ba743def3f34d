/* index_internal.h - what an index is made of. index.c creates and changes indexes, vectors.c
 * encodes, train.c learns, search.c and top.h search, filter.c filters, file.c reads and writes.
 *
 * Slot s is vector s % 32 of pack s / 32. Slots 0 .. n - 1 are in use: removing a vector moves the
 * last one into its slot. */
#pragma once

#include <stdbool.h>

#include <kvant/index.h>

#include "../base/error.h"
#include "book.h"
#include "ids.h"
#include "rotation.h"

typedef struct kvant_index_options {
    uint64_t seed;
    int32_t dims;
} kvant_index_options;

struct kvant_index {
    char spec[64];
    kvant_metric metric;
    uint32_t dim, code_dim; /* of vectors; of what is rotated and rounded */
    uint64_t seed;
    kvant_book book;
    kvant_rotation rotation; /* of code_dim numbers */
    const float *center;     /* dim; NULL: none */
    const float *projection; /* dim x code_dim: row i is where number i goes; NULL: none */
    bool needs_training;     /* dims= was asked for, and there is no projection yet */
    size_t n, capacity;      /* slots, a multiple of 32 */
    const uint64_t *ids;     /* by slot; NULL: slot s has id s */
    const float *factors;    /* by slot, as everything below */
    const float *offsets;    /* L2: -|u|^2 / 2; else <x, center>, or NULL without a centre */
    const uint8_t *codes;    /* packs */
    uint64_t next_id;
    kvant_id_table table;  /* with ids only */
    const uint8_t *mapped; /* a view: the file, to which the arrays belong */
    size_t mapped_bytes;
};

/* Arrays of an index that is no view are its own, and may be written. */
#define KVANT_OWN(type, pointer) ((type *)(uintptr_t)(const void *)(pointer))

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
    return (index->n + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
}

/* KVANT_NO_SLOT when no vector has the id. */
uint32_t kvant_index_slot(const kvant_index *index, uint64_t id);

/* An empty index: spec is parsed, nothing else is checked. */
kvant_status kvant_index_make(const char *spec, uint32_t dim, kvant_metric metric, kvant_index **index,
                              const kvant_error *error);

/* Frees the arrays of an empty index. */
void kvant_index_forget(kvant_index *index);

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
kvant_index_row kvant_index_transform(const kvant_index *index, const kvant_kernels *kernels, const float *x,
                                      bool is_query, float *scratch);

/* x = x / |x|; 0 stays 0. */
void kvant_index_normalise(const kvant_kernels *kernels, float *x, uint32_t n);

/* Finite, and no longer than 2^60. */
kvant_status kvant_index_check_rows(const kvant_index *index, const float *rows, size_t stride, size_t n);

/* Encodes n rows into slots from first on; the arrays have room. KVANT_ERR_MEMORY: nothing that
 * counts was written. */
kvant_status kvant_index_encode(kvant_index *index, size_t first, const float *rows, size_t stride, size_t n,
                                uint32_t n_threads);

/* An index on the bytes of a file, aligned to 64, which stay the caller's; NULL on an error. The
 * checksum of the whole is not looked at. */
kvant_status kvant_index_parse(const uint8_t *bytes, size_t n, kvant_index **index, const kvant_error *error);

/* Frees an index, but not the bytes of a file that it is on. */
void kvant_index_drop(kvant_index **index);

/* A bit per slot that passes the filters of a query; NULL in *passes: all do. */
kvant_status kvant_index_filter(const kvant_index *index, const kvant_index_query *query, uint32_t **passes);
