/* layers.c - operations on a block in all layers of a cache, which has one tensor per layer and
 * role, keys before values. Knows no device. */
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "device.h"
#include "tensor.h"

static uint32_t n_tensors(const kvant_cache *cache)
{
    return 2 * cache->params.n_layers;
}

kvant_status kvant_layers_params(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                 kvant_tensor_params *params)
{
    *params = (kvant_tensor_params){ .size = sizeof *params,
                                     .n_kv_heads = cache->params.n_kv_heads,
                                     .n_sequences = cache->params.max_sequences,
                                     .n_blocks = cache->n_blocks,
                                     .exact = cache->exact.size ? &cache->exact : NULL };
    return kvant_cache_codecs(cache, layer, role, &params->codecs);
}

kvant_status kvant_layers_assign(kvant_cache *cache, uint32_t block, uint32_t sequence,
                                 uint32_t index)
{
    for (uint32_t i = 0; i < n_tensors(cache); i++)
        KVANT_FORWARD(kvant_tensor_assign(cache->tensors[i], block, sequence, index));
    return KVANT_OK;
}

void kvant_layers_clear(kvant_cache *cache, uint32_t block)
{
    for (uint32_t i = 0; i < n_tensors(cache); i++)
        kvant_tensor_clear_blocks(cache->tensors[i], block, 1);
}

kvant_status kvant_layers_copy(kvant_cache *cache, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < n_tensors(cache); i++)
        KVANT_FORWARD(kvant_tensor_copy(cache->tensors[i], from, cache->tensors[i], to, 1));
    return KVANT_OK;
}

static size_t bytes_of(const kvant_tensor *tensor, const kvant_tensor_info *info)
{
    size_t bytes = 0;
    for (uint32_t block = 0; block < info->n_blocks; block++) {
        kvant_block_info b = { .size = sizeof b };
        kvant_tensor_get_block(tensor, block, 0, &b);
        if (b.state != KVANT_BLOCK_EMPTY)
            bytes += kvant_slots_as_open(tensor, block, 0) ? info->open_bytes : info->sealed_bytes;
    }
    return bytes;
}

void kvant_layers_describe(const kvant_cache *cache, kvant_cache_info *info)
{
    double numbers = 0;
    for (uint32_t i = 0; i < n_tensors(cache); i++) {
        kvant_tensor_info t = { .size = sizeof t };
        kvant_tensor_get_info(cache->tensors[i], &t);
        const size_t per_block = (size_t)KVANT_PAGE_TOKENS * t.n_kv_heads * t.head_dim;
        info->bytes += bytes_of(cache->tensors[i], &t) + t.learned_bytes;
        info->working_bytes += t.working_bytes;
        info->f16_bytes += t.written_blocks * per_block * sizeof(uint16_t);
        info->true_bits += 8.0 * (double)t.sealed_bytes;
        numbers += (double)per_block;
    }
    info->true_bits /= numbers;
}

void kvant_layers_destroy(kvant_cache *cache)
{
    for (uint32_t i = 0; cache->tensors && i < n_tensors(cache); i++)
        kvant_tensor_free(&cache->tensors[i]);
    kvant_free(cache->tensors);
}
