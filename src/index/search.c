/* search.c - finds the nearest vectors of a batch of queries.
 *
 * Queries are rotated and rounded to 8 bits. A tile of 32 queries reads all packs. Packs that
 * products cannot read are decoded once for all tiles of a group. If there are more threads than
 * groups, the packs or the lists are also cut into ranges, and the results of the ranges are
 * merged. Products are exact and ties are ordered by id, so no cut changes a result. */
#include <math.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/parallel.h"
#include "../device/index.h"
#include "lists.h"
#include "search.h"

#define GROUP 8u          /* tiles that share decoded packs */
#define RANGE_PACKS 128u  /* with fewer packs, a range is not worth a thread */
#define MOST_THREADS 256u /* threads of a search at most */

/* ---- Packs ---- */

static void take(const search *s, kvant_top *top, size_t pack, uint32_t mask, const float *keys)
{
    for (; mask; mask &= mask - 1) {
        const uint32_t v = kvant_lowest_bit(mask);
        const size_t slot = pack * KVANT_PACK_VECTORS + v;
        if (keys[v] >= kvant_top_threshold(top))
            kvant_top_add(top,
                          (kvant_found){ keys[v], (uint32_t)slot, kvant_index_id(s->index, slot) });
    }
}

/* The slots of a pack that are in use and pass the filters, a bit each. left: the vectors from this
 * pack on, of the index or of a list. */
static uint32_t wanted_slots(const search *s, size_t pack, size_t left)
{
    const uint32_t used = left < 32 ? (1u << left) - 1 : UINT32_MAX;
    return s->passes ? s->passes[pack] & used : used;
}

/* The working memory of a thread. */
typedef struct room {
    int32_t *dots;
    float *keys;
    uint8_t *levels;
    int8_t *gathered;
} room;

static size_t level_bytes(const search *s)
{
    const kvant_book *book = &s->index->book;
    return (kvant_pack_bytes(&book->levels) + kvant_book_scratch(book, s->index->code_dim) + 63) /
           64 * 64;
}

static room room_of(const search *s, uint32_t worker)
{
    const size_t numbers = (size_t)TILE * KVANT_PACK_VECTORS;
    return (room){ s->dots + worker * numbers, s->keys + worker * numbers,
                   s->levels ? s->levels + worker * level_bytes(s) : NULL,
                   s->gathered ? s->gathered + worker * s->group * tile_bytes(s) : NULL };
}

/* The pack in the form that products read, decoded if necessary. */
static const uint8_t *open_pack(const search *s, size_t pack, const room *r)
{
    const kvant_book *book = &s->index->book;
    const uint8_t *codes = s->index->codes + pack * kvant_book_pack_bytes(book);
    if (!r->levels)
        return codes;
    kvant_book_decode(book, s->kernels, codes, r->levels,
                      r->levels + kvant_pack_bytes(&book->levels));
    return r->levels;
}

static void scan_pack(const search *s, size_t tile, size_t pack, const uint8_t *codes,
                      uint32_t wanted, kvant_top *tops, float *thresholds, const room *r)
{
    const kvant_index *index = s->index;
    const size_t first = tile * TILE, slot = pack * KVANT_PACK_VECTORS;
    const uint32_t n = tile_size(s, tile);
    const kvant_pack_queries queries = { s->x + tile * tile_bytes(s), s->sums + first, n };
    uint32_t masks[TILE];
    s->kernels->pack_dots(&index->book.levels, codes, &queries, r->dots);
    s->kernels->pack_keys(r->dots, index->factors + slot,
                          index->offsets ? index->offsets + slot : NULL, s->scales + first,
                          s->weights + first, thresholds, n, r->keys, masks);
    for (uint32_t i = 0; i < n; i++)
        if (masks[i] & wanted) {
            take(s, &tops[i], pack, masks[i] & wanted, r->keys + (size_t)i * KVANT_PACK_VECTORS);
            thresholds[i] = kvant_top_threshold(&tops[i]);
        }
}

/* The tiles of a group and their queries. `tops` holds the candidates from one range. */
typedef struct group {
    size_t first, end; /* tiles */
    uint32_t n;
    kvant_top tops[GROUP * TILE];
} group;

