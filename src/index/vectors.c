/* vectors.c - encodes vectors and decodes them. */
#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "index_internal.h"

#define LONGEST 0x1p60 /* so that a squared length stays below the largest fp32 number */

static size_t padded(uint32_t n)
{
    return ((size_t)n + 15) / 16 * 16;
}

size_t kvant_index_code_room(const kvant_index *index)
{
    const size_t book = kvant_book_scratch(&index->book, index->code_dim);
    return book > padded(index->dim) ? book : padded(index->dim); /* the latter for rows=int8 */
}

size_t kvant_index_scratch(const kvant_index *index)
{
    return 3 * padded(index->dim);
}

/* The exponent of the power of two above the largest magnitude; 0 for zeros. Scaling by it is
 * exact, so the length of a row neither overflows nor underflows. */
static int exponent_of(const kvant_kernels *kernels, const float *x, uint32_t n)
{
    int exponent = 0;
    (void)frexpf(kvant_float_from_bits(kernels->magnitude(x, n)), &exponent);
    return exponent;
}

static void scale(float *x, uint32_t n, float factor)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] *= factor;
}

/* Multiplies by a power of two. One that exceeds binary32 is applied as two factors. */
static void scale_by_power(float *x, uint32_t n, int exponent)
{
    if (exponent > 126) {
        scale(x, n, ldexpf(1, exponent - 100));
        exponent = 100;
    }
    scale(x, n, ldexpf(1, exponent));
}

void kvant_index_normalise(const kvant_kernels *kernels, float *x, uint32_t n)
{
    const int exponent = exponent_of(kernels, x, n);
    scale_by_power(x, n, -exponent);
    const float squared = kernels->dot(x, x, n);
    if (squared == 0)
        return;
    const float length = sqrtf(squared);
    for (uint32_t i = 0; i < n; i++)
        x[i] /= length;
}

static void subtract_center(const kvant_index *index, const kvant_kernels *kernels, bool is_query,
                            float *u, kvant_index_row *row)
{
    const float along = kernels->dot(u, index->center, index->dim);
    if (is_query && index->metric != KVANT_METRIC_L2) {
        const float squared = kernels->dot(index->center, index->center, index->dim);
        row->weight = squared > 0 ? along / squared : 0;
    }
    row->offset = along;
    for (uint32_t i = 0; i < index->dim; i++)
        u[i] -= row->weight * index->center[i];
}

void kvant_index_centre(const kvant_index *index, const kvant_kernels *kernels, const float *x,
                        bool is_query, float *u, kvant_index_row *row)
{
    *row = (kvant_index_row){ .weight = 1 };
    memcpy(u, x, index->dim * sizeof *u);
    if (index->metric == KVANT_METRIC_COSINE)
        kvant_index_normalise(kernels, u, index->dim);
    if (index->center)
        subtract_center(index, kernels, is_query, u, row);
}

/* Scales u by a power of two and adds it to the exponent. */
static void bring_near_one(const kvant_kernels *kernels, float *u, uint32_t dim, int *exponent)
{
    const int by = exponent_of(kernels, u, dim);
    scale_by_power(u, dim, -by);
    *exponent += by;
}

/* u = x - center, scaled by a power of two. centred: gets u before it is scaled. */
static kvant_index_row read_row(const kvant_index *index, const kvant_kernels *kernels,
                                const float *x, bool is_query, float *u, float *centred)
{
    const uint32_t dim = index->dim;
    kvant_index_row row;
    kvant_index_centre(index, kernels, x, is_query, u, &row);
    if (centred)
        memcpy(centred, u, dim * sizeof *u);
    bring_near_one(kernels, u, dim, &row.exponent);
    row.squared = (float)ldexp(kernels->dot(u, u, dim), 2 * row.exponent);
    if (index->metric == KVANT_METRIC_L2)
        row.offset = row.squared / -2;
    return row;
}

