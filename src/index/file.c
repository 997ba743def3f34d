/* file.c - indexes in files (src/index/format.md), read into memory or mapped.
 *
 * A file has a head and sections in a fixed order, whose lengths follow from the head. So no offset
 * or length has to be trusted: a head that does not describe a file of exactly these bytes is
 * refused. */
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/file.h"
#include "../base/fnv.h"
#include "lists.h"

#define MAGIC "kvantidx"
#define VERSION 3u /* of src/index/format.md */
#define LINE 64u   /* sections begin at multiples of 64 bytes */

enum { HAS_CENTER = 1, HAS_IDS = 2, ALL_FLAGS = 3 };

typedef struct head {
    char magic[8];
    uint32_t version, dim, metric, flags;
    uint64_t n, bytes, checksum, next_id, head_checksum; /* KVANT_FILE_HEAD bytes up to here */
    uint32_t n_packs;                                    /* with lists */
    float radius;                                        /* with lists */
    char spec[KVANT_INDEX_SPEC];
} head;
_Static_assert(offsetof(head, n_packs) == KVANT_FILE_HEAD && sizeof(head) == 256, "format.md");

enum {
    HEAD,
    CENTER,
    PROJECTION,
    CENTROIDS,
    LISTS,
    IDS,
    FACTORS,
    OFFSETS,
    ROW_FACTORS,
    CODES,
    ROWS,
    N_SECTIONS
};

typedef struct layout {
    size_t bytes[N_SECTIONS], start[N_SECTIONS], end;
} layout;

/* Computes the sections of a file with this head and the index's spec. Returns false when the file
 * would be larger than memory. Products of n, below 2^32, and dimensions, at most 2^13, can
 * overflow on 32-bit machines only. */
