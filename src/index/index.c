/* index.c - creates indexes, adds and removes vectors. */
#include <stdio.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/file.h"
#include "../base/half.h"
#include "../codec/common.h"
#include "lists.h"

static const char *const row_names[] = { "int8", NULL };

typedef struct index_options {
    uint64_t seed;
    int32_t dims, lists, rows;
} index_options;

static const kvant_option table[] = {
    KVANT_NUMBER(index_options, dims, 1, KVANT_INDEX_MAX_DIM, KVANT_OPTION_ABSENT,
                 "dimensions that are kept: the principal ones of the rows of training"),
    KVANT_NUMBER(index_options, lists, 1, KVANT_MAX_LISTS, KVANT_OPTION_ABSENT,
                 "inverted lists: vectors by the nearest of N centroids"),
    KVANT_CHOICE(index_options, rows, row_names, KVANT_OPTION_ABSENT,
                 "8 bits per number beside the codes, for rerank"),
    { "seed", KVANT_OPTION_SEED, NULL, 0, 0, 0, offsetof(index_options, seed), "of the rotation" },
    { .key = NULL },
};

#define MOST_CODEC 112u /* bytes; all further options of a canonical spec take up to 71 bytes */

/* Reads the kind and the bits from the name of a spec. If the name or an option is unknown here,
 * the spec belongs to a codec of codec.h and is copied to `codec`. */
static kvant_status read_name(const kvant_spec *spec, kvant_book_kind *kind, uint32_t *bits,
                              char *codec, size_t size, const kvant_error *error)
{
    *kind = KVANT_BOOK_RECORDS;
    snprintf(codec, size, "%s%s%s", spec->name, spec->variant ? "-" : "",
             spec->variant ? spec->variant : "");
    for (uint32_t i = 0; i < spec->n_options; i++) {
        for (const kvant_option *option = kvant_common_options_ordered; option->key; option++)
            if (!spec->options[i].used && strcmp(spec->options[i].key, option->key) == 0)
                return kvant_fail(
                    error, KVANT_ERR_SPEC,
                    "%s= is not an option of an index, which rotates vectors itself: leave it out",
                    option->key);
        if (!spec->options[i].used)
            kvant_append(codec, size, "%c%s%s%s", strchr(codec, ':') ? ',' : ':',
                         spec->options[i].key, spec->options[i].value ? "=" : "",
                         spec->options[i].value ? spec->options[i].value : "");
    }
    if (strlen(codec) == size - 1)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "the codec of an index is longer than %zu characters", size - 2);
    for (uint32_t i = 0;
         !strchr(codec, ':') && i < sizeof kvant_book_names / sizeof *kvant_book_names; i++) {
        const kvant_book_name *name = &kvant_book_names[i];
        if (strcmp(spec->name, name->name) == 0) {
            *kind = (kvant_book_kind)i;
            return kvant_spec_bits(spec, name->least, name->most, bits, error);
        }
    }
    return KVANT_OK;
}

static kvant_status check_options(const kvant_index *index, const index_options *o,
                                  const kvant_error *error)
{
    if (o->dims != KVANT_OPTION_ABSENT && (uint32_t)o->dims > index->dim)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "dims=%d is larger than the %u dimensions of the vectors", (int)o->dims,
                          (unsigned)index->dim);
    return KVANT_OK;
}

static kvant_status create_rotations(kvant_index *index)
{
    KVANT_FORWARD(kvant_rotation_create(&index->rotation, index->code_dim, index->seed));
    if (!index->has_rows)
        return KVANT_OK;
    KVANT_FORWARD(kvant_book_create(&index->row_book, KVANT_BOOK_INT, 8, index->dim));
    return kvant_rotation_create(&index->row_rotation, index->dim, index->seed);
}

