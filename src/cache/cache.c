/* cache.c - the cache of a model: life, appending rows, attention. */
#include "device.h"

#include <kvant/settings.h>
#include <math.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "tensor.h"

#define MOST_PARTS 4u /* parts of a long call from which queries are passed to learning */

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "cache: %s", what);
}

/* Creation */

static uint32_t default_threads(void)
{
    uint32_t n = kvant_available_cpus();
    return n < 256 ? n : 256;
}

/* Numbers of 0 stand for the default. Others would silently become the default, too, if they were
 * not refused. */
static kvant_status check_factors(float scale, float logit_softcap)
{
    return scale >= 0 && isfinite(scale) && logit_softcap >= 0 && isfinite(logit_softcap)
               ? KVANT_OK
               : invalid("scale or logit_softcap is negative or not finite; 0 is the default");
}

static kvant_status resolve(kvant_cache_params *p)
{
    if (!p->n_layers || !p->n_heads || !p->n_kv_heads || !p->head_dim || !p->max_tokens)
        return invalid("n_layers, n_heads, n_kv_heads, head_dim and max_tokens must be set");
    if (p->n_layers > KVANT_SETTINGS_MAX_LAYERS)
        return invalid("n_layers is above 4096");
    if (p->n_heads % p->n_kv_heads)
        return invalid("n_heads is not a multiple of n_kv_heads");
    if (p->max_tokens > INT32_MAX - KVANT_PAGE_TOKENS)
        return invalid("max_tokens is not below 2^31 - 64");
    if (p->max_sequences > INT32_MAX / KVANT_PAGE_TOKENS)
        return invalid("max_sequences is not below 2^25");
    KVANT_FORWARD(check_factors(p->scale, p->logit_softcap));
    p->v_head_dim = p->v_head_dim ? p->v_head_dim : p->head_dim;
    p->max_sequences = p->max_sequences ? p->max_sequences : 1;
    p->n_threads = p->n_threads ? p->n_threads : default_threads();
    p->scale = p->scale > 0 ? p->scale : 1 / sqrtf((float)p->head_dim);
    return KVANT_OK;
}

static kvant_status choose_device(kvant_cache *cache)
{
    const char *name = cache->params.device ? cache->params.device : "cpu";
    if (strcmp(name, "cpu") == 0)
        cache->device = &kvant_device_cpu;
    else if (strcmp(name, "cuda") == 0 || strcmp(name, "cuda:0") == 0)
        cache->device = &kvant_device_cuda;
    else
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "cache: there is no device '%s'; a cache can be on cpu, cuda or cuda:0",
                          name);
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
        return invalid("scheme is given, and so is preset, k, v, settings or calibration: give a "
                       "scheme or its parts");
    if (!p->scheme)
        KVANT_FORWARD(kvant_scheme_create(&params, &cache->own_scheme));
    cache->scheme = p->scheme ? p->scheme : cache->own_scheme;
    return KVANT_OK;
}

kvant_status kvant_cache_codecs(const kvant_cache *cache, uint32_t layer, kvant_role role,
                                const kvant_codec *const **codecs)
{
    const kvant_cache_params *p = &cache->params;
    kvant_scheme_location location = { .size = sizeof location,
                                       .role = role,
                                       .layer = cache->layers ? cache->layers[layer] : layer,
                                       .n_layers = cache->layers ? p->n_model_layers : p->n_layers,
                                       .n_kv_heads = p->n_kv_heads,
                                       .head_dim =
                                           role == KVANT_ROLE_K ? p->head_dim : p->v_head_dim };
    return kvant_scheme_codecs(cache->scheme, &location, codecs);
}