static void open_group(const search *s, size_t unit, group *g)
{
    const size_t range = unit % s->n_ranges;
    g->first = unit / s->n_ranges * s->group;
    g->end = g->first + s->group < s->n_tiles ? g->first + s->group : s->n_tiles;
    g->n = 0;
    for (size_t tile = g->first; tile < g->end; tile++)
        for (uint32_t i = 0; i < tile_size(s, tile); i++)
            g->tops[g->n++] =
                (kvant_top){ s->found + ((tile * TILE + i) * s->n_ranges + range) * s->k, 0, s->k };
}

static void close_group(const search *s, size_t unit, const group *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        s->n_found[(g->first * TILE + i) * s->n_ranges + unit % s->n_ranges] = g->tops[i].n;
}

static void scan(void *context, size_t unit, uint32_t worker)
{
    const search *s = context;
    const size_t range = unit % s->n_ranges;
    const size_t first = s->n_packs * range / s->n_ranges,
                 end = s->n_packs * (range + 1) / s->n_ranges;
    const room r = room_of(s, worker);
    float thresholds[GROUP * TILE];
    group g;
    open_group(s, unit, &g);
    for (uint32_t i = 0; i < g.n; i++)
        thresholds[i] = -INFINITY;
    for (size_t pack = first; pack < end; pack++) {
        const uint32_t wanted = wanted_slots(s, pack, s->index->n - pack * KVANT_PACK_VECTORS);
        const uint8_t *codes = wanted ? open_pack(s, pack, &r) : NULL;
        for (size_t tile = g.first; wanted && tile < g.end; tile++) {
            const size_t at = (tile - g.first) * TILE;
            scan_pack(s, tile, pack, codes, wanted, g.tops + at, thresholds + at, &r);
        }
    }
    close_group(s, unit, &g);
}

/* ---- Lists ---- */

static void choose_lists(void *context, size_t tile, uint32_t worker)
{
    search *s = context;
    const uint32_t n_lists = s->index->n_lists;
    kvant_found *found = s->nearest + (size_t)worker * s->n_probe;
    uint32_t *chosen = s->chosen + (size_t)worker * s->n_probe,
             *probed = s->probed + tile * n_lists;
    const uint32_t n = tile_size(s, tile);
    for (uint32_t list = 0; !s->nearest && list < n_lists; list++)
        probed[list] = UINT32_MAX >> (TILE - n);
    for (uint32_t i = 0; s->nearest && i < n; i++) {
        const float *v = s->centred + (tile * TILE + i) * s->index->dim;
        kvant_lists_choose(s->index, s->kernels, v, s->n_probe, found, chosen);
        for (uint32_t j = 0; j < s->n_probe; j++)
            probed[chosen[j]] |= 1u << i;
    }
}

/* The queries of a group that search a list, with their numbers. */
typedef struct visitors {
    uint32_t n, query[TILE]; /* query: its index in the group */
    int32_t sums[TILE];
    float scales[TILE], weights[TILE], constants[TILE], thresholds[TILE];
} visitors;

/* The threshold for keys without the constant that a list adds. It is lowered by more than the
 * rounding errors, because the sum decides. */
static float lowered(float threshold, float constant)
{
    return threshold - constant - 0x1p-20f * (fabsf(threshold) + fabsf(constant));
}

static void add_visitor(const search *s, const group *g, uint32_t list, uint32_t query, visitors *v)
{
    const size_t at = g->first * TILE + query;
    v->query[v->n] = query;
    v->sums[v->n] = s->sums[at];
    v->scales[v->n] = s->scales[at];
    v->weights[v->n] = s->weights[at];
    v->constants[v->n++] = s->kernels->dot(s->centred + at * s->index->dim,
                                           kvant_index_centroid(s->index, list), s->index->dim);
}

/* Copies the visitors' queries as a tile. */
static void copy_visitors(const search *s, const group *g, const visitors *v, int8_t *x)
{
    const uint32_t n_quads = s->index->book.levels.n_quads;
    for (uint32_t j = 0; j < v->n; j++) {
        const size_t tile = g->first + v->query[j] / TILE, n = tile_size(s, tile);
        const int8_t *from = s->x + tile * tile_bytes(s) + v->query[j] % TILE * 4;
        for (uint32_t quad = 0; quad < n_quads; quad++)
            memcpy(x + ((size_t)quad * v->n + j) * 4, from + quad * n * 4, 4);
    }
}