static kvant_status parse(kvant_index *index, const char *text, const kvant_error *error)
{
    index_options o = { .seed = 0 };
    kvant_spec spec;
    kvant_book_kind kind;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_parse(text ? text : "turboquant-4", &spec, error));
    KVANT_FORWARD(kvant_options_read(table, &spec, &o, error));
    KVANT_FORWARD(read_name(&spec, &kind, &bits, index->spec, MOST_CODEC, error));
    KVANT_FORWARD(check_options(index, &o, error));
    index->needs_training = o.dims != KVANT_OPTION_ABSENT || o.lists != KVANT_OPTION_ABSENT;
    index->project = o.dims != KVANT_OPTION_ABSENT;
    index->code_dim = index->project ? (uint32_t)o.dims : index->dim;
    index->n_lists = o.lists != KVANT_OPTION_ABSENT ? (uint32_t)o.lists : 0;
    index->has_rows = o.rows != KVANT_OPTION_ABSENT;
    index->seed = o.seed;
    if (kind == KVANT_BOOK_RECORDS)
        KVANT_FORWARD(kvant_book_create_records(&index->book, index->spec, index->code_dim, error));
    kvant_options_describe(table, &o, index->spec, sizeof index->spec);
    kvant_status status = KVANT_OK;
    if (kind != KVANT_BOOK_RECORDS)
        status = kvant_book_create(&index->book, kind, bits, index->code_dim);
    if (status != KVANT_OK || create_rotations(index) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for an index");
    return KVANT_OK;
}

kvant_status kvant_index_make(const char *spec, uint32_t dim, kvant_metric metric,
                              kvant_index **index, const kvant_error *error)
{
    *index = NULL;
    if (dim < 1 || dim > KVANT_INDEX_MAX_DIM || (unsigned)metric > KVANT_METRIC_L2)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "dim is not from 1 to %u, or metric not from 0 to 2",
                          KVANT_INDEX_MAX_DIM);
    kvant_index *made = kvant_alloc(1, sizeof *made);
    if (!made)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for an index");
    made->dim = dim;
    made->metric = metric;
    const kvant_status status = parse(made, spec, error);
    if (status == KVANT_OK)
        *index = made;
    else
        kvant_index_free(&made);
    return status;
}

/* Copies rows to an array without a stride. */
static kvant_status copy_rows(const float *rows, size_t stride, size_t n, uint32_t dim,
                              const float **copy, const kvant_error *error)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float *to = kvant_alloc(n, dim * sizeof *to);
    if (!to)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for a centre or centroids");
    *copy = to;
    for (size_t i = 0; i < n; i++) {
        if (kernels->magnitude(rows + i * stride, dim) > kvant_float_bits(0x1p40f))
            return kvant_fail(
                error, KVANT_ERR_NONFINITE,
                "a centre or centroid holds a NaN, an infinity or a number larger than 2^40");
        memcpy(to + i * dim, rows + i * stride, dim * sizeof *to);
    }
    return KVANT_OK;
}

static kvant_status copy_centroids(kvant_index *index, const kvant_index_params *p,
                                   const kvant_error *error)
{
    const size_t n = p->n_centroids;
    if (n == 0 || n != index->n_lists || (n > 1 && p->centroid_stride < index->dim))
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "%zu centroids need lists=%zu, and a centroid_stride of at least dim", n,
                          n);
    KVANT_FORWARD(
        copy_rows(p->centroids, p->centroid_stride, n, index->dim, &index->centroids, error));
    kvant_lists_move(KVANT_OWN(float, index->centroids), index, NULL);
    index->needs_training = index->project;
    index->given_lists = true;
    if (kvant_lists_set(index, index->centroids) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for lists");
    return KVANT_OK;
}

kvant_status kvant_index_create(const kvant_index_params *params, kvant_index **index, char *err,
                                size_t errlen)
{
    const kvant_error error = { errlen ? err : NULL, errlen };
    kvant_index_params p;
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    *index = NULL;
    if (!KVANT_ACCEPT_STRUCT(kvant_index_params, &p, params, center))
        return kvant_fail(
            &error, KVANT_ERR_ARGUMENT,
            "params is NULL, or its size field is not set to sizeof(kvant_index_params)");
    KVANT_FORWARD(kvant_index_make(p.spec, p.dim, p.metric, index, &error));
    kvant_status status =
        p.center ? copy_rows(p.center, 0, 1, p.dim, &(*index)->center, &error) : KVANT_OK;
    if (status == KVANT_OK && p.centroids)
        status = copy_centroids(*index, &p, &error);
    if (status != KVANT_OK)
        kvant_index_free(index);
    return status;
}