static bool lay_out(const kvant_index *index, const head *h, layout *l)
{
    const bool lists = index->n_lists > 0;
    const size_t packs =
        lists ? h->n_packs : ((size_t)h->n + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
    const size_t numbers = packs * KVANT_PACK_VECTORS;
    *l = (layout){ .bytes = { [HEAD] = sizeof *h } };
    if (h->flags & HAS_CENTER)
        l->bytes[CENTER] = h->dim * sizeof(float);
    if (index->project)
        l->bytes[PROJECTION] = (size_t)h->dim * index->code_dim * sizeof(float);
    if (lists) {
        l->bytes[CENTROIDS] = (size_t)index->n_lists * h->dim * sizeof(float);
        l->bytes[LISTS] = ((size_t)index->n_lists + h->n_packs) * sizeof(uint32_t);
    }
    if ((h->flags & HAS_IDS &&
         !kvant_mul_size(lists ? numbers : (size_t)h->n, sizeof(uint64_t), &l->bytes[IDS])) ||
        !kvant_mul_size(numbers, sizeof(float), &l->bytes[FACTORS]) ||
        !kvant_mul_size(packs, kvant_book_pack_bytes(&index->book), &l->bytes[CODES]) ||
        (index->has_rows && !kvant_mul_size(numbers, h->dim, &l->bytes[ROWS])))
        return false;
    if (index->metric == KVANT_METRIC_L2 || h->flags & HAS_CENTER)
        l->bytes[OFFSETS] = l->bytes[FACTORS];
    if (index->has_rows)
        l->bytes[ROW_FACTORS] = l->bytes[FACTORS];
    for (int i = 0; i < N_SECTIONS; i++) {
        if (l->bytes[i] > SIZE_MAX - 2 * LINE - l->end)
            return false;
        l->start[i] = l->end;
        l->end += (l->bytes[i] + LINE - 1) / LINE * LINE;
    }
    return true;
}

static head head_of(const kvant_index *index, layout *l)
{
    head h = { .magic = MAGIC,
               .version = VERSION,
               .dim = index->dim,
               .metric = index->metric,
               .flags = (index->center ? HAS_CENTER : 0u) | (index->ids ? HAS_IDS : 0u),
               .n = index->n,
               .next_id = index->next_id,
               .n_packs = index->n_lists ? (uint32_t)index->n_packs : 0,
               .radius = index->n_lists ? index->radius : 0 };
    memcpy(h.spec, index->spec, strlen(index->spec));
    lay_out(index, &h, l); /* cannot fail: the index is in memory, so its sizes fit */
    h.bytes = l->end;
    return h;
}

/* The checksum of the head alone, without the two checksums in it. A view verifies it. */
static uint64_t head_checksum(head h)
{
    h.checksum = h.head_checksum = 0;
    return kvant_fnv1a(KVANT_FNV_START, &h, sizeof h);
}

/* ---- Writing ---- */

/* How many vectors each list has, then the packs of all lists. NULL: memory is short. */
static uint32_t *list_section(const kvant_index *index)
{
    uint32_t *numbers = kvant_alloc((size_t)index->n_lists + index->n_packs + 1, sizeof *numbers);
    uint32_t *packs = numbers + index->n_lists;
    for (uint32_t i = 0; numbers && i < index->n_lists; i++) {
        const kvant_list *list = &index->lists[i];
        numbers[i] = (uint32_t)list->n;
        for (size_t j = 0; j < kvant_list_packs(list); j++)
            *packs++ = list->packs[j];
    }
    return numbers;
}

static const uint8_t zeros[LINE];

kvant_status kvant_index_save(const kvant_index *index, const char *path, char *err, size_t errlen)
{
    const kvant_error error = { errlen ? err : NULL, errlen };
    layout l;
    if (!index || !path || index->needs_training)
        return kvant_fail(
            &error, KVANT_ERR_ARGUMENT,
            "index or path is NULL, or the index is not trained: call kvant_index_train first");
    KVANT_FORWARD(kvant_index_check_view(index, &error));
    head h = head_of(index, &l);
    uint32_t *lists = list_section(index);
    if (!lists)
        return kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for writing the lists");
    const void *const sections[N_SECTIONS] = {
        &h,         index->center,  index->projection, index->centroids,   lists,
        index->ids, index->factors, index->offsets,    index->row_factors, index->codes,
        index->rows
    };
    kvant_file_part parts[2 * N_SECTIONS];
    for (int i = 0; i < N_SECTIONS; i++) {
        parts[2 * i] = (kvant_file_part){ sections[i], l.bytes[i] };
        parts[2 * i + 1] = (kvant_file_part){ zeros, (LINE - l.bytes[i] % LINE) % LINE };
    }
    h.head_checksum = head_checksum(h);
    uint64_t checksum = KVANT_FNV_START; /* the head's checksum is 0 here */
    for (int i = 0; i < 2 * N_SECTIONS; i++)
        checksum = kvant_fnv1a(checksum, parts[i].bytes, parts[i].n);
    h.checksum = checksum;
    const kvant_status status = kvant_write_parts(path, parts, 2 * N_SECTIONS, &error);
    kvant_free(lists);
    return status;
}

/* ---- Reading ---- */

static kvant_status damaged(const kvant_error *error, const char *what)
{
    return kvant_fail(error, KVANT_ERR_FORMAT,
                      "the index file cannot be used: %s; build the index again", what);
}

static kvant_status check_head(const uint8_t *bytes, size_t n, const kvant_error *error)
{
    head h = { .version = 0 };
    if (n < KVANT_FILE_HEAD)
        return damaged(error, "it is shorter than its head");
    memcpy(&h, bytes, KVANT_FILE_HEAD);
    if (memcmp(h.magic, MAGIC, sizeof h.magic) != 0)
        return damaged(error, "it does not begin with " MAGIC);
    if (h.version != VERSION)
        return kvant_fail(
            error, KVANT_ERR_FORMAT,
            "the index file has version %u, this library reads version %u: build the index again",
            (unsigned)h.version, VERSION);
    if (h.bytes != n || n < sizeof h)
        return damaged(error, "it is cut short, or too long");
    return KVANT_OK;
}

static bool checksum_fits(const uint8_t *bytes, size_t n)
{
    static const uint64_t zero = 0;
    const size_t at = offsetof(head, checksum), behind = at + sizeof zero;
    uint64_t kept, checksum = kvant_fnv1a(KVANT_FNV_START, bytes, at);
    checksum = kvant_fnv1a(checksum, &zero, sizeof zero);
    checksum = kvant_fnv1a(checksum, bytes + behind, n - behind);
    memcpy(&kept, bytes + at, sizeof kept);
    return checksum == kept;
}

/* Makes an index without arrays from a head, and finds the file's sections. */
static kvant_status make_from_head(const head *h, size_t n, kvant_index **index, layout *l,
                                   const kvant_error *error)
{
    if (h->head_checksum != head_checksum(*h) || h->spec[sizeof h->spec - 1] != 0 ||
        h->flags & ~(uint32_t)ALL_FLAGS || h->n > KVANT_INDEX_MAX_VECTORS)
        return damaged(error, "its head is damaged");
    const kvant_status status =
        kvant_index_make(h->spec, h->dim, (kvant_metric)h->metric, index, error);
    if (status != KVANT_OK) /* the spec may also name a codec that this build lacks */
        return status == KVANT_ERR_MEMORY ? status : damaged(error, "its head is damaged");
    kvant_index *made = *index;
    if (made->n_lists && (h->n_packs > KVANT_INDEX_MAX_VECTORS / KVANT_PACK_VECTORS ||
                          h->n > (uint64_t)h->n_packs * KVANT_PACK_VECTORS ||
                          (h->n > 0 && !(h->flags & HAS_IDS)) || !(h->radius > 0)))
        return damaged(error, "its head is damaged");
    if (!lay_out(made, h, l) || l->end != n)
        return damaged(error, "it is cut short, or too long");
    made->needs_training = false;
    made->n = (size_t)h->n;
    made->next_id = h->next_id;
    made->n_packs = made->n_lists ? h->n_packs : 0;
    made->radius = h->radius;
    return KVANT_OK;
}

static const void *section(const uint8_t *bytes, const layout *l, int i)
{
    return l->bytes[i] ? bytes + l->start[i] : NULL;
}

static void set_arrays(kvant_index *index, const void *const arrays[N_SECTIONS])
{
    index->center = arrays[CENTER];
    index->projection = arrays[PROJECTION];
    index->centroids = arrays[CENTROIDS];
    index->ids = arrays[IDS];
    index->factors = arrays[FACTORS];
    index->offsets = arrays[OFFSETS];
    index->codes = arrays[CODES];
    index->rows = arrays[ROWS];
    index->row_factors = arrays[ROW_FACTORS];
}

static void point_into(kvant_index *index, const uint8_t *bytes, const layout *l)
{
    const void *sections[N_SECTIONS];
    for (int i = 0; i < N_SECTIONS; i++)
        sections[i] = section(bytes, l, i);
    set_arrays(index, sections);
}

static bool enter_id(kvant_index *index, size_t slot)
{
    if (index->ids[slot] >= index->next_id ||
        kvant_index_slot(index, index->ids[slot]) != KVANT_NO_SLOT)
        return false;
    kvant_id_table_insert(&index->table, index->ids, (uint32_t)slot);
    return true;
}

/* Enters the ids of a file. They must differ, be below next_id, and not be KVANT_INDEX_NO_ID. */
static kvant_status enter_ids(kvant_index *index, const kvant_error *error)
{
    if (!index->ids)
        return index->next_id == index->n || index->n == 0 ? KVANT_OK
                                                           : damaged(error, "its ids are damaged");
    if (kvant_id_table_reserve(&index->table, index->ids, index->n) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for the ids of %zu vectors",
                          index->n);
    for (size_t i = 0; !index->n_lists && i < index->n; i++)
        if (!enter_id(index, i))
            return damaged(error, "its ids are damaged");
    for (uint32_t l = 0; l < index->n_lists; l++)
        for (size_t i = 0; i < index->lists[l].n; i++)
            if (!enter_id(index, index->lists[l].packs[i / KVANT_PACK_VECTORS] *
                                         (size_t)KVANT_PACK_VECTORS +
                                     i % KVANT_PACK_VECTORS))
                return damaged(error, "its ids are damaged");
    return KVANT_OK;
}

/* Enters the lists of a file. Every vector and every pack must be in exactly one list. */
static kvant_status enter_lists(kvant_index *index, const uint32_t *numbers,
                                const kvant_error *error)
{
    const uint32_t *packs = numbers + index->n_lists;
    size_t left = index->n_packs, n = index->n;
    index->owners = kvant_alloc(index->n_packs + 1, sizeof *index->owners);
    if (!index->owners || kvant_lists_set(index, index->centroids) != KVANT_OK)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for %u lists",
                          (unsigned)index->n_lists);
    memset(index->owners, 0xff, index->n_packs * sizeof *index->owners);
    for (uint32_t l = 0; l < index->n_lists; l++) {
        const size_t used = ((size_t)numbers[l] + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
        if (used > left || numbers[l] > n)
            return damaged(error, "its lists are damaged");
        for (size_t i = 0; i < used; i++) {
            if (packs[i] >= index->n_packs || index->owners[packs[i]] != KVANT_NO_LIST)
                return damaged(error, "its lists are damaged");
            index->owners[packs[i]] = l;
        }
        if (kvant_lists_enter(index, l, packs, numbers[l]) != KVANT_OK)
            return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for lists");
        packs += used;
        left -= used;
        n -= numbers[l];
    }
    return left || n ? damaged(error, "its lists are damaged") : KVANT_OK;
}

void kvant_index_drop(kvant_index **index)
{
    if (*index) {
        point_into(*index, NULL, &(layout){ .end = 0 });
        (*index)->mapped = NULL;
        kvant_index_free(index);
    }
}

kvant_status kvant_index_parse(const uint8_t *bytes, size_t n, kvant_index **index,
                               const kvant_error *error)
{
    head h;
    layout l;
    *index = NULL;
    KVANT_FORWARD(check_head(bytes, n, error));
    memcpy(&h, bytes, sizeof h);
    kvant_status status = make_from_head(&h, n, index, &l, error);
    if (status == KVANT_OK) {
        point_into(*index, bytes, &l);
        (*index)->mapped = bytes;
        (*index)->mapped_bytes = n;
    }
    if (status == KVANT_OK && (*index)->n_lists)
        status = enter_lists(*index, section(bytes, &l, LISTS), error);
    if (status == KVANT_OK)
        status = enter_ids(*index, error);
    if (status != KVANT_OK)
        kvant_index_drop(index);
    return status;
}

/* Copies the file's arrays, so that the index owns its arrays. An array without a section stays
 * NULL. */
static kvant_status copy_arrays(kvant_index *index, const uint8_t *bytes)
{
    layout l;
    kvant_arrays copies = { .n = 0 };
    const void *sections[N_SECTIONS] = { NULL };
    head_of(index, &l);
    for (int i = CENTER; i < N_SECTIONS && !copies.failed; i++)
        if (l.bytes[i] && i != LISTS) {
            /* The array of ids has as many elements as the one of factors. */
            const size_t room = i == IDS ? 2 * l.bytes[FACTORS] : l.bytes[i];
            void *copy = kvant_arrays_new(&copies, room, 1);
            sections[i] = copy ? memcpy(copy, bytes + l.start[i], l.bytes[i]) : NULL;
        }
    if (copies.failed) {
        kvant_arrays_free(&copies);
        return KVANT_ERR_MEMORY;
    }
    set_arrays(index, sections);
    index->capacity = kvant_index_packs(index) * KVANT_PACK_VECTORS;
    index->mapped = NULL;
    return KVANT_OK;
}

kvant_status kvant_index_load(const char *path, kvant_index **index, char *err, size_t errlen)
{
    const kvant_error error = { errlen ? err : NULL, errlen };
    uint8_t *bytes;
    size_t n;
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    *index = NULL;
    KVANT_FORWARD(kvant_read_file(path, check_head, &bytes, &n, &error));
    kvant_status status =
        checksum_fits(bytes, n) ? KVANT_OK : damaged(&error, "its checksum does not match");
    if (status == KVANT_OK)
        status = kvant_index_parse(bytes, n, index, &error);
    if (status == KVANT_OK && copy_arrays(*index, bytes) != KVANT_OK)
        status =
            kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for the %zu bytes of %s", n, path);
    if (status != KVANT_OK)
        kvant_index_drop(index);
    kvant_free(bytes);
    return status;
}

kvant_status kvant_index_view(const char *path, kvant_index **index, char *err, size_t errlen)
{
    const kvant_error error = { errlen ? err : NULL, errlen };
    kvant_mapped_file file;
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    *index = NULL;
    KVANT_FORWARD(kvant_map_file(path, check_head, &file, &error));
    const kvant_status status = kvant_index_parse(file.bytes, file.n, index, &error);
    if (status == KVANT_OK)
        (*index)->file = file;
    else
        kvant_unmap_file(&file);
    return status;
}

kvant_status kvant_index_check_view(const kvant_index *index, const kvant_error *error)
{
    return kvant_mapped_file_is_whole(&index->file)
               ? KVANT_OK
               : damaged(error, "it was cut short while it was open as a view");
}

kvant_status kvant_index_verify(const kvant_index *index)
{
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_index_check_view(index, NULL));
    if (!index->mapped || checksum_fits(index->mapped, index->mapped_bytes))
        return KVANT_OK;
    return damaged(NULL, "its checksum does not match");
}