/* Collects the queries that search a list in sets of 32. Returns the number of sets. */
static uint32_t gather(const search *s, const group *g, uint32_t list, int8_t *gathered,
                       visitors *sets)
{
    uint32_t n = 0;
    sets[0].n = 0;
    for (size_t tile = g->first; tile < g->end; tile++)
        for (uint32_t mask = s->probed[tile * s->index->n_lists + list]; mask; mask &= mask - 1) {
            if (sets[n].n == TILE)
                sets[++n].n = 0;
            add_visitor(s, g, list, (uint32_t)(tile - g->first) * TILE + kvant_lowest_bit(mask),
                        &sets[n]);
        }
    for (uint32_t i = 0; i <= n; i++)
        copy_visitors(s, g, &sets[i], gathered + i * tile_bytes(s));
    return n + 1;
}

static void scan_list_pack(const search *s, size_t pack, const uint8_t *codes, uint32_t wanted,
                           const int8_t *x, visitors *v, kvant_top *tops, const room *r)
{
    const kvant_index *index = s->index;
    const size_t slot = pack * KVANT_PACK_VECTORS;
    const kvant_pack_queries queries = { x, v->sums, v->n };
    uint32_t masks[TILE];
    for (uint32_t j = 0; j < v->n; j++)
        v->thresholds[j] = lowered(kvant_top_threshold(&tops[v->query[j]]), v->constants[j]);
    s->kernels->pack_dots(&index->book.levels, codes, &queries, r->dots);
    s->kernels->pack_keys(r->dots, index->factors + slot,
                          index->offsets ? index->offsets + slot : NULL, v->scales, v->weights,
                          v->thresholds, v->n, r->keys, masks);
    for (uint32_t j = 0; j < v->n; j++) {
        float *of_query = r->keys + (size_t)j * KVANT_PACK_VECTORS;
        for (uint32_t i = 0; masks[j] & wanted && i < KVANT_PACK_VECTORS; i++)
            of_query[i] += v->constants[j];
        take(s, &tops[v->query[j]], pack, masks[j] & wanted, of_query);
    }
}

static void scan_list(const search *s, group *g, uint32_t number, const room *r)
{
    const kvant_list *list = &s->index->lists[number];
    visitors sets[GROUP];
    const uint32_t n = gather(s, g, number, r->gathered, sets);
    for (size_t i = 0; i * KVANT_PACK_VECTORS < list->n; i++) {
        const size_t left = list->n - i * KVANT_PACK_VECTORS, pack = list->packs[i];
        const uint32_t wanted = wanted_slots(s, pack, left);
        const uint8_t *codes = wanted ? open_pack(s, pack, r) : NULL;
        for (uint32_t set = 0; wanted && set < n; set++)
            scan_list_pack(s, pack, codes, wanted, r->gathered + set * tile_bytes(s), &sets[set],
                           g->tops, r);
    }
}

/* Scans the lists of a range: every n_ranges-th of the lists that a query of the group searches. */
static void scan_lists(void *context, size_t unit, uint32_t worker)
{
    const search *s = context;
    const room r = room_of(s, worker);
    size_t turn = 0;
    group g;
    open_group(s, unit, &g);
    for (uint32_t list = 0; list < s->index->n_lists; list++) {
        uint32_t any = 0;
        for (size_t tile = g.first; tile < g.end; tile++)
            any |= s->probed[tile * s->index->n_lists + list];
        if (any && turn++ % s->n_ranges == unit % s->n_ranges)
            scan_list(s, &g, list, &r);
    }
    close_group(s, unit, &g);
}

/* ---- The call ---- */

/* How many threads are worth waking. Each gets at least 0.1 ms of work. numbers: the size of the
 * work. */
static uint32_t threads_for(const search *s, double numbers)
{
    const double worth = 1 + numbers / 32768;
    return worth < s->n_threads ? (uint32_t)worth : s->n_threads;
}