kvant_index_row kvant_index_transform_row(const kvant_index *index, const kvant_kernels *kernels,
                                          const float *x, bool is_query, float *scratch)
{
    kvant_index_row row = read_row(index, kernels, x, is_query, scratch, NULL);
    row.y = scratch;
    kvant_rotation_apply(&index->row_rotation, kernels, row.y, scratch + padded(index->dim));
    return row;
}

kvant_index_row kvant_index_transform(const kvant_index *index, const kvant_kernels *kernels,
                                      const float *x, bool is_query, uint32_t list, float *scratch,
                                      float *centred)
{
    const uint32_t dim = index->dim, n = index->code_dim;
    float *u = index->projection ? scratch + padded(dim) : scratch,
          *rest = scratch + 2 * padded(dim);
    kvant_index_row row = read_row(index, kernels, x, is_query, u, centred);
    if (list != KVANT_NO_LIST) {
        const float *centroid = index->centroids + (size_t)list * dim;
        for (uint32_t i = 0; i < dim; i++)
            u[i] -= ldexpf(centroid[i], -row.exponent);
        bring_near_one(kernels, u, dim, &row.exponent);
    }
    row.y = scratch;
    if (index->projection)
        kernels->combine_rows(index->projection, u, dim, n, 1, row.y);
    kvant_rotation_apply(&index->rotation, kernels, row.y, rest);
    return row;
}

kvant_status kvant_index_check_rows(const kvant_index *index, const float *rows, size_t stride,
                                    size_t n)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const float largest = (float)(LONGEST / sqrt((double)index->dim));
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = kernels->magnitude(rows + i * stride, index->dim);
        if (magnitude >= 0x7f800000u)
            return kvant_fail(NULL, KVANT_ERR_NONFINITE, "row %zu holds a NaN or an infinity", i);
        if (kvant_float_from_bits(magnitude) > largest)
            return kvant_fail(NULL, KVANT_ERR_RANGE,
                              "row %zu is too long: its length may be larger than 2^60", i);
    }
    return KVANT_OK;
}

static void encode_whole_row(kvant_index *index, const kvant_kernels *kernels, size_t slot,
                             const float *x, float *scratch, uint8_t *codes)
{
    const kvant_index_row row = kvant_index_transform_row(index, kernels, x, false, scratch);
    KVANT_OWN(float, index->row_factors)
    [slot] = ldexpf(kvant_book_encode(&index->row_book, kernels, row.y, index->dim, codes, codes),
                    row.exponent);
    memcpy(KVANT_OWN(uint8_t, index->rows) + slot * index->dim, codes, index->dim);
}

void kvant_index_encode_row(kvant_index *index, const kvant_kernels *kernels, size_t slot,
                            uint32_t list, const float *x, float *scratch, uint8_t *codes)
{
    const kvant_index_row row =
        kvant_index_transform(index, kernels, x, false, list, scratch, NULL);
    uint8_t *pack = KVANT_OWN(uint8_t, index->codes) +
                    slot / KVANT_PACK_VECTORS * kvant_book_pack_bytes(&index->book);
    KVANT_OWN(float, index->factors)
    [slot] = ldexpf(kvant_book_store(&index->book, kernels, row.y, index->code_dim, pack,
                                     (uint32_t)(slot % KVANT_PACK_VECTORS), codes),
                    row.exponent);
    if (index->offsets)
        KVANT_OWN(float, index->offsets)[slot] = row.offset;
    if (index->has_rows)
        encode_whole_row(index, kernels, slot, x, scratch, codes);
}

typedef struct encoding {
    kvant_index *index;
    const kvant_kernels *kernels;
    const float *rows;
    size_t stride, first, end;
    float *scratch;
    uint8_t *codes;
} encoding;

