/* search.c - finds the nearest vectors of a batch of queries.
 *
 * Queries are rotated, rounded to 8 bits and taken 32 at a time (a tile) through all packs. Packs
 * that products cannot read are decoded once for the tiles of a group. Where there are more threads
 * than groups, the packs or the lists are cut into ranges too, and what was found in each is merged.
 * Products are exact and ties are ordered by id, so no cut changes a result. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/half.h"
#include "../base/parallel.h"
#include "../device/index.h"
#include "lists.h"

#define TILE 32u         /* queries: 12 KB of them at 384 dimensions */
#define GROUP 8u         /* tiles that share decoded packs */
#define RANGE_PACKS 128u /* at least, for a thread of its own */
#define MOST_THREADS 256u

typedef struct search {
    const kvant_index *index;
    const kvant_index_query *query;
    const kvant_kernels *kernels;
    kvant_cuda_index *gpu; /* NULL: the CPU searches */
    uint32_t k, n_threads, n_probe; /* k: candidates per query */
    uint32_t group; /* tiles: GROUP with lists or where packs are decoded, else 1 */
    size_t n_tiles, n_groups, n_ranges, n_packs;
    uint32_t *passes;
    int8_t *x;          /* of tile t: x + t * TILE * 4 n_quads, interleaved */
    int32_t *sums;      /* per query, as below */
    float *scales;      /* of keys: the query's step where there are offsets, else 1 */
    float *weights;     /* of offsets */
    float *steps;       /* from keys to scores */
    float *constants;   /* added to scores */
    kvant_found *found; /* [query][range][k] */
    uint32_t *n_found;  /* [query][range] */
    float *scratch;     /* per thread */
    float *centred;     /* with lists: queries without the centre */
    uint32_t *probed;   /* [tile][list]: a bit per query that looks there */
    int8_t *gathered;   /* per thread: queries of a list, by tiles of the group */
    uint8_t *levels;    /* per thread: a decoded pack, and scratch */
    int32_t *dots;      /* per thread, TILE x 32 */
    float *keys;        /* the same */
    atomic_bool refused; /* a query is not finite, or too long */
} search;

/* ---- Queries ---- */

static uint32_t tile_size(const search *s, size_t tile)
{
    const size_t left = s->query->n - tile * TILE;
    return left < TILE ? (uint32_t)left : TILE;
}

static size_t tile_bytes(const search *s)
{
    return (size_t)TILE * 4 * s->index->book.levels.n_quads;
}

/* Integers of largest magnitude 127; returns their step. */
static float round_query(const search *s, float *y, uint8_t *codes)
{
    const uint32_t n = s->index->code_dim;
    const float largest = kvant_float_from_bits(s->kernels->magnitude(y, n));
    const kvant_uniform_step step = { .inverse = 127 / largest, .low = -127, .high = 127, .offset = -128 };
    if (largest < 0x1p-100f) { /* beside 1, which some number of a query that is not zero is near */
        memset(codes, 128, n);
        return 0;
    }
    s->kernels->uniform_codes(y, n, &step, codes);
    return largest / 127;
}

static void store_query(const search *s, size_t i, const uint8_t *codes)
{
    const uint32_t n = tile_size(s, i / TILE), dim = s->index->code_dim;
    uint8_t *x = (uint8_t *)s->x + i / TILE * tile_bytes(s) + i % TILE * 4;
    int32_t sum = 0;
    for (uint32_t j = 0; j < dim; j++)
        sum += codes[j] - 128;
    for (uint32_t quad = 0; quad < dim / 4; quad++) {
        uint32_t word;
        memcpy(&word, codes + 4 * (size_t)quad, sizeof word);
        word ^= 0x80808080u; /* bytes with a sign */
        memcpy(x + (size_t)quad * n * 4, &word, sizeof word);
    }
    for (uint32_t j = dim / 4 * 4; j < dim; j++)
        x[(size_t)(j / 4) * n * 4 + j % 4] = codes[j] ^ 0x80u;
    s->sums[i] = sum;
}

