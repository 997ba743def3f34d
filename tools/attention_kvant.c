/* attention_kvant.c - kvant_attention as a subject of `kvant bench attention`, and the inputs of all subjects. */
#include "attention_subject.h"

#include "command.h"
#include "rows.h"

#include <kvant/attention.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COLD_BYTES (32.0 * (1 << 20)) /* 16 times a level 2 cache of 2 MiB */
#define MAX_LAYERS 128u
#define PREFILL_LAYERS 2u /* many queries spend little of their time on reading */
#define HALF_MINUS_INF 0xfc00u

uint32_t attention_layers(const attention_shape *shape, double bytes)
{
    const double n = ceil(COLD_BYTES / bytes);
    if (shape->n_queries > 8)
        return PREFILL_LAYERS;
    return n > MAX_LAYERS ? MAX_LAYERS : n < 2 ? 2 : (uint32_t)n;
}

static void fill_mask(attention_problem *p)
{
    const attention_shape *s = &p->shape;
    for (uint32_t t = 0; t < s->n_queries; t++)
        for (uint32_t j = 0; j < s->n_tokens; j++)
            p->mask[(size_t)t * s->n_tokens + j] = j > s->n_tokens - s->n_queries + t ? HALF_MINUS_INF : 0;
}

bool attention_problem_create(attention_problem *p, const attention_shape *shape)
{
    *p = (attention_problem){ .shape = *shape };
    p->n_rows = shape->n_tokens < ATTENTION_DISTINCT_ROWS ? shape->n_tokens : ATTENTION_DISTINCT_ROWS;
    const size_t row = (size_t)shape->n_kv_heads * shape->head_dim;
    const size_t n_q = (size_t)shape->n_queries * attention_heads(shape) * shape->head_dim;
    p->k = malloc(p->n_rows * row * sizeof *p->k);
    p->v = malloc(p->n_rows * row * sizeof *p->v);
    p->q = malloc(n_q * sizeof *p->q);
    p->mask = malloc((size_t)shape->n_queries * shape->n_tokens * sizeof *p->mask);
    if (p->k == NULL || p->v == NULL || p->q == NULL || p->mask == NULL) {
        complain("out of memory");
        return false;
    }
    rows_fill(p->k, p->n_rows * row, 1);
    rows_fill(p->v, p->n_rows * row, 2);
    rows_fill(p->q, n_q, 3);
    fill_mask(p);
    return true;
}

void attention_problem_free(attention_problem *p)
{
    free(p->k);
    free(p->v);
    free(p->q);
    free(p->mask);
    *p = (attention_problem){ .k = NULL };
}

/* Keys or values of a layer. */
typedef struct cache {
    void *memory;
    kvant_tensor *tensor;
} cache;

typedef struct kvant_state {
    kvant_cpu_level level;
    const char *k, *v;
    kvant_codec *codecs[2];
    cache caches[MAX_LAYERS][2];
    kvant_attention_problem problem;
    void *workspace;
    size_t workspace_bytes;
    float *out;
} kvant_state;

static bool failed(const char *spec, kvant_status status)
{
    complain("%s: %s", spec, kvant_strerror(status));
    return false;
}

static uint32_t blocks_of(const attention_problem *p)
{
    return (p->shape.n_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
}

/* Pages of slots that were not written become copies of pages that were, as far as both are compressed: encoding a long cache
 * would take longer than measuring it. The memory is ours. */
static void repeat_pages(cache *c, const kvant_codec *codec, const attention_problem *p)
{
    kvant_codec_info info = { .size = sizeof info };
    kvant_codec_get_info(codec, &info);
    const uint32_t written = p->n_rows / KVANT_PAGE_TOKENS;
    const uint32_t n = blocks_of(p);
    for (uint32_t block = written; written > 0 && block < n; block++)
        for (uint32_t head = 0; head < p->shape.n_kv_heads; head++) {
            kvant_block_info from = { .size = sizeof from }, to = { .size = sizeof to };
            kvant_tensor_get_block(c->tensor, block % written, head, &from);
            kvant_tensor_get_block(c->tensor, block, head, &to);
            if (from.state == KVANT_BLOCK_SEALED)
                memcpy((void *)(uintptr_t)to.page, from.page, info.page_bytes);
        }
}

static bool write_rows(cache *c, const char *spec, const attention_problem *p, const float *rows)
{
    int64_t slots[ATTENTION_DISTINCT_ROWS];
    for (uint32_t i = 0; i < p->n_rows; i++)
        slots[i] = i;
    const kvant_status status = kvant_tensor_write(
        c->tensor, slots, p->n_rows, rows, (size_t)p->shape.n_kv_heads * p->shape.head_dim, p->shape.n_threads);
    return status == KVANT_OK || failed(spec, status);
}

/* The first layer is encoded, the others are copies. */
static bool make_cache(kvant_state *s, uint32_t layer, int role, const attention_problem *p, size_t *bytes)
{
    cache *c = &s->caches[layer][role];
    const char *spec = role == KVANT_ROLE_K ? s->k : s->v;
    const kvant_codec **codecs = malloc(p->shape.n_kv_heads * sizeof *codecs);
    for (uint32_t head = 0; codecs != NULL && head < p->shape.n_kv_heads; head++)
        codecs[head] = s->codecs[role];
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = codecs,
                                         .n_kv_heads = p->shape.n_kv_heads,
                                         .n_sequences = 1,
                                         .n_blocks = blocks_of(p) };
    kvant_status status = codecs != NULL ? kvant_tensor_size(&params, bytes) : KVANT_ERR_MEMORY;
    c->memory = status == KVANT_OK ? aligned_alloc(KVANT_PAGE_ALIGN, (*bytes + 4095) / 4096 * 4096) : NULL;
    if (c->memory != NULL) {
        memset(c->memory, 0, *bytes);
        status = kvant_tensor_create(&params, c->memory, &c->tensor);
    }
    free(codecs);
    if (status != KVANT_OK)
        return failed(spec, status);
    if (c->memory == NULL) {
        complain("out of memory");
        return false;
    }
    if (layer == 0) {
        if (!write_rows(c, spec, p, role == KVANT_ROLE_K ? p->k : p->v))
            return false;
        repeat_pages(c, s->codecs[role], p);
        return true;
    }
    status = kvant_tensor_copy(s->caches[0][role].tensor, 0, c->tensor, 0, blocks_of(p));
    if (status != KVANT_OK)
        return failed(spec, status);
    repeat_pages(c, s->codecs[role], p);
    return true;
}

