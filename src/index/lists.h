/* lists.h - inverted lists (lists=): vectors by their nearest centroid, each list in packs of its own.
 *
 * A vector is coded by its difference from the centroid, v = centroid + u, so <q, v> = <q, centroid> +
 * <q, u>. All packs of a list but the last are full. A flat index has no lists. */
#pragma once

#include "index_internal.h"

#define KVANT_MAX_LISTS 65536u

struct kvant_list {
    uint32_t *packs; /* their numbers */
    size_t room;
    size_t n; /* vectors */
};

static inline size_t kvant_list_packs(const kvant_list *list)
{
    return (list->n + KVANT_PACK_VECTORS - 1) / KVANT_PACK_VECTORS;
}

static inline const float *kvant_index_centroid(const kvant_index *index, uint32_t list)
{
    return index->centroids + (size_t)list * index->dim;
}

/* Centroids that were made with the centre `from` (NULL: without) are for the index's now. */
void kvant_lists_move(float *centroids, const kvant_index *index, const float *from);

/* Takes n_lists x dim centroids from kvant_alloc, which become the index's. KVANT_ERR_MEMORY: they
 * stay the caller's. */
kvant_status kvant_lists_set(kvant_index *index, const float *centroids);
void kvant_lists_destroy(kvant_index *index);

/* A list's packs from numbers of a file: n vectors in ceil(n / 32) packs. */
kvant_status kvant_lists_enter(kvant_index *index, uint32_t list, const uint32_t *packs, size_t n);

/* kvant_index_add, behind its checks. */
kvant_status kvant_lists_add(kvant_index *index, const float *rows, size_t stride, size_t n,
                             const uint64_t *ids, uint32_t n_threads);

/* Takes the slot's vector out; its id must be out of the table already. */
void kvant_lists_remove(kvant_index *index, size_t slot);

/* chosen[0 .. n_probe - 1] = the lists whose centroids are nearest to a centred query. */
void kvant_lists_choose(const kvant_index *index, const kvant_kernels *kernels, const float *v,
                        uint32_t n_probe, kvant_found *found, uint32_t *chosen);