static void prepare_query(search *s, size_t i, uint32_t worker)
{
    const kvant_index *index = s->index;
    const float *q = s->query->rows + i * s->query->stride;
    float *scratch = s->scratch + worker * kvant_index_scratch(index);
    if (kvant_index_check_rows(index, q, 0, 1) != KVANT_OK) {
        atomic_store(&s->refused, true);
        return;
    }
    const kvant_index_row row = kvant_index_transform(index, s->kernels, q, true, KVANT_NO_LIST, scratch,
                                                      s->centred ? s->centred + i * index->dim : NULL);
    const bool offsets = kvant_index_has_offsets(index) || index->n_lists,
               distance = index->metric == KVANT_METRIC_L2;
    uint8_t *codes = (uint8_t *)(row.y + index->code_dim); /* behind y, where the transform is done */
    const float step = ldexpf(round_query(s, row.y, codes), row.exponent);
    store_query(s, i, codes);
    s->scales[i] = offsets ? step : 1;
    s->weights[i] = row.weight;
    s->steps[i] = distance ? -2 : offsets ? 1 : step;
    s->constants[i] = distance ? row.squared : 0;
}

/* Queries of a tile share lines of the processor's caches, which threads had better not. */
static void prepare_tile(void *context, size_t tile, uint32_t worker)
{
    search *s = context;
    for (uint32_t i = 0; i < tile_size(s, tile); i++)
        prepare_query(s, tile * TILE + i, worker);
}

/* ---- Packs ---- */

static void take(const search *s, kvant_top *top, size_t pack, uint32_t mask, const float *keys)
{
    for (; mask; mask &= mask - 1) {
        const uint32_t v = kvant_lowest_bit(mask);
        const size_t slot = pack * KVANT_PACK_VECTORS + v;
        if (keys[v] >= kvant_top_threshold(top))
            kvant_top_add(top, (kvant_found){ keys[v], (uint32_t)slot, kvant_index_id(s->index, slot) });
    }
}

/* Slots of a pack that are in use and pass the filters. */
static uint32_t wanted_slots(const search *s, size_t pack)
{
    const size_t left = s->index->n - pack * KVANT_PACK_VECTORS;
    const uint32_t used = left < 32 ? (1u << left) - 1 : UINT32_MAX;
    return s->passes ? s->passes[pack] & used : used;
}

/* What a thread needs beside the search. */
typedef struct room {
    int32_t *dots;
    float *keys;
    uint8_t *levels;
    int8_t *gathered;
} room;

static size_t level_bytes(const search *s)
{
    const kvant_book *book = &s->index->book;
    return (kvant_pack_bytes(&book->levels) + kvant_book_scratch(book, s->index->code_dim) + 63) / 64 * 64;
}

static room room_of(const search *s, uint32_t worker)
{
    const size_t numbers = (size_t)TILE * KVANT_PACK_VECTORS;
    return (room){ s->dots + worker * numbers, s->keys + worker * numbers,
                   s->levels ? s->levels + worker * level_bytes(s) : NULL,
                   s->gathered ? s->gathered + worker * s->group * tile_bytes(s) : NULL };
}

/* The pack as products read it. */
static const uint8_t *open_pack(const search *s, size_t pack, const room *r)
{
    const kvant_book *book = &s->index->book;
    const uint8_t *codes = s->index->codes + pack * kvant_book_pack_bytes(book);
    if (!r->levels)
        return codes;
    kvant_book_decode(book, s->kernels, codes, r->levels, r->levels + kvant_pack_bytes(&book->levels));
    return r->levels;
}

static void scan_pack(const search *s, size_t tile, size_t pack, const uint8_t *codes, uint32_t wanted,
                      kvant_top *tops, float *thresholds, const room *r)
{
    const kvant_index *index = s->index;
    const size_t first = tile * TILE, slot = pack * KVANT_PACK_VECTORS;
    const uint32_t n = tile_size(s, tile);
    const kvant_pack_queries queries = { s->x + tile * tile_bytes(s), s->sums + first, n };
    uint32_t masks[TILE];
    s->kernels->pack_dots(&index->book.levels, codes, &queries, r->dots);
    s->kernels->pack_keys(r->dots, index->factors + slot, index->offsets ? index->offsets + slot : NULL,
                          s->scales + first, s->weights + first, thresholds, n, r->keys, masks);
    for (uint32_t i = 0; i < n; i++)
        if (masks[i] & wanted) {
            take(s, &tops[i], pack, masks[i] & wanted, r->keys + (size_t)i * KVANT_PACK_VECTORS);
            thresholds[i] = kvant_top_threshold(&tops[i]);
        }
}

