/* attention_kvant.c - a kvant_cache on the CPU as a subject of `kvant bench attention`.
 *
 * The layers that a run goes around are sequences of one cache: each has memory of its own. */
#include "attention_bench.h"

#include "command.h"

#include <kvant/cache.h>
#include <stdlib.h>

typedef struct kvant_state {
    kvant_cpu_level level;
    const char *k;
    kvant_scheme *scheme;
    kvant_cache *cache;
    kvant_attention_problem problem;
    float *out;
    void *block; /* an exported one */
} kvant_state;

static bool worked(const kvant_state *s, kvant_status status)
{
    if (status != KVANT_OK)
        complain("%s: %s", s->k, kvant_error_message());
    return status == KVANT_OK;
}

/* Encoding a long cache would take longer than measuring it, so the distinct blocks are encoded once and copied. Blocks that
 * repeat are from the middle: those at both ends may hold rows of a window, which are not compressed. */
static uint32_t source_of(uint32_t block, uint32_t n_distinct)
{
    return block < n_distinct ? block : n_distinct / 4 + block % (n_distinct / 2);
}

static bool copy_block(kvant_state *s, uint32_t block, int32_t sequence)
{
    size_t used;
    return worked(s, kvant_sequence_export(s->cache, 0, block, s->block, kvant_cache_export_size(s->cache), &used)) &&
           worked(s, kvant_sequence_import(s->cache, sequence, s->block, used));
}

static bool fill_sequence(kvant_state *s, const attention_inputs *in, int32_t sequence)
{
    const uint32_t n_blocks = in->shape.n_tokens / KVANT_PAGE_TOKENS, rest = in->shape.n_tokens % KVANT_PAGE_TOKENS;
    const uint32_t most = in->n_rows / KVANT_PAGE_TOKENS, n_distinct = n_blocks < most ? n_blocks : most;
    uint32_t block = 0;
    if (sequence == 0) {
        block = n_distinct;
        if (!worked(s, kvant_cache_append(s->cache, 0, 0, in->k, in->v, n_distinct * KVANT_PAGE_TOKENS)))
            return false;
    }
    for (; block < n_blocks; block++)
        if (!copy_block(s, source_of(block, n_distinct), sequence))
            return false;
    return worked(s, kvant_cache_append(s->cache, 0, sequence, in->k, in->v, rest));
}

/* Bytes of keys and values, but for windows that are not compressed. */
static double sealed_bytes(kvant_state *s, const attention_shape *shape)
{
    const kvant_scheme_model model = { .size = sizeof model,
                                       .n_layers = 1,
                                       .n_kv_heads = shape->n_kv_heads,
                                       .head_dim = { shape->head_dim, shape->head_dim } };
    double bits;
    if (!worked(s, kvant_scheme_true_bits(s->scheme, &model, &bits)))
        return 0;
    return bits / 8 * 2 * shape->n_kv_heads * shape->head_dim * shape->n_tokens;
}

static bool make_cache(kvant_state *s, const attention_inputs *in, const char *v, uint32_t *n_layers)
{
    const attention_shape *shape = &in->shape;
    const kvant_scheme_params scheme = { .size = sizeof scheme, .k = s->k, .v = v };
    if (!worked(s, kvant_scheme_create(&scheme, &s->scheme)))
        return false;
    const double bytes = sealed_bytes(s, shape);
    if (bytes == 0)
        return false;
    *n_layers = attention_layers(shape, bytes);
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.scheme = s->scheme;
    params.n_layers = 1;
    params.n_heads = shape->n_heads;
    params.n_kv_heads = shape->n_kv_heads;
    params.head_dim = shape->head_dim;
    params.max_sequences = *n_layers;
    params.max_tokens = *n_layers * shape->n_tokens;
    params.n_threads = shape->n_threads;
    return worked(s, kvant_cache_create(&params, &s->cache));
}

static bool fill_cache(kvant_state *s, const attention_inputs *in, uint32_t n_layers)
{
    const size_t numbers = (size_t)in->shape.n_queries * in->shape.n_heads * in->shape.head_dim;
    s->block = malloc(kvant_cache_export_size(s->cache));
    s->out = malloc(numbers * sizeof *s->out);
    for (uint32_t layer = 0; layer < n_layers && s->block != NULL && s->out != NULL; layer++)
        if (!fill_sequence(s, in, kvant_sequence_create(s->cache)))
            return false;
    if (s->block == NULL || s->out == NULL)
        complain("out of memory");
    return s->block != NULL && s->out != NULL;
}

static void make_problem(kvant_state *s, const attention_inputs *in)
{
    const size_t width = (size_t)in->shape.n_heads * in->shape.head_dim;
    s->problem = (kvant_attention_problem){ .size = sizeof s->problem,
                                            .n_queries = in->shape.n_queries,
                                            .q = in->q,
                                            .q_token_stride = width,
                                            .q_head_stride = in->shape.head_dim,
                                            .mask = in->mask,
                                            .mask_token_stride = in->shape.n_tokens,
                                            .out = s->out,
                                            .out_token_stride = width,
                                            .out_head_stride = in->shape.head_dim };
}

static bool run(attention_subject *subject, double *seconds)
{
    kvant_state *s = subject->state;
    const double start = monotonic_seconds();
    kvant_set_cpu_level(s->level);
    for (uint32_t layer = 0; layer < subject->n_layers; layer++)
        if (!worked(s, kvant_cache_attention(s->cache, 0, (int32_t)layer, &s->problem)))
            return false;
    *seconds = (monotonic_seconds() - start) / subject->n_layers;
    return true;
}

static bool check(attention_subject *subject)
{
    const kvant_state *s = subject->state;
    return attention_is_finite(s->out, s->problem.n_queries * s->problem.q_token_stride);
}

static void release(void *state)
{
    kvant_state *s = state;
    kvant_cache_free(&s->cache);
    kvant_scheme_free(&s->scheme);
    free(s->block);
    free(s->out);
    free(s);
}

bool attention_kvant(attention_subject *subject, const attention_inputs *in, const char *k, const char *v,
                     kvant_cpu_level level)
{
    kvant_state *s = calloc(1, sizeof *s);
    *subject = (attention_subject){ .state = s, .run = run, .check = check, .free = release };
    if (s == NULL)
        return complain("out of memory");
    s->level = level;
    s->k = k;
    if (!make_cache(s, in, v, &subject->n_layers) || !fill_cache(s, in, subject->n_layers))
        return false;
    subject->bytes = (double)kvant_cache_bytes(s->cache) / subject->n_layers;
    make_problem(s, in);
    return true;
}
