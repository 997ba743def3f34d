/* index.c - the index of the mock device (host.h): plain loops over the codes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../src/kernels/packs.h"
#include "internal.h"

struct kvant_cuda_index {
    kvant_cuda_index_args args; /* arrays of the index, which must not change */
    size_t pack_bytes;
    uint8_t *codes;
};

kvant_status host_index_create(const kvant_cuda_index_args *args, kvant_cuda_index **index)
{
    const size_t pack_bytes = (size_t)args->n_quads * 16 * args->bits;
    *index = malloc(sizeof **index);
    **index = (kvant_cuda_index){ *args, pack_bytes, calloc((args->n + 31) / 32 + 1, pack_bytes) };
    return KVANT_OK;
}

void host_index_free(kvant_cuda_index **index)
{
    free((*index)->codes);
    free(*index);
    *index = NULL;
}

kvant_status host_index_put(kvant_cuda_index *index, size_t first, size_t n, const uint8_t *codes)
{
    if (n)
        memcpy(index->codes + first * index->pack_bytes, codes, n * index->pack_bytes);
    return KVANT_OK;
}

static int32_t product(const kvant_cuda_index *index, size_t slot, const kvant_cuda_find_args *find,
                       size_t query)
{
    const uint32_t bits = index->args.bits, n_quads = index->args.n_quads,
                   in_tile =
                       query / 32 == (find->n - 1) / 32 ? (uint32_t)((find->n - 1) % 32 + 1) : 32;
    const int8_t *x = find->x + query / 32 * 128 * n_quads + query % 32 * 4;
    const uint8_t *pack = index->codes + slot / 32 * index->pack_bytes;
    int32_t sum = 0;
    for (uint32_t j = 0; j < 4 * n_quads; j++) {
        const uint32_t code = kvant_pack_get(bits, pack, j, slot % 32);
        sum += (bits == 8 ? (int32_t)code - 128 : index->args.levels[code]) *
               x[(size_t)(j / 4) * in_tile * 4 + j % 4];
    }
    return sum;
}

static float key_of(const kvant_cuda_index *index, size_t slot, const kvant_cuda_find_args *find,
                    size_t query)
{
    const float key = (float)product(index, slot, find, query) * index->args.factors[slot];
    return index->args.offsets
               ? key * find->scales[query] + index->args.offsets[slot] * find->weights[query]
               : key;
}

static uint64_t id_of(const kvant_cuda_index *index, uint32_t slot)
{
    return index->args.ids ? index->args.ids[slot] : slot;
}

static void insert(const kvant_cuda_index *index, kvant_cuda_found *found, uint32_t *n, uint32_t k,
                   kvant_cuda_found x)
{
    uint32_t at = *n;
    while (at > 0 &&
           (found[at - 1].key < x.key || (found[at - 1].key == x.key &&
                                          id_of(index, found[at - 1].slot) > id_of(index, x.slot))))
        at--;
    if (at == k)
        return;
    *n += *n < k;
    memmove(found + at + 1, found + at, (*n - 1 - at) * sizeof *found);
    found[at] = x;
}

kvant_status host_index_find(kvant_cuda_index *index, const kvant_cuda_find_args *args)
{
    for (size_t query = 0; query < args->n; query++) {
        args->n_found[query] = 0;
        for (size_t slot = 0; slot < index->args.n; slot++)
            if (!args->passes || args->passes[slot / 32] >> slot % 32 & 1)
                insert(index, args->found + query * args->k, &args->n_found[query], args->k,
                       (kvant_cuda_found){ key_of(index, slot, args, query), (uint32_t)slot });
    }
    return KVANT_OK;
}
