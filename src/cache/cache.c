/* cache.c - kvant_cache: creation, appending rows, attention. */
#include "cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "cache: %s", what);
}

/* Creation */

static uint32_t processors(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 256 ? 256 : (uint32_t)n;
}

static kvant_status resolve(kvant_cache_params *p)
{
    if (!p->n_layers || !p->n_heads || !p->n_kv_heads || !p->head_dim || !p->max_tokens)
        return invalid("n_layers, n_heads, n_kv_heads, head_dim and max_tokens must be set");
    if (p->n_heads % p->n_kv_heads)
        return invalid("n_heads is not a multiple of n_kv_heads");
    if (p->max_tokens > INT32_MAX - KVANT_PAGE_TOKENS)
        return invalid("max_tokens is too large");
    if (p->device && strcmp(p->device, "cpu") != 0)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "cache: there is no device '%s' here; a cache can be on cpu (kvant/cuda.h has the calls for GPUs)",
                          p->device);
    p->v_head_dim = p->v_head_dim ? p->v_head_dim : p->head_dim;
    p->max_sequences = p->max_sequences ? p->max_sequences : 1;
    p->n_threads = p->n_threads ? p->n_threads : processors();
    p->scale = p->scale > 0 ? p->scale : 1 / sqrtf((float)p->head_dim);
    return KVANT_OK;
}

static kvant_status open_scheme(kvant_cache *cache)
{
    const kvant_cache_params *p = &cache->params;
    kvant_scheme_params params = { .size = sizeof params,
                                   .preset = p->preset,
                                   .k = p->k,
                                   .v = p->v,
                                   .settings = p->settings,
                                   .calibration = p->calibration };
    if (p->scheme && (p->preset || p->k || p->v || p->settings || p->calibration))
        return invalid("a scheme says what the cache is stored with: give it or what one is made of");
    if (!p->scheme)
        KVANT_FORWARD(kvant_scheme_create(&params, &cache->own_scheme));
    cache->scheme = p->scheme ? p->scheme : cache->own_scheme;
    return KVANT_OK;
}