void kvant_index_forget(kvant_index *index)
{
    kvant_free(KVANT_OWN(uint64_t, index->ids));
    kvant_free(KVANT_OWN(float, index->factors));
    kvant_free(KVANT_OWN(float, index->offsets));
    kvant_free(KVANT_OWN(uint8_t, index->codes));
    kvant_free(KVANT_OWN(uint8_t, index->rows));
    kvant_free(KVANT_OWN(float, index->row_factors));
    kvant_free(index->owners);
    kvant_id_table_destroy(&index->table);
    index->ids = NULL;
    index->owners = NULL;
    index->factors = index->offsets = NULL;
    index->codes = index->rows = NULL;
    index->row_factors = NULL;
    index->capacity = 0;
}

void kvant_index_free(kvant_index **index)
{
    if (!index || !*index)
        return;
    kvant_index *old = *index;
    kvant_rotation_destroy(&old->rotation);
    kvant_rotation_destroy(&old->row_rotation);
    kvant_book_destroy(&old->book);
    kvant_lists_destroy(old);
    if (old->mapped) {
        kvant_free(old->owners);
        kvant_id_table_destroy(&old->table);
        kvant_unmap_file(&old->file);
    } else {
        kvant_index_forget(old);
        kvant_free(KVANT_OWN(float, old->center));
        kvant_free(KVANT_OWN(float, old->projection));
        kvant_free(KVANT_OWN(float, old->centroids));
    }
    kvant_free(old);
    *index = NULL;
}

uint32_t kvant_index_slot(const kvant_index *index, uint64_t id)
{
    if (index->ids)
        return kvant_id_table_find(&index->table, index->ids, id);
    return id < index->n ? (uint32_t)id : KVANT_NO_SLOT;
}

static kvant_status check_writable(const kvant_index *index)
{
    return index->mapped
               ? kvant_fail(
                     NULL, KVANT_ERR_UNSUPPORTED,
                     "a view of a file cannot be changed: load the file with kvant_index_load")
               : KVANT_OK;
}

/* ---- Growing ---- */

/* Replaces *array by a larger copy. */
static bool enlarge(const void **array, size_t now, size_t n, size_t size)
{
    void *larger = kvant_alloc(n, size);
    if (!larger)
        return false;
    if (now)
        memcpy(larger, *array, now * size);
    kvant_free(KVANT_OWN(void, *array));
    *array = larger;
    return true;
}

#define ENLARGE(index, member, n)                                                                  \
    do {                                                                                           \
        const void *array_ = (index)->member;                                                      \
        KVANT_RETURN_IF(!enlarge(&array_, (index)->capacity, n, sizeof *(index)->member),          \
                        KVANT_ERR_MEMORY);                                                         \
        (index)->member = array_;                                                                  \
    } while (0)

