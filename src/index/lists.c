/* lists.c - see lists.h. */
#include "lists.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/parallel.h"

void kvant_lists_move(float *centroids, const kvant_index *index, const float *from)
{
    for (uint32_t l = 0; l < index->n_lists; l++)
        for (uint32_t i = 0; i < index->dim; i++)
            centroids[(size_t)l * index->dim + i] +=
                (from ? from[i] : 0) - (index->center ? index->center[i] : 0);
}

kvant_status kvant_lists_set(kvant_index *index, const float *centroids)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    kvant_list *lists = kvant_alloc(index->n_lists, sizeof *lists);
    float *halves = kvant_alloc(index->n_lists, sizeof *halves);
    if (!lists || !halves) {
        kvant_free(lists);
        kvant_free(halves);
        return KVANT_ERR_MEMORY;
    }
    kvant_lists_destroy(index);
    index->centroids = centroids;
    index->lists = lists;
    index->half_squares = halves;
    double squares = 0;
    for (uint32_t i = 0; i < index->n_lists; i++) {
        const float *c = kvant_index_centroid(index, i);
        halves[i] = kernels->dot(c, c, index->dim) / 2;
        squares += 2.0 * halves[i];
    }
    if (!(index->radius > 0)) /* the index was not trained */
        index->radius = squares > 0 ? (float)sqrt(squares / index->n_lists) : 1;
    return KVANT_OK;
}

void kvant_lists_destroy(kvant_index *index)
{
    for (uint32_t i = 0; index->lists && i < index->n_lists; i++)
        kvant_free(index->lists[i].packs);
    kvant_free(index->lists);
    kvant_free(index->half_squares);
    index->lists = NULL;
    index->half_squares = NULL;
}

static bool make_room(kvant_list *list, size_t packs)
{
    if (packs <= list->room)
        return true;
    const size_t room = packs + packs / 2 + 4;
    uint32_t *larger = kvant_alloc(room, sizeof *larger);
    if (!larger)
        return false;
    if (list->n)
        memcpy(larger, list->packs, kvant_list_packs(list) * sizeof *larger);
    kvant_free(list->packs);
    list->packs = larger;
    list->room = room;
    return true;
}