/* Memory that the system zeroes when it is touched. */
static void *lazy_memory(size_t bytes, void **allocated)
{
    *allocated = bytes <= SIZE_MAX - KVANT_PAGE_ALIGN ? calloc(1, bytes + KVANT_PAGE_ALIGN) : NULL;
    uintptr_t at = (uintptr_t)*allocated;
    return *allocated ? (void *)((at + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN) : NULL;
}

static kvant_status create_tensor(kvant_cache *cache, uint32_t layer, kvant_role role)
{
    const kvant_cache_params *p = &cache->params;
    kvant_scheme_place place = { .size = sizeof place,
                                 .role = role,
                                 .layer = layer,
                                 .n_layers = p->n_layers,
                                 .n_kv_heads = p->n_kv_heads,
                                 .head_dim = role == KVANT_ROLE_K ? p->head_dim : p->v_head_dim };
    kvant_tensor_params params = { .size = sizeof params,
                                   .n_kv_heads = p->n_kv_heads,
                                   .n_sequences = p->max_sequences,
                                   .n_blocks = cache->n_blocks };
    size_t bytes;
    KVANT_FORWARD(kvant_scheme_codecs(cache->scheme, &place, &params.codecs));
    KVANT_FORWARD(kvant_tensor_size(&params, &bytes));
    void *memory = lazy_memory(bytes, &cache->layers[layer].memory[role]);
    if (!memory)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no %zu bytes for layer %u", bytes, (unsigned)layer);
    return kvant_tensor_create(&params, memory, &cache->layers[layer].tensors[role]);
}

static kvant_status fill(kvant_cache *cache)
{
    KVANT_FORWARD(open_scheme(cache));
    cache->layers = kvant_alloc(cache->params.n_layers, sizeof *cache->layers);
    cache->slots = kvant_alloc(KVANT_CACHE_BATCH, sizeof *cache->slots);
    if (!cache->layers || !cache->slots || kvant_sequences_create(cache) != KVANT_OK)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its tables");
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        for (int role = 0; role < 2; role++)
            KVANT_FORWARD(create_tensor(cache, layer, (kvant_role)role));
    return KVANT_OK;
}

kvant_status kvant_cache_create(const kvant_cache_params *params, kvant_cache **out)
{
    KVANT_RETURN_IF(!out, KVANT_ERR_ARGUMENT);
    *out = NULL;
    kvant_cache *cache = kvant_alloc(1, sizeof *cache);
    if (!cache)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "no memory for a cache");
    kvant_status status = KVANT_TAKE(kvant_cache_params, &cache->params, params, logit_softcap)
                              ? resolve(&cache->params)
                              : invalid("params is missing or its size field is not set: begin with KVANT_CACHE_PARAMS");
    if (status == KVANT_OK) {
        /* Every sequence may end in a block of its own. */
        cache->n_blocks = (cache->params.max_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS +
                          (cache->params.max_sequences - 1);
        status = fill(cache);
    }
    if (status != KVANT_OK)
        kvant_cache_free(&cache);
    *out = cache;
    return status;
}

void kvant_cache_free(kvant_cache **cache)
{
    if (!cache || !*cache)
        return;
    for (uint32_t layer = 0; (*cache)->layers && layer < (*cache)->params.n_layers; layer++)
        for (int role = 0; role < 2; role++) {
            kvant_tensor_free(&(*cache)->layers[layer].tensors[role]);
            free((*cache)->layers[layer].memory[role]);
        }
    kvant_sequences_destroy(*cache);
    kvant_free((*cache)->layers);
    kvant_free((*cache)->slots);
    kvant_free((*cache)->workspace);
    kvant_scheme_free(&(*cache)->own_scheme);
    kvant_free(*cache);
    *cache = NULL;
}

/* Rows */

static kvant_status write_rows(kvant_cache *cache, uint32_t layer, const kvant_sequence *s, const float *k,
                               const float *v, uint32_t n)
{
    const kvant_cache_params *p = &cache->params;
    size_t k_width = (size_t)p->n_kv_heads * p->head_dim, v_width = (size_t)p->n_kv_heads * p->v_head_dim;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t token = s->lengths[layer] + i;
        cache->slots[i] = (int64_t)s->table[token / KVANT_PAGE_TOKENS] * KVANT_PAGE_TOKENS + token % KVANT_PAGE_TOKENS;
    }
    KVANT_FORWARD(kvant_tensor_write(cache->layers[layer].tensors[KVANT_ROLE_K], cache->slots, n, k, k_width,
                                     p->n_threads));
    return kvant_tensor_write(cache->layers[layer].tensors[KVANT_ROLE_V], cache->slots, n, v, v_width, p->n_threads);
}

static kvant_status say_refused(kvant_status status, uint32_t layer)
{
    if (status == KVANT_ERR_NONFINITE || status == KVANT_ERR_RANGE)
        return kvant_fail(NULL, status, "layer %u: %s", (unsigned)layer, kvant_strerror(status));
    return status;
}

kvant_status kvant_cache_append(kvant_cache *cache, uint32_t layer, int32_t sequence, const float *k, const float *v,
                                uint32_t n)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    if (layer >= cache->params.n_layers || !k || !v)
        return invalid("no such layer, or k or v is missing");
    if (!n)
        return KVANT_OK;
    const uint32_t before = s->lengths[layer];
    size_t k_width = (size_t)cache->params.n_kv_heads * cache->params.head_dim,
           v_width = (size_t)cache->params.n_kv_heads * cache->params.v_head_dim;
    KVANT_FORWARD(kvant_sequence_reserve(cache, sequence, before, n));
    for (uint32_t done = 0; done < n;) {
        uint32_t count = n - done < KVANT_CACHE_BATCH ? n - done : KVANT_CACHE_BATCH;
        kvant_status status = write_rows(cache, layer, s, k + done * k_width, v + done * v_width, count);
        if (status != KVANT_OK) {
            s->lengths[layer] = before;
            return say_refused(status, layer);
        }
        s->lengths[layer] += count;
        done += count;
    }
    return KVANT_OK;
}

/* Attention */