static void plan(search *s)
{
    const kvant_index_query *query = s->query;
    const uint32_t threads = query->n_threads > MOST_THREADS ? MOST_THREADS : query->n_threads;
    const uint32_t candidates = query->rerank > query->k ? query->rerank : query->k;
    s->k = candidates < s->index->n ? candidates : (uint32_t)s->index->n;
    s->n_threads = threads ? threads : 1;
    s->n_packs = kvant_index_packs(s->index);
    s->n_tiles = (query->n + TILE - 1) / TILE;
    s->group = s->index->n_lists || kvant_book_is_decoded(&s->index->book) ? GROUP : 1;
    s->n_groups = (s->n_tiles + s->group - 1) / s->group;
    s->n_ranges = 1;
    s->n_probe = query->n_probe < s->index->n_lists ? query->n_probe : s->index->n_lists;
    if (s->index->n_lists && s->n_probe == 0)
        s->n_probe = s->index->n_lists < 8 ? s->index->n_lists : 8;
    if (!s->gpu && s->n_threads > 1 && s->n_groups < 2 * (size_t)s->n_threads) {
        const size_t wanted = (2 * (size_t)s->n_threads + s->n_groups - 1) / s->n_groups,
                     most = s->index->n_lists ? s->n_probe : s->n_packs / RANGE_PACKS;
        s->n_ranges = most < 1 ? 1 : wanted < most ? wanted : most;
    }
}

static bool allocate(search *s)
{
    kvant_arrays *a = &s->arrays;
    const size_t n = s->query->n;
    size_t per_query, all;
    if (!kvant_mul_size(s->n_ranges, s->k ? s->k : 1, &per_query) ||
        !kvant_mul_size(per_query, n, &all) ||
        !kvant_mul_size(tile_bytes(s), s->n_tiles, &per_query))
        return false;
    s->x = kvant_arrays_new(a, per_query, 1);
    s->sums = kvant_arrays_new(a, n, sizeof *s->sums);
    s->scales = kvant_arrays_new(a, n, sizeof *s->scales);
    s->weights = kvant_arrays_new(a, n, sizeof *s->weights);
    s->steps = kvant_arrays_new(a, n, sizeof *s->steps);
    s->constants = kvant_arrays_new(a, n, sizeof *s->constants);
    s->found = kvant_arrays_new(a, all, sizeof *s->found);
    s->n_found = kvant_arrays_new(a, n * s->n_ranges, sizeof *s->n_found);
    s->scratch =
        kvant_arrays_new(a, s->n_threads * kvant_index_scratch(s->index), sizeof *s->scratch);
    if (s->index->n_lists) {
        s->centred = kvant_arrays_new(a, n, s->index->dim * sizeof *s->centred);
        s->probed = kvant_arrays_new(a, s->n_tiles, s->index->n_lists * sizeof *s->probed);
        s->gathered = kvant_arrays_new(a, (size_t)s->n_threads * s->group, tile_bytes(s));
    }
    if (s->n_probe < s->index->n_lists) {
        s->nearest = kvant_arrays_new(a, s->n_threads, s->n_probe * sizeof *s->nearest);
        s->chosen = kvant_arrays_new(a, s->n_threads, s->n_probe * sizeof *s->chosen);
    }
    if (kvant_book_is_decoded(&s->index->book))
        s->levels = kvant_arrays_new(a, s->n_threads, level_bytes(s));
    const size_t products = (size_t)s->n_threads * TILE * KVANT_PACK_VECTORS;
    s->dots = kvant_arrays_new(a, products, sizeof *s->dots);
    s->keys = kvant_arrays_new(a, products, sizeof *s->keys);
    return !a->failed;
}

static kvant_status check_query(const kvant_index *index, const kvant_index_query *given,
                                kvant_index_query *query)
{
    if (!KVANT_ACCEPT_STRUCT(kvant_index_query, query, given, n_probe))
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "query is NULL, or its size field is not set to sizeof(kvant_index_query)");
    if (query->k < 1 || (query->n && !query->rows) ||
        (query->n > 1 && query->stride < index->dim) ||
        (query->n_originals > 1 && query->original_stride < index->dim) ||
        (query->n_allowed && !query->allowed))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "k is 0, rows or allowed is NULL, or a stride is less than %u",
                          (unsigned)index->dim);
    if (query->rerank && !query->original && !query->originals && !index->has_rows)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "rerank needs originals or original, or an index with rows=int8");
    return KVANT_OK;
}