/* After a failure some arrays are larger than before, which does no harm. */
kvant_status kvant_index_grow(kvant_index *index, size_t n)
{
    size_t capacity = index->capacity + index->capacity / 2;
    if (capacity < n)
        capacity = n;
    capacity = (capacity + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS * KVANT_PACK_VECTORS;
    if (index->ids)
        ENLARGE(index, ids, capacity);
    ENLARGE(index, factors, capacity);
    if (kvant_index_has_offsets(index))
        ENLARGE(index, offsets, capacity);
    const void *codes = index->codes, *owners = index->owners, *rows = index->rows;
    if (index->has_rows) {
        ENLARGE(index, row_factors, capacity);
        KVANT_RETURN_IF(!enlarge(&rows, index->capacity, capacity, index->dim), KVANT_ERR_MEMORY);
        index->rows = rows;
    }
    if (index->n_lists) {
        KVANT_RETURN_IF(!enlarge(&owners, index->capacity / KVANT_PACK_VECTORS,
                                 capacity / KVANT_PACK_VECTORS, sizeof *index->owners),
                        KVANT_ERR_MEMORY);
        index->owners = KVANT_OWN(uint32_t, owners);
    }
    const size_t pack = kvant_book_pack_bytes(&index->book);
    KVANT_RETURN_IF(
        !enlarge(&codes, index->capacity / KVANT_PACK_VECTORS, capacity / KVANT_PACK_VECTORS, pack),
        KVANT_ERR_MEMORY);
    index->codes = codes;
    index->capacity = capacity;
    return KVANT_OK;
}

kvant_status kvant_index_keep_ids(kvant_index *index, size_t n)
{
    if (index->ids)
        return kvant_id_table_reserve(&index->table, index->ids, n);
    uint64_t *ids = kvant_alloc(index->capacity ? index->capacity : 1, sizeof *ids);
    KVANT_RETURN_IF(!ids, KVANT_ERR_MEMORY);
    const kvant_status status = kvant_id_table_reserve(&index->table, ids, n);
    if (status != KVANT_OK) {
        kvant_free(ids);
        return status;
    }
    /* Only flat indexes come here with vectors: lists keep ids from the first vector on. */
    for (size_t slot = 0; slot < index->n; slot++) {
        ids[slot] = slot;
        kvant_id_table_insert(&index->table, ids, (uint32_t)slot);
    }
    index->ids = ids;
    return KVANT_OK;
}

static bool ids_follow(const kvant_index *index, const uint64_t *ids, size_t n)
{
    for (size_t i = 0; ids && i < n; i++)
        if (ids[i] != index->n + i)
            return false;
    return index->next_id == index->n;
}

static size_t new_slot(const kvant_index *index, const uint32_t *slots, size_t i)
{
    return slots ? slots[i] : index->n + i;
}

void kvant_index_forget_ids(kvant_index *index, const uint32_t *slots, size_t n)
{
    while (n-- > 0)
        kvant_id_table_erase(&index->table, index->ids, index->ids[new_slot(index, slots, n)]);
}

kvant_status kvant_index_insert_ids(kvant_index *index, const uint64_t *ids, const uint32_t *slots,
                                    size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t id = ids ? ids[i] : index->next_id + i;
        const size_t slot = new_slot(index, slots, i);
        if (id == KVANT_INDEX_NO_ID || kvant_index_slot(index, id) != KVANT_NO_SLOT) {
            kvant_index_forget_ids(index, slots, i);
            return kvant_fail(
                NULL, KVANT_ERR_ARGUMENT,
                "the id %llu already belongs to a vector, or is reserved: use another id",
                (unsigned long long)id);
        }
        KVANT_OWN(uint64_t, index->ids)[slot] = id;
        kvant_id_table_insert(&index->table, index->ids, (uint32_t)slot);
    }
    return KVANT_OK;
}

static void count_added(kvant_index *index, const uint64_t *ids, size_t n)
{
    if (!ids)
        index->next_id += n;
    for (size_t i = 0; ids && i < n; i++)
        if (ids[i] >= index->next_id)
            index->next_id = ids[i] + 1;
    index->n += n;
    index->changes++;
}

static kvant_status add_flat(kvant_index *index, const float *rows, size_t stride, size_t n,
                             const uint64_t *ids, uint32_t n_threads)
{
    if (n > index->capacity - index->n)
        KVANT_FORWARD(kvant_index_grow(index, index->n + n));
    const bool explicit_ids = index->ids || !ids_follow(index, ids, n);
    if (explicit_ids) {
        KVANT_FORWARD(kvant_index_keep_ids(index, index->n + n));
        KVANT_FORWARD(kvant_index_insert_ids(index, ids, NULL, n));
    }
    const kvant_status status = kvant_index_encode(index, index->n, rows, stride, n, n_threads);
    if (status != KVANT_OK && explicit_ids)
        kvant_index_forget_ids(index, NULL, n);
    return status;
}