/* Encodes a pack. Vectors of a pack share bytes, so no two threads work on one pack. */
static void encode_pack(void *context, size_t i, uint32_t worker)
{
    const encoding *e = context;
    const size_t pack = e->first / KVANT_PACK_VECTORS + i, start = pack * KVANT_PACK_VECTORS;
    float *scratch = e->scratch + worker * kvant_index_scratch(e->index);
    uint8_t *codes = e->codes + worker * kvant_index_code_room(e->index);
    for (size_t slot = start; slot < start + KVANT_PACK_VECTORS; slot++)
        if (slot >= e->first && slot < e->end)
            kvant_index_encode_row(e->index, e->kernels, slot, KVANT_NO_LIST,
                                   e->rows + (slot - e->first) * e->stride, scratch, codes);
}

kvant_status kvant_index_encode(kvant_index *index, size_t first, const float *rows, size_t stride,
                                size_t n, uint32_t n_threads)
{
    const uint32_t threads = n_threads > 1 ? n_threads > 256 ? 256 : n_threads : 1;
    encoding e = { .index = index,
                   .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                   .rows = rows,
                   .stride = stride,
                   .first = first,
                   .end = first + n };
    e.scratch = kvant_alloc(threads * kvant_index_scratch(index), sizeof *e.scratch);
    e.codes = kvant_alloc(threads, kvant_index_code_room(index));
    const bool ok = e.scratch && e.codes;
    if (ok && n > 0)
        kvant_parallel_for((e.end - 1) / KVANT_PACK_VECTORS - first / KVANT_PACK_VECTORS + 1,
                           threads, encode_pack, &e);
    kvant_free(e.scratch);
    kvant_free(e.codes);
    return ok ? KVANT_OK : KVANT_ERR_MEMORY;
}

/* Decodes a slot: its levels times the vector's factor. */
static kvant_status decode_slot(const kvant_index *index, const kvant_kernels *kernels, size_t slot,
                                float *y)
{
    const kvant_book *book = &index->book;
    const size_t bytes = (size_t)book->levels.n_quads * 128;
    uint8_t *levels = kvant_alloc(bytes + kvant_book_scratch(book, index->code_dim), 1);
    KVANT_RETURN_IF(!levels, KVANT_ERR_MEMORY);
    kvant_book_decode(book, kernels,
                      index->codes + slot / KVANT_PACK_VECTORS * kvant_book_pack_bytes(book),
                      levels, levels + bytes);
    for (uint32_t i = 0; i < index->code_dim; i++)
        y[i] = index->factors[slot] *
               ((float)kvant_pack_get(8, levels, i, slot % KVANT_PACK_VECTORS) - 128);
    kvant_free(levels);
    return KVANT_OK;
}

static kvant_status decode(const kvant_index *index, size_t slot, float *row, float *scratch)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const uint32_t n = index->code_dim;
    const float *centroid =
        index->n_lists
            ? index->centroids + (size_t)index->owners[slot / KVANT_PACK_VECTORS] * index->dim
            : NULL;
    KVANT_FORWARD(decode_slot(index, kernels, slot, scratch));
    kvant_rotation_undo(&index->rotation, kernels, scratch, scratch + padded(n));
    for (uint32_t i = 0; i < index->dim; i++) {
        const float u = index->projection
                            ? kernels->dot(index->projection + (size_t)i * n, scratch, n)
                            : scratch[i];
        row[i] = u + (centroid ? centroid[i] : 0) + (index->center ? index->center[i] : 0);
    }
    return KVANT_OK;
}

kvant_status kvant_index_reconstruct(const kvant_index *index, uint64_t id, float *row)
{
    KVANT_RETURN_IF(!index || !row, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_index_check_view(index, NULL));
    const uint32_t slot = kvant_index_slot(index, id);
    if (slot == KVANT_NO_SLOT)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "no vector of the index has the id %llu",
                          (unsigned long long)id);
    float *scratch = kvant_alloc(kvant_index_scratch(index), sizeof *scratch);
    KVANT_RETURN_IF(!scratch, KVANT_ERR_MEMORY);
    const kvant_status status = decode(index, slot, row, scratch);
    kvant_free(scratch);
    return status;
}