static kvant_status accept_layers(kvant_cache *cache)
{
    const kvant_cache_params *p = &cache->params;
    for (uint32_t i = 0; p->layers && i < p->n_layers; i++)
        if (p->layers[i] >= p->n_model_layers)
            return invalid("layers names a layer that is not below n_model_layers");
    if (!p->layers)
        return KVANT_OK;
    cache->layers = kvant_alloc(p->n_layers, sizeof *cache->layers);
    KVANT_RETURN_IF(!cache->layers,
                    kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its tables"));
    memcpy(cache->layers, p->layers, p->n_layers * sizeof *cache->layers);
    return KVANT_OK;
}

static kvant_status fill(kvant_cache *cache)
{
    KVANT_FORWARD(choose_device(cache));
    KVANT_FORWARD(open_scheme(cache));
    KVANT_FORWARD(accept_layers(cache));
    cache->slots = kvant_alloc(KVANT_CACHE_BATCH, sizeof *cache->slots);
    cache->tensors = kvant_alloc(2 * (size_t)cache->params.n_layers, sizeof *cache->tensors);
    cache->pending = kvant_alloc(cache->params.n_layers, sizeof *cache->pending);
    if (!cache->slots || !cache->tensors || !cache->pending ||
        kvant_sequences_create(cache) != KVANT_OK)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its tables");
    return cache->device->create(cache);
}

kvant_status kvant_cache_create(const kvant_cache_params *params, kvant_cache **out)
{
    KVANT_RETURN_IF(!out, KVANT_ERR_ARGUMENT);
    *out = NULL;
    kvant_cache *cache = kvant_alloc(1, sizeof *cache);
    if (!cache)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for a cache");
    kvant_status status =
        KVANT_ACCEPT_STRUCT(kvant_cache_params, &cache->params, params, logit_softcap)
            ? resolve(&cache->params)
            : invalid(
                  "params is NULL, or its size field is not set: begin with KVANT_CACHE_PARAMS");
    if (status == KVANT_OK) {
        /* Every sequence may need one more block, for its last tokens. */
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
    kvant_layers_destroy(*cache);
    if ((*cache)->device)
        (*cache)->device->destroy(*cache);
    kvant_sequences_destroy(*cache);
    kvant_free((*cache)->slots);
    kvant_free((*cache)->pending);
    kvant_free((*cache)->layers);
    kvant_scheme_free(&(*cache)->own_scheme);
    kvant_free(*cache);
    *cache = NULL;
}

/* Rows */

static kvant_status report_refused(kvant_status status, uint32_t layer)
{
    if (status == KVANT_ERR_NONFINITE || status == KVANT_ERR_RANGE)
        return kvant_fail(NULL, status, "layer %u: %s", (unsigned)layer, kvant_strerror(status));
    return status;
}

/* Finds the slot of the next row of a sequence. For the first of n rows it makes room for all of
 * them. */
static kvant_status place_row(kvant_cache *cache, uint32_t layer, int32_t sequence, uint32_t row,
                              uint32_t n, int64_t *slot)
{
    kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    if (row == 0)
        KVANT_FORWARD(kvant_sequence_extend(cache, sequence, layer, n));
    const uint32_t token = s->lengths[layer]++;
    *slot = (int64_t)s->table[token / KVANT_PAGE_TOKENS] * KVANT_PAGE_TOKENS +
            token % KVANT_PAGE_TOKENS;
    return KVANT_OK;
}

/* Takes back the rows of an append that failed: `placed` rows have slots, and the first `written`
 * of them are in the tensors. Also gives back the blocks that the append reserved, which other
 * sequences may need. */
static void take_back(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                      uint32_t n_sequences, uint32_t n, uint32_t placed, uint32_t written)
{
    for (uint32_t row = 0; row < placed; row++) {
        const int32_t sequence = sequences[row / n];
        cache->sequences[sequence].lengths[layer]--;
        for (uint32_t i = 0; i < 2 && row < written; i++)
            kvant_open_rewind(cache->tensors[2 * layer + i], (uint32_t)sequence, 1);
    }
    for (uint32_t i = 0; i <= placed / n && i < n_sequences; i++)
        kvant_sequence_trim(cache, sequences[i]);
}

kvant_status kvant_cache_append_batch(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                      uint32_t n_sequences, const float *k, const float *v,
                                      uint32_t n)
{
    if (!cache || layer >= cache->params.n_layers || !k || !v || !sequences ||
        (n && n_sequences > UINT32_MAX / n))
        return invalid("layer is not below n_layers, k, v or sequences is NULL, or there are 2^32 "
                       "rows or more");
    const uint32_t total = n_sequences * n;
    size_t k_width = (size_t)cache->params.n_kv_heads * cache->params.head_dim,
           v_width = (size_t)cache->params.n_kv_heads * cache->params.v_head_dim;
    kvant_status status = KVANT_OK;
    uint32_t placed = 0, written = 0;
    while (status == KVANT_OK && placed < total) {
        while (status == KVANT_OK && placed < total && placed - written < KVANT_CACHE_BATCH) {
            status = place_row(cache, layer, sequences[placed / n], placed % n, n,
                               &cache->slots[placed - written]);
            placed += status == KVANT_OK;
        }
        if (status == KVANT_OK)
            status = cache->device->append(cache, layer, k + written * k_width,
                                           v + written * v_width, placed - written);
        written = status == KVANT_OK ? placed : written;
    }
    if (status == KVANT_OK)
        cache->pending[layer] =
            cache->pending[layer] == KVANT_PENDING_NEXT ? KVANT_PENDING_NEWEST : KVANT_PENDING_NONE;
    else
        take_back(cache, layer, sequences, n_sequences, n, placed, written);
    return report_refused(status, layer);
}

kvant_status kvant_cache_append(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                const float *k, const float *v, uint32_t n)
{
    KVANT_RETURN_IF(!kvant_sequence_of(cache, sequence), KVANT_ERR_ARGUMENT);
    return kvant_cache_append_batch(cache, layer, &sequence, 1, k, v, n);
}

/* From a long call as many queries are used as from several calls of KVANT_CACHE_BATCH tokens. */
static uint32_t parts_of(uint32_t n_tokens)
{
    const uint32_t n = n_tokens / KVANT_CACHE_BATCH + (n_tokens % KVANT_CACHE_BATCH != 0);
    return n < MOST_PARTS ? n : MOST_PARTS;
}

kvant_status kvant_cache_note_queries(kvant_cache *cache, uint32_t layer,
                                      const kvant_queries *queries)
{
    kvant_queries all;
    if (!cache || layer >= cache->params.n_layers ||
        !KVANT_ACCEPT_STRUCT(kvant_queries, &all, queries, n_heads) || !all.q)
        return invalid("layer is not below n_layers, or queries or its q is NULL, or its size "
                       "field is not set to sizeof(kvant_queries)");
    cache->pending[layer] = KVANT_PENDING_NEXT;
    kvant_status status = KVANT_OK;
    const uint32_t parts = parts_of(all.n_tokens);
    for (uint32_t i = 0; i < parts && status == KVANT_OK; i++) {
        const size_t first = (size_t)i * all.n_tokens / parts;
        kvant_queries part = all;
        part.q += first * all.token_stride;
        part.positions += all.positions ? first : 0;
        part.n_tokens = (uint32_t)((i + 1) * (uint64_t)all.n_tokens / parts - first);
        status = cache->device->note_queries(cache, layer, &part);
    }
    return status;
}

kvant_status kvant_cache_set_rope(kvant_cache *cache, uint32_t layer, const kvant_rope *rope)
{
    kvant_rope r;
    if (!cache || layer >= cache->params.n_layers ||
        (rope && !KVANT_ACCEPT_STRUCT(kvant_rope, &r, rope, n_position_transforms)))
        return invalid("layer is not below n_layers, or the size field of rope is not set to "
                       "sizeof(kvant_rope)");
    if (rope && !r.n_positions)
        r.n_positions = cache->params.max_tokens;
    return kvant_tensor_set_rope(*kvant_cache_tensor(cache, layer, KVANT_ROLE_K), rope ? &r : NULL);
}

int kvant_cache_wants_queries(const kvant_cache *cache, uint32_t layer, size_t n_tokens)
{
    return cache && layer < cache->params.n_layers &&
           kvant_tensor_wants_queries(*kvant_cache_tensor(cache, layer, KVANT_ROLE_K), n_tokens);
}

kvant_status kvant_cache_read(const kvant_cache *cache, uint32_t layer, int32_t sequence,
                              uint32_t first, uint32_t n, float *k, float *v)
{
    const kvant_sequence *s = kvant_sequence_of(cache, sequence);
    KVANT_RETURN_IF(!s, KVANT_ERR_ARGUMENT);
    if (layer >= cache->params.n_layers || !k || !v || first > s->lengths[layer] ||
        n > s->lengths[layer] - first)
        return invalid("layer is not below n_layers, k or v is NULL, or the sequence has fewer "
                       "tokens in this layer");
    return cache->device->read(cache, layer, sequence, first, n, k, v);
}

/* Attention */

/* Passes the queries of attention to learning, for the rows that are appended next, unless the
 * caller passes queries. */
static kvant_status pass_attended_queries(kvant_cache *cache, uint32_t layer,
                                          const int32_t *sequences, uint32_t n_sequences,
                                          const kvant_attention_problem *p)
{
    const uint32_t n = n_sequences * p->n_queries;
    if (cache->pending[layer] != KVANT_PENDING_NONE || !kvant_cache_wants_queries(cache, layer, n))
        return KVANT_OK;
    int32_t *positions = kvant_alloc(n, sizeof *positions);
    const kvant_queries queries = { .size = sizeof queries,
                                    .q = p->q,
                                    .token_stride = p->q_token_stride,
                                    .head_stride = p->q_head_stride,
                                    .n_tokens = n,
                                    .n_heads = p->n_heads,
                                    .positions = positions };
    for (uint32_t i = 0; positions && i < n; i++)
        positions[i] = (int32_t)(cache->sequences[sequences[i / p->n_queries]].lengths[layer] -
                                 p->n_queries + i % p->n_queries);
    const kvant_status status =
        positions ? cache->device->note_queries(cache, layer, &queries) : KVANT_ERR_MEMORY;
    kvant_free(positions);
    return status;
}

static kvant_status attend(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                           uint32_t n_sequences, const kvant_attention_problem *problem)
{
    kvant_attention_problem p;
    if (layer >= cache->params.n_layers ||
        !KVANT_ACCEPT_STRUCT(kvant_attention_problem, &p, problem, exact))
        return invalid("layer is not below n_layers, or problem is NULL or its size field is not "
                       "set to sizeof(kvant_attention_problem)");
    KVANT_FORWARD(check_factors(p.scale, p.logit_softcap));
    p.first_block = 0;
    p.n_threads = cache->params.n_threads;
    p.n_heads = p.n_heads ? p.n_heads : cache->params.n_heads;
    p.scale = p.scale > 0 ? p.scale : cache->params.scale;
    p.logit_softcap = p.logit_softcap > 0 ? p.logit_softcap : cache->params.logit_softcap;
    KVANT_FORWARD(cache->device->attend(cache, layer, sequences, n_sequences, &p));
    return pass_attended_queries(cache, layer, sequences, n_sequences, &p);
}

kvant_status kvant_cache_attention(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                   const kvant_attention_problem *problem)
{
    KVANT_RETURN_IF(!kvant_sequence_of(cache, sequence), KVANT_ERR_ARGUMENT);
    return attend(cache, layer, &sequence, 1, problem);
}

kvant_status kvant_cache_attend_batch(kvant_cache *cache, uint32_t layer, const int32_t *sequences,
                                      uint32_t n_sequences, const float *q, float *out, uint32_t n)
{
    KVANT_RETURN_IF(!cache, KVANT_ERR_ARGUMENT);
    const kvant_cache_params *p = &cache->params;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = n,
                                              .q = q,
                                              .q_token_stride = (size_t)p->n_heads * p->head_dim,
                                              .q_head_stride = p->head_dim,
                                              .out = out,
                                              .out_token_stride =
                                                  (size_t)p->n_heads * p->v_head_dim,
                                              .out_head_stride = p->v_head_dim,
                                              .causal = true };
    for (uint32_t i = 0; i < n_sequences; i++)
        KVANT_RETURN_IF(!sequences || !kvant_sequence_of(cache, sequences[i]), KVANT_ERR_ARGUMENT);
    return n_sequences ? attend(cache, layer, sequences, n_sequences, &problem) : KVANT_OK;
}

kvant_status kvant_cache_attend(kvant_cache *cache, uint32_t layer, int32_t sequence,
                                const float *q, float *out, uint32_t n)
{
    return kvant_cache_attend_batch(cache, layer, &sequence, 1, q, out, n);
}

/* Steps */

static kvant_status no_steps(const kvant_cache *cache)
{
    return cache ? kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                              "cache: steps need a cache on cuda: on the CPU call "
                              "kvant_cache_append and kvant_cache_attend")
                 : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_steps_begin(kvant_cache *cache, const int32_t *sequences, uint32_t n,
                               kvant_steps_info *info)
{
    kvant_steps_info full = { .size = sizeof full };
    if (!cache || !cache->device->steps_begin)
        return no_steps(cache);
    for (uint32_t i = 0; i < n; i++)
        KVANT_RETURN_IF(!sequences || !kvant_sequence_of(cache, sequences[i]), KVANT_ERR_ARGUMENT);
    if (!n || !info || info->size < KVANT_END_OF(kvant_steps_info, floats))
        return invalid(
            "n is 0, or info is NULL or its size field is not set to sizeof(kvant_steps_info)");
    KVANT_FORWARD(cache->device->steps_begin(cache, sequences, n, &full));
    return KVANT_RETURN_STRUCT(kvant_steps_info, info, &full, floats) ? KVANT_OK
                                                                      : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_steps_next(kvant_cache *cache)
{
    return cache && cache->device->steps_next ? cache->device->steps_next(cache) : no_steps(cache);
}

kvant_status kvant_cache_step(kvant_cache *cache, uint32_t layer, const kvant_step *step)
{
    kvant_step s;
    if (!cache || !cache->device->step)
        return no_steps(cache);
    if (layer >= cache->params.n_layers || !KVANT_ACCEPT_STRUCT(kvant_step, &s, step, sinks) ||
        !s.q || !s.k || !s.v || !s.out)
        return invalid("layer is not below n_layers, or step or its q, k, v or out is NULL, or its "
                       "size field is not set");
    KVANT_FORWARD(check_factors(s.scale, s.logit_softcap));
    s.scale = s.scale > 0 ? s.scale : cache->params.scale;
    s.logit_softcap = s.logit_softcap > 0 ? s.logit_softcap : cache->params.logit_softcap;
    return cache->device->step(cache, layer, &s);
}

/* Information */

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
    kvant_layers_describe(cache, &full);
    return KVANT_RETURN_STRUCT(kvant_cache_info, info, &full, v) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