kvant_status kvant_index_add(kvant_index *index, const float *rows, size_t stride, size_t n,
                             const uint64_t *ids, uint32_t n_threads)
{
    if (!index || (n && !rows) || (n > 1 && stride < index->dim))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "index or rows is NULL, or stride is less than dim");
    KVANT_FORWARD(check_writable(index));
    if (index->needs_training)
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "%s is not trained: call kvant_index_train before the first vector is added",
            index->spec);
    if (n > KVANT_INDEX_MAX_VECTORS - index->n || n > KVANT_INDEX_NO_ID - index->next_id)
        return kvant_fail(NULL, KVANT_ERR_FULL, "an index holds at most %u vectors",
                          KVANT_INDEX_MAX_VECTORS);
    KVANT_FORWARD(kvant_index_check_rows(index, rows, stride, n));
    const kvant_status status = index->n_lists
                                    ? kvant_lists_add(index, rows, stride, n, ids, n_threads)
                                    : add_flat(index, rows, stride, n, ids, n_threads);
    if (status == KVANT_OK)
        count_added(index, ids, n);
    return kvant_index_report_error(status);
}

static uint8_t *pack_of(kvant_index *index, size_t slot)
{
    return KVANT_OWN(uint8_t, index->codes) +
           slot / KVANT_PACK_VECTORS * kvant_book_pack_bytes(&index->book);
}

static void clear_slot(kvant_index *index, size_t slot)
{
    KVANT_OWN(uint64_t, index->ids)[slot] = 0;
    KVANT_OWN(float, index->factors)[slot] = 0;
    if (index->has_rows) {
        memset(KVANT_OWN(uint8_t, index->rows) + slot * index->dim, 0, index->dim);
        KVANT_OWN(float, index->row_factors)[slot] = 0;
    }
    if (index->offsets)
        KVANT_OWN(float, index->offsets)[slot] = 0;
}

void kvant_index_move_slot(kvant_index *index, size_t from, size_t to)
{
    if (from == to)
        return;
    kvant_id_table_move(&index->table, index->ids, index->ids[from], (uint32_t)to);
    KVANT_OWN(uint64_t, index->ids)[to] = index->ids[from];
    KVANT_OWN(float, index->factors)[to] = index->factors[from];
    if (index->has_rows) {
        uint8_t *rows = KVANT_OWN(uint8_t, index->rows);
        memcpy(rows + to * index->dim, rows + from * index->dim, index->dim);
        KVANT_OWN(float, index->row_factors)[to] = index->row_factors[from];
    }
    if (index->offsets)
        KVANT_OWN(float, index->offsets)[to] = index->offsets[from];
    clear_slot(index, from);
}

void kvant_index_replace(kvant_index *index, size_t from, size_t to)
{
    if (from != to) {
        kvant_index_move_slot(index, from, to);
        kvant_book_copy(&index->book, pack_of(index, from), from % KVANT_PACK_VECTORS,
                        pack_of(index, to), to % KVANT_PACK_VECTORS);
    } else {
        clear_slot(index, to);
    }
    kvant_book_copy(&index->book, NULL, 0, pack_of(index, from), from % KVANT_PACK_VECTORS);
}

kvant_status kvant_index_remove(kvant_index *index, uint64_t id)
{
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_writable(index));
    if (kvant_index_slot(index, id) == KVANT_NO_SLOT)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "no vector of the index has the id %llu",
                          (unsigned long long)id);
    KVANT_FORWARD(kvant_index_report_error(kvant_index_keep_ids(index, index->n)));
    const size_t slot = kvant_index_slot(index, id);
    kvant_id_table_erase(&index->table, index->ids, id);
    if (index->n_lists)
        kvant_lists_remove(index, slot);
    else
        kvant_index_replace(index, index->n - 1, slot);
    index->n--;
    index->changes++;
    return KVANT_OK;
}