static bool run(attention_subject *subject)
{
    kvant_state *s = subject->state;
    kvant_set_cpu_level(s->level);
    for (uint32_t layer = 0; layer < subject->n_layers; layer++) {
        const kvant_status status =
            kvant_attention(s->caches[layer][KVANT_ROLE_K].tensor, s->caches[layer][KVANT_ROLE_V].tensor, &s->problem,
                            s->workspace, s->workspace_bytes);
        if (status != KVANT_OK)
            return failed(s->k, status);
    }
    return true;
}

static const float *output(attention_subject *subject)
{
    const kvant_state *s = subject->state;
    return s->out;
}

static void release(attention_subject *subject)
{
    kvant_state *s = subject->state;
    for (uint32_t layer = 0; layer < MAX_LAYERS; layer++)
        for (int role = 0; role < 2; role++) {
            kvant_tensor_free(&s->caches[layer][role].tensor);
            free(s->caches[layer][role].memory);
        }
    kvant_codec_free(&s->codecs[0]);
    kvant_codec_free(&s->codecs[1]);
    free(s->workspace);
    free(s->out);
    free(s);
    subject->state = NULL;
}

static bool make_codecs(kvant_state *s, uint32_t head_dim)
{
    for (int role = 0; role < 2; role++) {
        char err[256] = "";
        const char *spec = role == KVANT_ROLE_K ? s->k : s->v;
        if (kvant_codec_create(spec, head_dim, (kvant_role)role, 0, &s->codecs[role], err, sizeof err) !=
            KVANT_OK) {
            complain("%s at head_dim %u: %s", spec, (unsigned)head_dim, err);
            hint("kvant codecs lists what there is; codecs that need a calibration cannot be measured here");
            return false;
        }
    }
    return true;
}

static bool make_call(kvant_state *s, const attention_problem *p)
{
    const attention_shape *shape = &p->shape;
    const size_t width = (size_t)attention_heads(shape) * shape->head_dim;
    s->out = malloc(shape->n_queries * width * sizeof *s->out);
    s->problem = (kvant_attention_problem){ .size = sizeof s->problem,
                                            .n_tokens = shape->n_tokens,
                                            .n_queries = shape->n_queries,
                                            .n_heads = attention_heads(shape),
                                            .q = p->q,
                                            .q_token_stride = width,
                                            .q_head_stride = shape->head_dim,
                                            .mask = p->mask,
                                            .mask_token_stride = shape->n_tokens,
                                            .scale = 1 / sqrtf((float)shape->head_dim),
                                            .out = s->out,
                                            .out_token_stride = width,
                                            .out_head_stride = shape->head_dim,
                                            .n_threads = shape->n_threads };
    const kvant_status status = kvant_attention_workspace(
        s->caches[0][KVANT_ROLE_K].tensor, s->caches[0][KVANT_ROLE_V].tensor, &s->problem, &s->workspace_bytes);
    if (status != KVANT_OK)
        return failed(s->k, status);
    s->workspace_bytes = (s->workspace_bytes + 63) / 64 * 64;
    s->workspace = s->workspace_bytes > 0 ? aligned_alloc(64, s->workspace_bytes) : NULL;
    if (s->out != NULL && s->workspace != NULL)
        return true;
    complain("out of memory");
    return false;
}

bool attention_kvant(attention_subject *subject, const attention_problem *p, const char *k, const char *v,
                     kvant_cpu_level level)
{
    kvant_state *s = calloc(1, sizeof *s);
    *subject = (attention_subject){ .state = s, .run = run, .output = output, .free = release };
    if (s == NULL) {
        complain("out of memory");
        subject->free = NULL;
        return false;
    }
    s->level = level;
    s->k = k;
    s->v = v;
    size_t bytes[2];
    if (!make_codecs(s, p->shape.head_dim) || !make_cache(s, 0, KVANT_ROLE_K, p, &bytes[0]) ||
        !make_cache(s, 0, KVANT_ROLE_V, p, &bytes[1]))
        return false;
    subject->bytes = (double)bytes[0] + (double)bytes[1];
    subject->n_layers = attention_layers(&p->shape, subject->bytes);
    for (uint32_t layer = 1; layer < subject->n_layers; layer++)
        for (int role = 0; role < 2; role++)
            if (!make_cache(s, layer, role, p, &bytes[role]))
                return false;
    return make_call(s, p);
}
