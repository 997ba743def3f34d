/* lists.h - inverted lists (lists=). Each vector is in the list of its nearest centroid, and each
 * list has its own packs.
 *
 * A vector is coded by its difference u from the centroid, so v = centroid + u and <q, v> = <q,
 * centroid> + <q, u>. All packs of a list except the last are full. A flat index has no lists. */
#pragma once

#include "index_internal.h"

#define KVANT_MAX_LISTS 65536u /* with 2^32 vectors a list then has 65536 of them */

struct kvant_list {
    uint32_t *packs; /* pack numbers */
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

/* Changes centroids from the centre `from` (NULL: without a centre) to the index's centre. */
void kvant_lists_move(float *centroids, const kvant_index *index, const float *from);

/* Gives the index n_lists x dim centroids from kvant_alloc, which it then owns. KVANT_ERR_MEMORY:
 * the caller still owns them. */
kvant_status kvant_lists_set(kvant_index *index, const float *centroids);
void kvant_lists_destroy(kvant_index *index);

/* Makes a list from the pack numbers of a file: n vectors in ceil(n / 32) packs. */
kvant_status kvant_lists_enter(kvant_index *index, uint32_t list, const uint32_t *packs, size_t n);

/* kvant_index_add, after its checks. */
kvant_status kvant_lists_add(kvant_index *index, const float *rows, size_t stride, size_t n,
                             const uint64_t *ids, uint32_t n_threads);

/* Removes the vector of a slot. Its id must have been erased from the table before. */
void kvant_lists_remove(kvant_index *index, size_t slot);

/* chosen[0 .. n_probe - 1] = the lists whose centroids are nearest to a query without the
 * centre. */
void kvant_lists_choose(const kvant_index *index, const kvant_kernels *kernels, const float *v,
                        uint32_t n_probe, kvant_found *found, uint32_t *chosen);