/* The tiles of a group, and its queries; their candidates are those of a range. */
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
            g->tops[g->n++] = (kvant_top){ s->found + ((tile * TILE + i) * s->n_ranges + range) * s->k, 0, s->k };
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
    const size_t first = s->n_packs * range / s->n_ranges, end = s->n_packs * (range + 1) / s->n_ranges;
    const room r = room_of(s, worker);
    float thresholds[GROUP * TILE];
    group g;
    open_group(s, unit, &g);
    for (uint32_t i = 0; i < g.n; i++)
        thresholds[i] = -INFINITY;
    for (size_t pack = first; pack < end; pack++) {
        const uint32_t wanted = wanted_slots(s, pack);
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
    kvant_found found[KVANT_INDEX_MAX_PROBE];
    uint32_t chosen[KVANT_INDEX_MAX_PROBE], *probed = s->probed + tile * n_lists;
    (void)worker;
    for (uint32_t i = 0; i < tile_size(s, tile); i++) {
        const float *v = s->centred + (tile * TILE + i) * s->index->dim;
        kvant_lists_choose(s->index, s->kernels, v, s->n_probe, found, chosen);
        for (uint32_t j = 0; j < s->n_probe; j++)
            probed[chosen[j]] |= 1u << i;
    }
}

/* Queries of a group that look into a list, and what belongs to them. */
typedef struct visitors {
    uint32_t n, query[TILE]; /* in the group */
    int32_t sums[TILE];
    float scales[TILE], weights[TILE], constants[TILE], thresholds[TILE];
} visitors;

/* A threshold for keys without the list's part: lower by more than roundings, since the sum decides. */
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
    v->constants[v->n++] =
        s->kernels->dot(s->centred + at * s->index->dim, kvant_index_centroid(s->index, list), s->index->dim);
}

/* As a tile. */
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

/* The queries that look into a list, 32 at a time; returns how many of these there are. */
static uint32_t gather(const search *s, const group *g, uint32_t list, int8_t *gathered, visitors *sets)
{
    uint32_t n = 0;
    sets[0].n = 0;
    for (size_t tile = g->first; tile < g->end; tile++)
        for (uint32_t mask = s->probed[tile * s->index->n_lists + list]; mask; mask &= mask - 1) {
            if (sets[n].n == TILE)
                sets[++n].n = 0;
            add_visitor(s, g, list, (uint32_t)(tile - g->first) * TILE + kvant_lowest_bit(mask), &sets[n]);
        }
    for (uint32_t i = 0; i <= n; i++)
        copy_visitors(s, g, &sets[i], gathered + i * tile_bytes(s));
    return n + 1;
}

static void scan_list_pack(const search *s, size_t pack, const uint8_t *codes, uint32_t wanted, const int8_t *x,
                           visitors *v, kvant_top *tops, const room *r)
{
    const kvant_index *index = s->index;
    const size_t slot = pack * KVANT_PACK_VECTORS;
    const kvant_pack_queries queries = { x, v->sums, v->n };
    uint32_t masks[TILE];
    for (uint32_t j = 0; j < v->n; j++)
        v->thresholds[j] = lowered(kvant_top_threshold(&tops[v->query[j]]), v->constants[j]);
    s->kernels->pack_dots(&index->book.levels, codes, &queries, r->dots);
    s->kernels->pack_keys(r->dots, index->factors + slot, index->offsets ? index->offsets + slot : NULL, v->scales,
                          v->weights, v->thresholds, v->n, r->keys, masks);
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
        const uint32_t used = left < 32 ? (1u << left) - 1 : UINT32_MAX;
        const uint32_t wanted = s->passes ? s->passes[pack] & used : used;
        const uint8_t *codes = wanted ? open_pack(s, pack, r) : NULL;
        for (uint32_t set = 0; wanted && set < n; set++)
            scan_list_pack(s, pack, codes, wanted, r->gathered + set * tile_bytes(s), &sets[set], g->tops, r);
    }
}

/* A range has every n_ranges-th of the lists that a query of the group looks into. */
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

/* ---- Results ---- */

