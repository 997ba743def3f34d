/* device_cpu.c - a cache in the computer's memory: a tensor per layer and role. */
#include <stdlib.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "device.h"

/* Keys and values of a layer. */
typedef struct cpu_layer {
    kvant_tensor *tensors[2]; /* by kvant_role */
    void *memory[2];          /* as it was allocated */
} cpu_layer;

typedef struct cpu_memory {
    cpu_layer *layers;
    void *workspace;
    size_t workspace_bytes;
} cpu_memory;

static kvant_tensor *tensor_of(const kvant_cache *cache, uint32_t layer, kvant_role role)
{
    const cpu_memory *memory = cache->memory;
    return memory->layers[layer].tensors[role];
}

/* Memory that the system zeroes when it is touched. */
static void *lazy_memory(size_t bytes, void **allocated)
{
    *allocated = bytes <= SIZE_MAX - KVANT_PAGE_ALIGN ? calloc(1, bytes + KVANT_PAGE_ALIGN) : NULL;
    uintptr_t at = (uintptr_t)*allocated;
    return *allocated ? (void *)((at + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN) : NULL;
}

static kvant_status create_tensor(kvant_cache *cache, cpu_layer *layers, uint32_t layer, kvant_role role)
{
    kvant_tensor_params params = { .size = sizeof params,
                                   .n_kv_heads = cache->params.n_kv_heads,
                                   .n_sequences = cache->params.max_sequences,
                                   .n_blocks = cache->n_blocks };
    size_t bytes;
    KVANT_FORWARD(kvant_cache_codecs(cache, layer, role, &params.codecs));
    KVANT_FORWARD(kvant_tensor_size(&params, &bytes));
    void *memory = lazy_memory(bytes, &layers[layer].memory[role]);
    if (!memory)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no %zu bytes for layer %u", bytes, (unsigned)layer);
    return kvant_tensor_create(&params, memory, &layers[layer].tensors[role]);
}

static kvant_status create(kvant_cache *cache)
{
    cpu_memory *memory = cache->memory = kvant_alloc(1, sizeof *memory);
    if (memory)
        memory->layers = kvant_alloc(cache->params.n_layers, sizeof *memory->layers);
    if (!memory || !memory->layers)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its layers");
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++)
        KVANT_FORWARD(create_tensor(cache, memory->layers, i / 2, (kvant_role)(i % 2)));
    return KVANT_OK;
}

static void destroy(kvant_cache *cache)
{
    cpu_memory *memory = cache->memory;
    for (uint32_t i = 0; memory && memory->layers && i < 2 * cache->params.n_layers; i++) {
        kvant_tensor_free(&memory->layers[i / 2].tensors[i % 2]);
        free(memory->layers[i / 2].memory[i % 2]);
    }
    if (memory) {
        kvant_free(memory->layers);
        kvant_free(memory->workspace);
    }
    kvant_free(memory);
}

static kvant_status assign(kvant_cache *cache, uint32_t block, uint32_t sequence, uint32_t index)
{
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++)
        KVANT_FORWARD(kvant_tensor_assign(tensor_of(cache, i / 2, (kvant_role)(i % 2)), block, sequence, index));
    return KVANT_OK;
}

static kvant_status append(kvant_cache *cache, uint32_t layer, const float *k, const float *v, uint32_t n)
{
    const kvant_cache_params *p = &cache->params;
    KVANT_FORWARD(kvant_tensor_write(tensor_of(cache, layer, KVANT_ROLE_K), cache->slots, n, k,
                                     (size_t)p->n_kv_heads * p->head_dim, p->n_threads));
    return kvant_tensor_write(tensor_of(cache, layer, KVANT_ROLE_V), cache->slots, n, v,
                              (size_t)p->n_kv_heads * p->v_head_dim, p->n_threads);
}

static kvant_status grow_workspace(cpu_memory *memory, size_t bytes)
{
    if (bytes <= memory->workspace_bytes)
        return KVANT_OK;
    kvant_free(memory->workspace);
    memory->workspace = kvant_alloc(bytes, 1);
    memory->workspace_bytes = memory->workspace ? bytes : 0;
    return memory->workspace
               ? KVANT_OK
               : kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no %zu bytes of workspace for attention", bytes);
}

static kvant_status attend(kvant_cache *cache, uint32_t layer, const kvant_attention_problem *problem)
{
    cpu_memory *memory = cache->memory;
    kvant_tensor *const *tensors = memory->layers[layer].tensors;
    size_t bytes;
    KVANT_FORWARD(kvant_attention_workspace(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], problem, &bytes));
    KVANT_FORWARD(grow_workspace(memory, bytes));
    return kvant_attention(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], problem, memory->workspace,
                           memory->workspace_bytes);
}

static void clear(kvant_cache *cache, uint32_t block)
{
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++)
        kvant_tensor_clear_blocks(tensor_of(cache, i / 2, (kvant_role)(i % 2)), block, 1);
}

static kvant_status copy(kvant_cache *cache, uint32_t from, uint32_t to)
{
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        kvant_tensor *tensor = tensor_of(cache, i / 2, (kvant_role)(i % 2));
        KVANT_FORWARD(kvant_tensor_copy(tensor, from, tensor, to, 1));
    }
    return KVANT_OK;
}

static size_t export_size(const kvant_cache *cache, uint32_t layer, kvant_role role)
{
    return kvant_tensor_export_size(tensor_of(cache, layer, role));
}

static kvant_status export_block(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block,
                                 void *data, size_t bytes, size_t *used)
{
    return kvant_tensor_export(tensor_of(cache, layer, role), block, data, bytes, used);
}

static kvant_status import_block(kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block,
                                 const void *data, size_t bytes)
{
    return kvant_tensor_import(tensor_of(cache, layer, role), block, data, bytes);
}

static uint64_t written(const kvant_cache *cache, uint32_t layer, kvant_role role, uint32_t block)
{
    kvant_block_info info = { .size = sizeof info };
    kvant_tensor_get_block(tensor_of(cache, layer, role), block, 0, &info);
    return info.written;
}

static void get_info(const kvant_cache *cache, uint32_t layer, kvant_role role, kvant_device_info *info)
{
    const kvant_tensor *tensor = tensor_of(cache, layer, role);
    kvant_tensor_info t = { .size = sizeof t };
    kvant_tensor_get_info(tensor, &t);
    *info = (kvant_device_info){ .sealed_bytes = t.sealed_bytes, .written_blocks = t.written_blocks };
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        kvant_block_info b = { .size = sizeof b };
        kvant_tensor_get_block(tensor, block, 0, &b);
        if (b.state != KVANT_BLOCK_EMPTY)
            info->bytes += b.state == KVANT_BLOCK_SEALED ? t.sealed_bytes : t.open_bytes;
    }
}

const kvant_device kvant_device_cpu = { .create = create,
                                        .destroy = destroy,
                                        .assign = assign,
                                        .append = append,
                                        .attend = attend,
                                        .clear = clear,
                                        .copy = copy,
                                        .export_size = export_size,
                                        .export = export_block,
                                        .import = import_block,
                                        .written = written,
                                        .get_info = get_info };