static kvant_status grow_workspace(kvant_cache *cache, size_t bytes)
{
    if (bytes <= cache->workspace_bytes)
        return KVANT_OK;
    kvant_free(cache->workspace);
    cache->workspace = kvant_alloc(bytes, 1);
    cache->workspace_bytes = cache->workspace ? bytes : 0;
    return cache->workspace ? KVANT_OK
                            : kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no %zu bytes of workspace for attention", bytes);
}

kvant_status kvant_cache_attention(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                   const kvant_attention_problem *problem)
{
    const kvant_sequence *s = kvant_sequence_of(cache, sequence);
    kvant_attention_problem p;
    size_t bytes;
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    if (layer >= cache->params.n_layers || !KVANT_TAKE(kvant_attention_problem, &p, problem, exact))
        return invalid("no such layer, or the problem is missing or its size field is not set");
    p.n_tokens = s->lengths[layer];
    p.block_table = s->table;
    p.first_block = 0;
    p.n_threads = cache->params.n_threads;
    p.n_heads = p.n_heads ? p.n_heads : cache->params.n_heads;
    p.scale = p.scale > 0 ? p.scale : cache->params.scale;
    p.logit_softcap = p.logit_softcap > 0 ? p.logit_softcap : cache->params.logit_softcap;
    kvant_tensor *const *tensors = cache->layers[layer].tensors;
    KVANT_FORWARD(kvant_attention_workspace(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], &p, &bytes));
    KVANT_FORWARD(grow_workspace(cache, bytes));
    return kvant_attention(tensors[KVANT_ROLE_K], tensors[KVANT_ROLE_V], &p, cache->workspace,
                           cache->workspace_bytes);
}

kvant_status kvant_cache_attend(kvant_cache *cache, uint32_t layer, int32_t sequence, const float *q, float *out,
                                uint32_t n)
{
    KVANT_RETURN_IF(!cache, KVANT_ERR_ARGUMENT);
    const kvant_cache_params *p = &cache->params;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = n,
                                              .q = q,
                                              .q_token_stride = (size_t)p->n_heads * p->head_dim,
                                              .q_head_stride = p->head_dim,
                                              .out = out,
                                              .out_token_stride = (size_t)p->n_heads * p->v_head_dim,
                                              .out_head_stride = p->v_head_dim,
                                              .causal = true };
    return kvant_cache_attention(cache, layer, sequence, &problem);
}

/* What it says of itself */

size_t kvant_cache_bytes(const kvant_cache *cache)
{
    kvant_cache_info info = { .size = sizeof info };
    return kvant_cache_get_info(cache, &info) == KVANT_OK ? info.bytes : 0;
}

static void add_tensor(const kvant_cache *cache, const kvant_tensor *tensor, kvant_cache_info *info, double *numbers)
{
    kvant_tensor_info t = { .size = sizeof t };
    kvant_tensor_get_info(tensor, &t);
    size_t per_block = (size_t)KVANT_PAGE_TOKENS * t.n_kv_heads * t.head_dim;
    for (uint32_t block = 0; block < cache->n_blocks; block++) {
        kvant_block_info b = { .size = sizeof b };
        kvant_tensor_get_block(tensor, block, 0, &b);
        if (b.state != KVANT_BLOCK_EMPTY)
            info->bytes += b.state == KVANT_BLOCK_SEALED ? t.sealed_bytes : t.open_bytes;
    }
    info->f16_bytes += t.written_blocks * per_block * 2;
    info->true_bits += 8.0 * (double)t.sealed_bytes;
    *numbers += (double)per_block;
}

kvant_status kvant_cache_get_info(const kvant_cache *cache, kvant_cache_info *info)
{
    KVANT_RETURN_IF(!cache, KVANT_ERR_ARGUMENT);
    kvant_scheme_info scheme = { .size = sizeof scheme };
    KVANT_FORWARD(kvant_scheme_get_info(cache->scheme, &scheme));
    kvant_cache_info full = { .n_blocks = cache->n_blocks,
                              .n_free_blocks = cache->n_free,
                              .calibrated = scheme.calibration != NULL,
                              .k = scheme.k,
                              .v = scheme.v };
    double numbers = 0;
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++)
        add_tensor(cache, cache->layers[i / 2].tensors[i % 2], &full, &numbers);
    full.true_bits /= numbers;
    return KVANT_GIVE(kvant_cache_info, info, &full, v) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