/* ---- Information ---- */

static size_t vector_bytes(const kvant_index *index)
{
    return kvant_book_pack_bytes(&index->book) / KVANT_PACK_VECTORS +
           sizeof(float) * (kvant_index_has_offsets(index) ? 2 : 1) +
           (index->has_rows ? index->dim + sizeof(float) : 0);
}

static size_t memory_of(const kvant_index *index, const layout *l)
{
    const size_t rotated = index->code_dim + (index->has_rows ? index->dim : 0);
    const size_t bytes = sizeof *index + index->table.size * sizeof *index->table.slots +
                         (index->book.trellis ? sizeof *index->book.trellis : 0) +
                         KVANT_ROTATION_ROUNDS * rotated * (sizeof(float) + sizeof(uint16_t));
    if (index->mapped)
        return bytes;
    return bytes + l->bytes[CENTER] + l->bytes[PROJECTION] + l->bytes[CENTROIDS] + l->bytes[LISTS] +
           index->capacity * (vector_bytes(index) + (index->ids ? sizeof(uint64_t) : 0));
}

kvant_status kvant_index_get_info(const kvant_index *index, kvant_index_info *info)
{
    layout l;
    KVANT_RETURN_IF(!index, KVANT_ERR_ARGUMENT);
    head_of(index, &l);
    const kvant_index_info now = {
        .dim = index->dim,
        .metric = index->metric,
        .spec = index->spec,
        .bits = index->book.format.bits,
        .has_center = index->center != NULL,
        .has_ids = index->ids != NULL,
        .is_view = index->mapped != NULL,
        .n = index->n,
        .bytes_per_vector = vector_bytes(index),
        .id_bytes = index->ids ? sizeof(uint64_t) : 0,
        .n_lists = index->n_lists,
        .memory_bytes = memory_of(index, &l),
        .file_bytes = l.end,
        .next_id = index->next_id,
    };
    return KVANT_RETURN_STRUCT(kvant_index_info, info, &now, n_lists) ? KVANT_OK
                                                                      : KVANT_ERR_ARGUMENT;
}
