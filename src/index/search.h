/* search.h - shared by the parts of a search: search.c plans it and scans packs, search_queries.c
 * prepares queries, search_rank.c makes results from candidates. */
#pragma once

#include <stdatomic.h>

#include "../base/alloc.h"
#include "index_internal.h"

#define TILE 32u /* queries that are multiplied together; 12 KB at 384 dimensions */

typedef struct search {
    const kvant_index *index;
    const kvant_index_query *query;
    const kvant_kernels *kernels;
    kvant_cuda_index *gpu;          /* NULL: the CPU searches */
    uint32_t k, n_threads, n_probe; /* k: candidates per query */
    uint32_t group;                 /* tiles per group: GROUP with lists or decoded packs, else 1 */
    size_t n_tiles, n_groups, n_ranges, n_packs;
    uint32_t *passes;
    int8_t *x;          /* tile t is at x + t * TILE * 4 n_quads, interleaved */
    int32_t *sums;      /* per query, like the next four */
    float *scales;      /* of keys: the query's step with offsets, otherwise 1 */
    float *weights;     /* of offsets */
    float *steps;       /* factors from keys to scores */
    float *constants;   /* added to scores */
    kvant_found *found; /* [query][range][k] */
    uint32_t *n_found;  /* [query][range] */
    float *scratch;     /* per thread */
    float *centred;     /* with lists: queries without the centre */
    uint32_t *probed;   /* [tile][list]: a bit per query that searches the list */
    /* Per thread, n_probe: candidates while lists are chosen. NULL: every list is searched. */
    kvant_found *nearest;
    uint32_t *chosen;    /* per thread, n_probe: the chosen lists */
    int8_t *gathered;    /* per thread: the queries of a list, by tiles of the group */
    uint8_t *levels;     /* per thread: a decoded pack, and scratch */
    int32_t *dots;       /* per thread, TILE x 32 */
    float *keys;         /* per thread, TILE x 32 */
    kvant_arrays arrays; /* all of these but passes */
    atomic_bool refused; /* a query is not finite, or too long */
} search;

typedef struct kvant_search_results {
    const search *search;
    float *scores;
    uint64_t *ids;
} kvant_search_results;

static inline uint32_t tile_size(const search *s, size_t tile)
{
    const size_t left = s->query->n - tile * TILE;
    return left < TILE ? (uint32_t)left : TILE;
}

static inline size_t tile_bytes(const search *s)
{
    return (size_t)TILE * 4 * s->index->book.levels.n_quads;
}

/* Work items of kvant_parallel_for: the queries of a tile; the result of query i. The contexts are
 * a search and a kvant_search_results. */
void kvant_search_prepare_tile(void *context, size_t tile, uint32_t worker);
void kvant_search_finish_query(void *context, size_t i, uint32_t worker);