/* sum a[i] b[i], or sum (a[i] - b[i])^2. Partial sums: compilers make vectors of them. */
static double exact_sum(const float *a, const float *b, uint32_t n, bool differences)
{
    double s[8] = { 0 };
    for (uint32_t i = 0; i < n; i += 8)
        for (uint32_t j = 0; j < 8 && i + j < n; j++) {
            const double x = a[i + j], y = b[i + j], d = x - y;
            s[j] += differences ? d * d : x * y;
        }
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static float exact_score(const search *s, const float *q, const float *x)
{
    const uint32_t dim = s->index->dim;
    const double sum = exact_sum(q, x, dim, s->index->metric == KVANT_METRIC_L2);
    if (s->index->metric != KVANT_METRIC_COSINE)
        return (float)sum;
    const double qq = exact_sum(q, q, dim, false), xx = exact_sum(x, x, dim, false);
    return (float)(qq > 0 && xx > 0 ? sum / (sqrt(qq) * sqrt(xx)) : 0);
}

static float score_of(const search *s, size_t i, const kvant_found *found)
{
    const float score = found->key * s->steps[i] + s->constants[i];
    return s->index->metric == KVANT_METRIC_L2 && score < 0 ? 0 : score;
}

static const float *original_of(const kvant_index_query *query, uint64_t id)
{
    if (query->original)
        return query->original(query->original_context, id);
    return id < query->n_originals ? query->originals + (size_t)id * query->original_stride : NULL;
}

static bool uses_rows(const kvant_index *index, const kvant_index_query *query)
{
    return index->has_rows && !query->original && !query->originals;
}

/* Of a stored row; query: its y is that of rows. */
static float row_score(const search *s, const kvant_index_row *query, size_t slot)
{
    const kvant_index *index = s->index;
    const bool distance = index->metric == KVANT_METRIC_L2;
    float key = s->kernels->dot_codes(query->y, index->rows + slot * index->dim, index->dim, index->row_book.values, 8);
    key = ldexpf(key * index->row_factors[slot], query->exponent);
    if (index->offsets)
        key += index->offsets[slot] * query->weight;
    const float score = distance ? query->squared - 2 * key : key;
    return distance && score < 0 ? 0 : score;
}

/* Exact scores, or with rows=int8 nearly exact ones. */
static void rank_again(const search *s, size_t i, uint32_t worker, kvant_top *top)
{
    const kvant_index *index = s->index;
    const kvant_index_query *query = s->query;
    const float *q = query->rows + i * query->stride;
    const bool distance = index->metric == KVANT_METRIC_L2, rows = uses_rows(index, query);
    kvant_index_row row = { .y = NULL };
    if (rows)
        row = kvant_index_transform_row(index, s->kernels, q, true,
                                        s->scratch + worker * kvant_index_scratch(index));
    for (uint32_t j = 0; j < top->n; j++) {
        const float *x = rows ? NULL : original_of(query, top->found[j].id);
        const float score = rows ? row_score(s, &row, top->found[j].slot)
                            : x  ? exact_score(s, q, x)
                                 : score_of(s, i, &top->found[j]);
        top->found[j].key = distance ? -score : score;
    }
    for (uint32_t j = top->n / 2; j-- > 0;)
        kvant_top_sink(top->found, top->n, j, top->found[j]);
    kvant_top_sort(top);
}

typedef struct results {
    const search *search;
    float *scores;
    uint64_t *ids;
} results;

static void finish_query(void *context, size_t i, uint32_t worker)
{
    const results *r = context;
    const search *s = r->search;
    const bool distance = s->index->metric == KVANT_METRIC_L2, again = s->query->rerank > 0;
    kvant_found *first = s->found + i * s->n_ranges * s->k;
    kvant_top top = { first, s->n_found[i * s->n_ranges], s->k };
    for (size_t range = 1; range < s->n_ranges; range++)
        for (uint32_t j = 0; j < s->n_found[i * s->n_ranges + range]; j++)
            kvant_top_add(&top, first[range * s->k + j]);
    if (again)
        rank_again(s, i, worker, &top);
    else
        kvant_top_sort(&top);
    for (uint32_t j = 0; j < s->query->k; j++) {
        const bool there = j < top.n;
        r->ids[i * s->query->k + j] = there ? top.found[j].id : KVANT_INDEX_NO_ID;
        r->scores[i * s->query->k + j] = !there  ? distance ? INFINITY : -INFINITY
                                         : again ? distance ? -top.found[j].key : top.found[j].key
                                                 : score_of(s, i, &top.found[j]);
    }
}

/* ---- The call ---- */

/* Threads that are worth waking for work on so many numbers: 0.1 ms of work for each. */
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
    s->n_probe = s->n_probe > KVANT_INDEX_MAX_PROBE ? KVANT_INDEX_MAX_PROBE : s->n_probe;
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
    const size_t n = s->query->n;
    size_t per_query, all;
    if (!kvant_mul_size(s->n_ranges, s->k ? s->k : 1, &per_query) || !kvant_mul_size(per_query, n, &all) ||
        !kvant_mul_size(tile_bytes(s), s->n_tiles, &per_query))
        return false;
    s->x = kvant_alloc(per_query, 1);
    s->sums = kvant_alloc(n, sizeof *s->sums);
    s->scales = kvant_alloc(n, sizeof *s->scales);
    s->weights = kvant_alloc(n, sizeof *s->weights);
    s->steps = kvant_alloc(n, sizeof *s->steps);
    s->constants = kvant_alloc(n, sizeof *s->constants);
    s->found = kvant_alloc(all, sizeof *s->found);
    s->n_found = kvant_alloc(n * s->n_ranges, sizeof *s->n_found);
    s->scratch = kvant_alloc(s->n_threads * kvant_index_scratch(s->index), sizeof *s->scratch);
    if (s->index->n_lists) {
        s->centred = kvant_alloc(n, s->index->dim * sizeof *s->centred);
        s->probed = kvant_alloc(s->n_tiles, s->index->n_lists * sizeof *s->probed);
        s->gathered = kvant_alloc((size_t)s->n_threads * s->group, tile_bytes(s));
        if (!s->centred || !s->probed || !s->gathered)
            return false;
    }
    if (kvant_book_is_decoded(&s->index->book)) {
        s->levels = kvant_alloc(s->n_threads, level_bytes(s));
        if (!s->levels)
            return false;
    }
    s->dots = kvant_alloc((size_t)s->n_threads * TILE * KVANT_PACK_VECTORS, sizeof *s->dots);
    s->keys = kvant_alloc((size_t)s->n_threads * TILE * KVANT_PACK_VECTORS, sizeof *s->keys);
    return s->x && s->sums && s->scales && s->weights && s->steps && s->constants && s->found && s->n_found &&
           s->scratch && s->dots && s->keys;
}