/* Enters what the GPU found. The order makes a heap, like the heaps that kvant_search_finish_query
 * reads. */
static void enter(search *s, size_t i, const kvant_cuda_found *found, uint32_t n)
{
    kvant_found *to = s->found + i * s->k;
    s->n_found[i] = n < s->k ? n : s->k;
    for (uint32_t j = s->n_found[i]; j-- > 0; to++)
        *to = (kvant_found){ found[j].key, found[j].slot, kvant_index_id(s->index, found[j].slot) };
}

static kvant_status find_on_gpu(search *s)
{
    const kvant_index_query *query = s->query;
    kvant_cuda_found *found = kvant_alloc(query->n, s->k * sizeof *found);
    uint32_t *n_found = kvant_alloc(query->n, sizeof *n_found);
    const kvant_cuda_find_args args = { s->x, s->sums,   s->scales, s->weights, query->n,
                                        s->k, s->passes, found,     n_found };
    kvant_status status =
        found && n_found ? kvant_cuda_index_find(s->gpu, &args) : KVANT_ERR_MEMORY;
    if (status != KVANT_OK)
        status = kvant_fail(NULL, status, "searching on the GPU: %s", kvant_strerror(status));
    for (size_t i = 0; status == KVANT_OK && i < query->n; i++)
        enter(s, i, found + i * s->k, n_found[i]);
    kvant_free(found);
    kvant_free(n_found);
    return status;
}

static kvant_status find(search *s)
{
    if (s->k && s->gpu)
        return find_on_gpu(s);
    if (s->k && s->index->n_lists) {
        kvant_parallel_for(s->n_tiles, s->n_threads, choose_lists, s);
        kvant_parallel_for(s->n_groups * s->n_ranges, s->n_threads, scan_lists, s);
    } else if (s->k) {
        kvant_parallel_for(s->n_groups * s->n_ranges, s->n_threads, scan, s);
    }
    return KVANT_OK;
}

kvant_status kvant_index_search(const kvant_index *index, const kvant_index_query *query,
                                float *scores, uint64_t *ids)
{
    return kvant_index_search_on(NULL, index, query, scores, ids);
}

kvant_status kvant_index_search_on(kvant_cuda_index *gpu, const kvant_index *index,
                                   const kvant_index_query *query, float *scores, uint64_t *ids)
{
    kvant_index_query q;
    if (!index || !scores || !ids)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "index, scores or ids is NULL");
    KVANT_FORWARD(check_query(index, query, &q));
    if (q.n == 0)
        return KVANT_OK;
    KVANT_FORWARD(kvant_index_check_view(index, NULL));
    search s = {
        .index = index, .query = &q, .kernels = kvant_kernels_get(KVANT_CPU_AUTO), .gpu = gpu
    };
    kvant_search_results r = { &s, scores, ids };
    plan(&s);
    if (gpu && s.k > KVANT_CUDA_INDEX_MOST_K)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "k and rerank are at most %u on a GPU, not %u: search on the CPU",
                          KVANT_CUDA_INDEX_MOST_K, (unsigned)s.k);
    kvant_status status = kvant_index_filter(index, &q, &s.passes);
    if (status == KVANT_OK && !allocate(&s))
        status = KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        kvant_parallel_for(s.n_tiles, threads_for(&s, (double)q.n * index->dim),
                           kvant_search_prepare_tile, &s);
        status = atomic_load(&s.refused) ? kvant_index_check_rows(index, q.rows, q.stride, q.n)
                                         : find(&s);
    }
    if (status == KVANT_OK)
        kvant_parallel_for(q.n, threads_for(&s, (double)q.n * s.k * (q.rerank ? index->dim : 16)),
                           kvant_search_finish_query, &r);
    kvant_free(s.passes);
    kvant_arrays_free(&s.arrays);
    return kvant_index_report_error(status);
}
