/* device_cpu.c - a cache in the computer's memory. */
#include <stdlib.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "device.h"
#include "tensor.h"

typedef struct cpu_memory {
    void **pages;              /* per tensor: the address that calloc returned */
    kvant_step_pages steps[2]; /* shared by the keys of all layers; by the values */
    void *step_pages[2];
    void *workspace;
    size_t workspace_bytes;
} cpu_memory;

/* Memory that the system zeroes page by page at the first access. */
static void *lazy_memory(size_t bytes, void **allocated)
{
    *allocated = bytes <= SIZE_MAX - KVANT_PAGE_ALIGN ? calloc(1, bytes + KVANT_PAGE_ALIGN) : NULL;
    uintptr_t at = (uintptr_t)*allocated;
    return *allocated ? (void *)((at + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN)
                      : NULL;
}

static kvant_status create_tensor(kvant_cache *cache, uint32_t layer, kvant_role role)
{
    cpu_memory *memory = cache->memory;
    kvant_tensor_params params;
    size_t bytes;
    KVANT_FORWARD(kvant_layers_params(cache, layer, role, &params));
    params.steps = memory->steps[role].bytes ? &memory->steps[role] : NULL;
    KVANT_FORWARD(kvant_tensor_size(&params, &bytes));
    void *pages = lazy_memory(bytes, &memory->pages[2 * layer + (uint32_t)role]);
    if (!pages)
        return kvant_fail(NULL, KVANT_ERR_MEMORY,
                          "cache: out of memory for the %zu bytes of layer %u", bytes,
                          (unsigned)layer);
    return kvant_tensor_create(&params, pages, kvant_cache_tensor(cache, layer, role));
}

/* Makes step pages for as many rows as are written together, because callers append to a layer and
 * attend to it before they go on to the next layer. */
static kvant_status create_steps(kvant_cache *cache)
{
    cpu_memory *memory = cache->memory;
    const kvant_cache_params *p = &cache->params;
    const size_t all = (size_t)cache->n_blocks * KVANT_PAGE_TOKENS,
                 rows = all < KVANT_CACHE_BATCH ? all : KVANT_CACHE_BATCH;
    for (int role = 0; role < 2 && cache->exact.step; role++) {
        const size_t width = (size_t)p->n_kv_heads * (role ? p->v_head_dim : p->head_dim),
                     bytes = rows * width * sizeof(uint16_t);
        void *pages = lazy_memory(bytes, &memory->step_pages[role]);
        if (!pages)
            return kvant_fail(NULL, KVANT_ERR_MEMORY,
                              "cache: out of memory for %zu bytes of rows of a step", bytes);
        memory->steps[role] = (kvant_step_pages){ sizeof memory->steps[role], pages, bytes, NULL };
    }
    return KVANT_OK;
}

static kvant_status create(kvant_cache *cache)
{
    cpu_memory *memory = cache->memory = kvant_alloc(1, sizeof *memory);
    if (memory)
        memory->pages = kvant_alloc(2 * (size_t)cache->params.n_layers, sizeof *memory->pages);
    if (!memory || !memory->pages)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its layers");
    cache->exact.size = sizeof cache->exact;
    KVANT_FORWARD(kvant_scheme_exact(cache->scheme, cache->params.max_tokens,
                                     cache->params.max_sequences, &cache->exact));
    KVANT_FORWARD(create_steps(cache));
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++)
        KVANT_FORWARD(create_tensor(cache, i / 2, (kvant_role)(i % 2)));
    return KVANT_OK;
}

static void destroy(kvant_cache *cache)
{
    cpu_memory *memory = cache->memory;
    for (uint32_t i = 0; memory && memory->pages && i < 2 * cache->params.n_layers; i++)
        free(memory->pages[i]);
    if (memory) {
        free(memory->step_pages[0]);
        free(memory->step_pages[1]);
        kvant_free(memory->pages);
        kvant_free(memory->workspace);
    }
    kvant_free(memory);
}

static kvant_status append(kvant_cache *cache, uint32_t layer, const float *k, const float *v,
                           uint32_t n)
{
    const kvant_cache_params *p = &cache->params;
    return kvant_tensor_write_layer(*kvant_cache_tensor(cache, layer, KVANT_ROLE_K),
                                    *kvant_cache_tensor(cache, layer, KVANT_ROLE_V), cache->slots,
                                    n, k, (size_t)p->n_kv_heads * p->head_dim, v,
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
               : kvant_fail(NULL, KVANT_ERR_MEMORY,
                            "cache: out of memory for the %zu bytes of the workspace of attention",
                            bytes);
}

static kvant_status note_queries(kvant_cache *cache, uint32_t layer, const kvant_queries *queries)
{
    return kvant_tensor_note_queries(*kvant_cache_tensor(cache, layer, KVANT_ROLE_K), queries,
                                     cache->params.n_threads);
}

static kvant_status attend_one(kvant_cache *cache, uint32_t layer,
                               const kvant_attention_problem *problem)
{
    cpu_memory *memory = cache->memory;
    kvant_tensor *const *tensors = kvant_cache_tensor(cache, layer, KVANT_ROLE_K);
    size_t bytes;
    KVANT_FORWARD(
        kvant_attention_workspace(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], problem, &bytes));
    KVANT_FORWARD(grow_workspace(memory, bytes));
    return kvant_attention(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], problem, memory->workspace,
                           memory->workspace_bytes);
}

static kvant_status attend(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                           uint32_t n_sequences, const kvant_attention_problem *problem)
{
    kvant_attention_problem p = *problem;
    for (uint32_t i = 0; i < n_sequences; i++) {
        const kvant_sequence *s = &cache->sequences[sequences[i]];
        p.n_tokens = s->lengths[layer];
        p.block_table = s->table;
        KVANT_FORWARD(attend_one(cache, layer, &p));
        p.q += p.n_queries * p.q_token_stride;
        p.out += p.n_queries * p.out_token_stride;
    }
    return KVANT_OK;
}

static kvant_status read_run(const kvant_tensor *tensor, int32_t block, uint32_t offset, uint32_t n,
                             float *rows)
{
    const size_t width = kvant_tensor_width(tensor);
    if (block != KVANT_NO_BLOCK)
        return kvant_tensor_read(tensor, (size_t)block * KVANT_PAGE_TOKENS + offset, n, rows,
                                 width);
    memset(rows, 0, n * width * sizeof *rows);
    return KVANT_OK;
}

static kvant_status read_rows(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                              uint32_t first, uint32_t n, float *k, float *v)
{
    const kvant_tensor *keys = *kvant_cache_tensor(cache, layer, KVANT_ROLE_K),
                       *values = *kvant_cache_tensor(cache, layer, KVANT_ROLE_V);
    for (uint32_t done = 0, here; done < n; done += here) {
        const uint32_t offset = (first + done) % KVANT_PAGE_TOKENS;
        const int32_t block = cache->sequences[sequence].table[(first + done) / KVANT_PAGE_TOKENS];
        here = n - done < KVANT_PAGE_TOKENS - offset ? n - done : KVANT_PAGE_TOKENS - offset;
        KVANT_FORWARD(read_run(keys, block, offset, here, k + done * kvant_tensor_width(keys)));
        KVANT_FORWARD(read_run(values, block, offset, here, v + done * kvant_tensor_width(values)));
    }
    return KVANT_OK;
}

const kvant_device kvant_device_cpu = { .create = create,
                                        .destroy = destroy,
                                        .append = append,
                                        .attend = attend,
                                        .read = read_rows,
                                        .note_queries = note_queries };