kvant_status kvant_lists_enter(kvant_index *index, uint32_t number, const uint32_t *packs, size_t n)
{
    kvant_list *list = &index->lists[number];
    const size_t n_packs = (n + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
    KVANT_RETURN_IF(!make_room(list, n_packs), KVANT_ERR_MEMORY);
    list->n = n;
    if (n_packs)
        memcpy(list->packs, packs, n_packs * sizeof *packs);
    for (size_t i = 0; i < n_packs; i++)
        index->owners[packs[i]] = number;
    return KVANT_OK;
}

/* ---- Choosing lists ---- */

/* Computes near[0 .. n - 1] = <v, c> - weight |c|^2 / 2 for the lists from `first` on. Returns n,
 * at most NEAR. */
#define NEAR 64u

static uint32_t find_near(const kvant_index *index, const kvant_kernels *kernels, const float *v,
                          float weight, uint32_t first, float *near)
{
    const uint32_t left = index->n_lists - first, n = left < NEAR ? left : NEAR;
    kernels->dot_rows(v, kvant_index_centroid(index, first), index->dim, n, near);
    for (uint32_t i = 0; i < n; i++)
        near[i] -= weight * index->half_squares[first + i];
    return n;
}

static uint32_t nearest_list(const kvant_index *index, const kvant_kernels *kernels, const float *v)
{
    uint32_t best = 0;
    float most = -INFINITY, near[NEAR];
    for (uint32_t first = 0, n; first < index->n_lists; first += n) {
        n = find_near(index, kernels, v, 1, first, near);
        for (uint32_t i = 0; i < n; i++)
            if (near[i] > most) {
                most = near[i];
                best = first + i;
            }
    }
    return best;
}

/* For inner products, the query is scaled to the length of vectors. A list with a short centroid
 * holds vectors that are far from the centroid, and this factor says how much that counts.
 * Embeddings work best with 1 and rows without clusters with 0. With 16 of 128 lists, a weight of
 * 0.7 finds a share of 0.936 of the neighbours in embeddings. A weight of 1 finds 0.938. In rows
 * without clusters a weight of 0.7 finds 0.939. A weight of 0 finds 0.959. */
#define SHORT_CENTROIDS 0.7f

void kvant_lists_choose(const kvant_index *index, const kvant_kernels *kernels, const float *v,
                        uint32_t n_probe, kvant_found *found, uint32_t *chosen)
{
    const bool distance = index->metric == KVANT_METRIC_L2;
    const float weight =
        distance ? 1 : SHORT_CENTROIDS * sqrtf(kernels->dot(v, v, index->dim)) / index->radius;
    kvant_top top = { found, 0, n_probe };
    float near[NEAR];
    for (uint32_t first = 0, n; first < index->n_lists; first += n) {
        n = find_near(index, kernels, v, weight, first, near);
        for (uint32_t i = 0; i < n; i++)
            if (near[i] >= kvant_top_threshold(&top))
                kvant_top_add(&top, (kvant_found){ near[i], first + i, first + i });
    }
    for (uint32_t i = 0; i < top.n; i++)
        chosen[i] = top.found[i].slot;
}

/* ---- Adding ---- */

typedef struct addition {
    kvant_index *index;
    const kvant_kernels *kernels;
    const float *rows;
    size_t stride, n;
    uint32_t *list_of, *slots, *order; /* per row: its list and its slot; rows ordered by list */
    size_t *starts;                    /* where the rows of a list begin in `order`, n_lists + 1 */
    float *scratch;                    /* per thread */
    uint8_t *codes;
} addition;

static void assign_row(void *context, size_t i, uint32_t worker)
{
    const addition *a = context;
    float *u = a->scratch + worker * kvant_index_scratch(a->index);
    kvant_index_row row;
    kvant_index_centre(a->index, a->kernels, a->rows + i * a->stride, false, u, &row);
    a->list_of[i] = nearest_list(a->index, a->kernels, u);
}

static void sort_rows(addition *a)
{
    const uint32_t n_lists = a->index->n_lists;
    for (size_t i = 0; i < a->n; i++)
        a->starts[a->list_of[i] + 1]++;
    for (uint32_t l = 0; l < n_lists; l++)
        a->starts[l + 1] += a->starts[l];
    for (size_t i = a->n; i-- > 0;) /* starts[l + 1] decreases to the first row of list l */
        a->order[--a->starts[a->list_of[i] + 1]] = (uint32_t)i;
    memmove(a->starts, a->starts + 1, n_lists * sizeof *a->starts);
    a->starts[n_lists] = a->n;
}

/* Finds slots for all rows. *n_packs = how many packs the index then has. New packs are in lists
 * already, but the index does not count them yet. */
static bool find_slots(addition *a, size_t *n_packs)
{
    *n_packs = a->index->n_packs;
    for (uint32_t l = 0; l < a->index->n_lists; l++) {
        kvant_list *list = &a->index->lists[l];
        const size_t first = a->starts[l], end = a->starts[l + 1], packs = kvant_list_packs(list);
        if (!make_room(list,
                       (list->n + (end - first) + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS))
            return false;
        for (size_t i = first; i < end; i++) {
            const size_t at = list->n + (i - first);
            if (at % KVANT_PACK_VECTORS == 0 && at / KVANT_PACK_VECTORS >= packs)
                list->packs[at / KVANT_PACK_VECTORS] = (uint32_t)(*n_packs)++;
            a->slots[a->order[i]] = list->packs[at / KVANT_PACK_VECTORS] * KVANT_PACK_VECTORS +
                                    (uint32_t)(at % KVANT_PACK_VECTORS);
        }
    }
    return *n_packs <= KVANT_INDEX_MAX_VECTORS / KVANT_PACK_VECTORS;
}

static void encode_list(void *context, size_t l, uint32_t worker)
{
    const addition *a = context;
    float *scratch = a->scratch + worker * kvant_index_scratch(a->index);
    uint8_t *codes = a->codes + worker * kvant_index_code_room(a->index);
    for (size_t i = a->starts[l]; i < a->starts[l + 1]; i++) {
        const uint32_t row = a->order[i];
        kvant_index_encode_row(a->index, a->kernels, a->slots[row], (uint32_t)l,
                               a->rows + row * a->stride, scratch, codes);
    }
}

static void own_packs(kvant_index *index, uint32_t l, size_t n)
{
    for (size_t i = 0; i * KVANT_PACK_VECTORS < n; i++)
        index->owners[index->lists[l].packs[i]] = l;
}

static kvant_status place_rows(addition *a, const uint64_t *ids, uint32_t threads)
{
    kvant_index *index = a->index;
    size_t n_packs;
    kvant_parallel_for(a->n, threads, assign_row, a);
    sort_rows(a);
    KVANT_RETURN_IF(!find_slots(a, &n_packs), KVANT_ERR_MEMORY);
    if (n_packs * KVANT_PACK_VECTORS > index->capacity)
        KVANT_FORWARD(kvant_index_grow(index, n_packs * KVANT_PACK_VECTORS));
    KVANT_FORWARD(kvant_index_keep_ids(index, index->n + a->n));
    KVANT_FORWARD(kvant_index_insert_ids(index, ids, a->slots, a->n));
    kvant_parallel_for(index->n_lists, threads, encode_list, a);
    for (uint32_t l = 0; l < index->n_lists; l++)
        own_packs(index, l, index->lists[l].n += a->starts[l + 1] - a->starts[l]);
    index->n_packs = n_packs;
    return KVANT_OK;
}

kvant_status kvant_lists_add(kvant_index *index, const float *rows, size_t stride, size_t n,
                             const uint64_t *ids, uint32_t n_threads)
{
    const uint32_t threads = n_threads > 1 ? n_threads > 256 ? 256 : n_threads : 1;
    addition a = { .index = index,
                   .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                   .rows = rows,
                   .stride = stride,
                   .n = n };
    kvant_arrays arrays = { .n = 0 };
    a.list_of = kvant_arrays_new(&arrays, n + 1, sizeof *a.list_of);
    a.slots = kvant_arrays_new(&arrays, n + 1, sizeof *a.slots);
    a.order = kvant_arrays_new(&arrays, n + 1, sizeof *a.order);
    a.starts = kvant_arrays_new(&arrays, (size_t)index->n_lists + 2, sizeof *a.starts);
    a.scratch = kvant_arrays_new(&arrays, threads * kvant_index_scratch(index), sizeof *a.scratch);
    a.codes = kvant_arrays_new(&arrays, threads, kvant_index_code_room(index));
    const kvant_status status = arrays.failed ? KVANT_ERR_MEMORY : place_rows(&a, ids, threads);
    kvant_arrays_free(&arrays);
    return status;
}

/* ---- Removing ---- */

/* The list that contains a pack. *place: the pack's index in the list. */
static kvant_list *list_of_pack(kvant_index *index, size_t pack, size_t *place)
{
    kvant_list *list = &index->lists[index->owners[pack]];
    for (*place = kvant_list_packs(list) - 1; list->packs[*place] != pack; --*place)
        ;
    return list;
}

/* Moves the index's last pack to the place of an empty pack. */
static void fill_gap(kvant_index *index, size_t gap)
{
    const size_t last = --index->n_packs, bytes = kvant_book_pack_bytes(&index->book);
    size_t place;
    if (gap == last)
        return;
    kvant_list *list = list_of_pack(index, last, &place);
    const size_t used = list->n - place * KVANT_PACK_VECTORS;
    for (uint32_t v = 0; v < KVANT_PACK_VECTORS && v < used; v++)
        kvant_index_move_slot(index, last * KVANT_PACK_VECTORS + v, gap * KVANT_PACK_VECTORS + v);
    memcpy(KVANT_OWN(uint8_t, index->codes) + gap * bytes, index->codes + last * bytes, bytes);
    memset(KVANT_OWN(uint8_t, index->codes) + last * bytes, 0, bytes);
    list->packs[place] = (uint32_t)gap;
    index->owners[gap] = index->owners[last];
}

void kvant_lists_remove(kvant_index *index, size_t slot)
{
    size_t place;
    kvant_list *list = list_of_pack(index, slot / KVANT_PACK_VECTORS, &place);
    const size_t at = list->n - 1, pack = list->packs[at / KVANT_PACK_VECTORS];
    const size_t last = pack * KVANT_PACK_VECTORS + at % KVANT_PACK_VECTORS;
    kvant_index_replace(index, last, slot);
    list->n--;
    if (at % KVANT_PACK_VECTORS == 0)
        fill_gap(index, pack);
}