static void release(search *s)
{
    kvant_free(s->passes);
    kvant_free(s->x);
    kvant_free(s->sums);
    kvant_free(s->scales);
    kvant_free(s->weights);
    kvant_free(s->steps);
    kvant_free(s->constants);
    kvant_free(s->found);
    kvant_free(s->n_found);
    kvant_free(s->scratch);
    kvant_free(s->centred);
    kvant_free(s->probed);
    kvant_free(s->gathered);
    kvant_free(s->levels);
    kvant_free(s->dots);
    kvant_free(s->keys);
}

static kvant_status check_query(const kvant_index *index, const kvant_index_query *given, kvant_index_query *query)
{
    if (!KVANT_TAKE(kvant_index_query, query, given, n_probe))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "the query is NULL, or its size field is wrong");
    if (query->k < 1 || (query->n && !query->rows) || (query->n > 1 && query->stride < index->dim) ||
        (query->n_originals > 1 && query->original_stride < index->dim) || (query->n_allowed && !query->allowed))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "k is 0, rows or allowed are missing, or a stride is below %u", (unsigned)index->dim);
    if (query->rerank && !query->original && !query->originals && !index->has_rows)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "rerank needs originals, or an index with rows=int8");
    return KVANT_OK;
}

/* The worst first: a heap, as tops are before finish_query. */
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
    const kvant_cuda_find_args args = { s->x, s->sums, s->scales, s->weights, query->n, s->k, s->passes, found, n_found };
    kvant_status status = found && n_found ? kvant_cuda_index_find(s->gpu, &args) : KVANT_ERR_MEMORY;
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

kvant_status kvant_index_search(const kvant_index *index, const kvant_index_query *query, float *scores,
                                uint64_t *ids)
{
    return kvant_index_search_on(NULL, index, query, scores, ids);
}

kvant_status kvant_index_search_on(kvant_cuda_index *gpu, const kvant_index *index, const kvant_index_query *query,
                                   float *scores, uint64_t *ids)
{
    kvant_index_query q;
    KVANT_RETURN_IF(!index || !scores || !ids, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_query(index, query, &q));
    if (q.n == 0)
        return KVANT_OK;
    search s = { .index = index, .query = &q, .kernels = kvant_kernels_get(KVANT_CPU_AUTO), .gpu = gpu };
    results r = { &s, scores, ids };
    plan(&s);
    if (gpu && s.k > KVANT_CUDA_INDEX_MOST_K)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "on a GPU k and rerank are at most %u, not %u",
                          KVANT_CUDA_INDEX_MOST_K, (unsigned)s.k);
    kvant_status status = kvant_index_filter(index, &q, &s.passes);
    if (status == KVANT_OK && !allocate(&s))
        status = KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        kvant_parallel_for(s.n_tiles, threads_for(&s, (double)q.n * index->dim), prepare_tile, &s);
        status = atomic_load(&s.refused) ? kvant_index_check_rows(index, q.rows, q.stride, q.n) : find(&s);
    }
    if (status == KVANT_OK)
        kvant_parallel_for(q.n, threads_for(&s, (double)q.n * s.k * (q.rerank ? index->dim : 16)), finish_query, &r);
    release(&s);
    return status;
}
