/* host_table.c - a library in the place of libkvant_cuda.so whose kernels are loops over the CPU's codecs. So the part of a
 * cache on a GPU that runs on the host (tensors with pages elsewhere, gathering, versions, merging) is tested against a cache on
 * the CPU without a GPU. It computes in double precision what kernels compute, and nothing that the tests compare comes from
 * the code under test. Pages of codebooks of more than 4 bits have no attention, as on the GPU. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../src/codec/encode.h"
#include "../../../src/cuda/table.h"

enum { TOKENS = 64, MOST = KVANT_MAX_HEAD_DIM };

/* Whose codes a codec's pages hold. Codecs themselves are those of libkvant_cuda (params.c), with its refusals. */
static struct {
    const kvant_cuda_codec *codec;
    const kvant_codec *source;
} known[256];

static const kvant_codec *source_of(const kvant_cuda_codec *codec)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].codec == codec)
            return known[i].source;
    abort();
}

static kvant_status know(kvant_status status, const kvant_cuda_codec *codec, const kvant_codec *source)
{
    size_t i = 0;
    while (known[i].codec)
        i++;
    if (status == KVANT_OK) {
        known[i].codec = codec;
        known[i].source = source;
    }
    return status;
}

static bool is_open(const kvant_cuda_codec *codec)
{
    return codec->params.codes == KVANT_CUDA_CODES_OPEN;
}

static kvant_status device_check(char *err, size_t errlen)
{
    (void)err, (void)errlen;
    return KVANT_OK;
}

static kvant_status codec_create(const kvant_codec_view *view, kvant_cuda_codec **codec, char *err, size_t errlen)
{
    const kvant_status status = kvant_cuda_table_codec_create(view, codec, err, errlen);
    return know(status, *codec, (const kvant_codec *)((const char *)view - offsetof(kvant_codec, view)));
}

static kvant_status codec_create_open(const kvant_cuda_codec *sealed, kvant_cuda_codec **open)
{
    const kvant_status status = kvant_cuda_table_codec_create_open(sealed, open);
    return know(status, *open, source_of(sealed));
}

static void codec_free(kvant_cuda_codec **codec)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].codec == *codec)
            known[i].codec = NULL;
    kvant_cuda_table_codec_free(codec);
}

static kvant_status codec_get_info(const kvant_cuda_codec *codec, kvant_codec_info *info)
{
    return kvant_cuda_table_codec_get_info(codec, info);
}

static uint8_t *page_of(const kvant_cuda_pages *pages, int64_t block, uint32_t head)
{
    return (uint8_t *)pages->base + (size_t)block * pages->block_stride + head * pages->head_stride;
}

static const kvant_kernels *kernels(void)
{
    return kvant_kernels_get(KVANT_CPU_AUTO);
}

/* The codec's transform with the weights of a kv head, or none. */
static kvant_transform transform_of(const kvant_cuda_codec *codec, const float *weights, uint32_t head)
{
    kvant_transform t = source_of(codec)->transform;
    const size_t d = t.head_dim, n = !t.weights ? 0 : t.diagonal ? d : d * d;
    t.weights = weights ? (float *)weights + head * n : NULL;
    return t;
}

static bool is_full(const kvant_cuda_codec *codec)
{
    return source_of(codec)->transform.weights && !source_of(codec)->transform.diagonal;
}

static void append_role(const kvant_cuda_append_args *args, const kvant_cuda_rows *rows)
{
    const kvant_codec *codec = rows->codec ? source_of(rows->codec) : NULL;
    for (uint32_t i = 0; codec && i < args->n_tokens; i++)
        for (uint32_t head = 0; args->slots[i] >= 0 && head < args->n_kv_heads; head++) {
            const size_t d = codec->info.head_dim;
            const kvant_transform t = transform_of(rows->codec, rows->weights, head);
            const kvant_affine affine = { rows->center ? rows->center + head * d : NULL,
                                          rows->scale ? rows->scale + head * d : NULL };
            float y[MOST];
            uint8_t *page = page_of(&rows->pages, args->slots[i] / TOKENS, head);
            kvant_transform_forward(&t, kernels(), &affine,
                                    (const float *)rows->rows + i * rows->token_stride + head * rows->head_stride, y);
            (is_open(rows->codec) ? kvant_codec_encode_open : kvant_codec_encode_transformed)(
                codec, kernels(), y, (uint32_t)(args->slots[i] % TOKENS), 1, page);
        }
}

static kvant_status append(const kvant_cuda_append_args *args, kvant_cuda_stream stream)
{
    (void)stream;
    append_role(args, &args->k);
    append_role(args, &args->v);
    return KVANT_OK;
}

static void seal_page(const kvant_codec *codec, const uint8_t *open, uint8_t *sealed, uint32_t n)
{
    static float rows[TOKENS * MOST];
    const uint32_t group = codec->info.block_tokens, d = codec->info.head_dim;
    for (uint32_t first = 0; first < n; first += group) {
        for (uint32_t i = 0; i < group; i++)
            kvant_codec_decode_open(codec, kernels(), open, first + i < n ? first + i : first, 1, rows + i * d);
        kvant_codec_encode_transformed(codec, kernels(), rows, first, group, sealed);
    }
}

static kvant_status seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    const kvant_cuda_seal_pages *roles[] = { &args->k, &args->v };
    (void)stream;
    for (int r = 0; r < 2; r++)
        for (uint32_t i = 0; roles[r]->codec && i < args->n_blocks; i++)
            for (uint32_t head = 0; head < args->n_kv_heads; head++)
                seal_page(source_of(roles[r]->codec), page_of(&roles[r]->open, args->from[i], head),
                          page_of(&roles[r]->sealed, args->to[i], head), args->tokens ? (uint32_t)args->tokens[i] : TOKENS);
    return KVANT_OK;
}

static kvant_status attention_check(const kvant_cuda_codec *k, const kvant_cuda_codec *v, char *err, size_t errlen)
{
    if (is_open(k) == is_open(v))
        return KVANT_OK;
    if (err && errlen)
        snprintf(err, errlen, "one codec of open pages beside one of sealed pages");
    return KVANT_ERR_ARGUMENT;
}

static size_t attention_workspace(uint32_t head_dim)
{
    return head_dim;
}

static void limit_shared_memory(size_t bytes)
{
    (void)bytes;
}

/* Transformed rows of a kv head; zeros where the table hides them. */
static void rows_of(const kvant_cuda_attention_args *a, bool keys, uint32_t head, float *rows)
{
    const kvant_cuda_codec *codec = keys ? a->k_codec : a->v_codec;
    const kvant_cuda_pages *sealed = keys ? &a->k : &a->v, *open = keys ? &a->k_open : &a->v_open;
    const uint32_t d = codec->params.head_dim;
    for (int32_t t = 0; t < a->lengths[0]; t++) {
        const int32_t entry = a->block_table[t / TOKENS];
        float *y = rows + (size_t)t * d;
        if (entry == KVANT_CUDA_NO_BLOCK)
            memset(y, 0, d * sizeof *y);
        else if (entry < 0)
            kvant_codec_decode_open(source_of(codec), kernels(), page_of(open, -1 - entry, head), t % TOKENS, 1, y);
        else
            kvant_codec_decode_transformed(source_of(codec), kernels(), page_of(sealed, entry, head), t % TOKENS, y);
    }
}

static double half(uint16_t bits)
{
    float x;
    kernels()->half_to_float(&bits, &x, 1);
    return x;
}

static double slope_of(const kvant_cuda_attention_args *a, uint32_t head)
{
    const uint32_t n = 1u << (31 - __builtin_clz(a->n_heads));
    const double steps = head < n ? (head + 1.0) / n : (2.0 * (head - n) + 1) / (2.0 * n);
    return a->max_bias > 0 ? exp2(-a->max_bias * steps) : 1;
}

static double bias_of(const kvant_cuda_attention_args *a, uint32_t head, uint32_t query, int32_t position, int32_t token)
{
    if ((a->causal && token > position) || (a->window && position - token >= (int32_t)a->window))
        return -INFINITY;
    if (a->mask)
        return slope_of(a, head) * half(a->mask[query * a->mask_token_stride + (uint32_t)token]);
    return a->max_bias > 0 ? slope_of(a, head) * (token - position) : 0;
}

static void query_of(const kvant_cuda_attention_args *a, uint32_t query, uint32_t head, uint32_t kv, float *q)
{
    const uint32_t d = a->k_codec->params.head_dim;
    const float *given = (const float *)a->q + query * a->q_token_stride + head * a->q_head_stride;
    const kvant_transform rotation = transform_of(a->k_codec, NULL, 0);
    float x[MOST];
    for (uint32_t j = 0; j < d; j++)
        x[j] = given[j] * (a->k_scale ? a->k_scale[kv * d + j] : 1);
    if (is_full(a->k_codec))
        memcpy(q, x, d * sizeof *q);
    else
        kvant_transform_forward(&rotation, kernels(), NULL, x, q);
}

static void attend_head(const kvant_cuda_attention_args *a, const float *keys, const float *values, uint32_t query,
                        uint32_t head)
{
    const uint32_t kv = head / (a->n_heads / a->n_kv_heads), d = a->k_codec->params.head_dim;
    const int32_t n = a->lengths[0], position = n - (int32_t)a->query_tokens + (int32_t)query;
    double total = 0, seen = 0, top = a->sinks ? a->sinks[head] : -INFINITY, sums[MOST] = { 0 };
    double *scores = malloc(((size_t)n + 1) * sizeof *scores);
    float q[MOST], y[MOST], x[MOST], *out = (float *)a->out + query * a->out_token_stride + head * a->out_head_stride;
    query_of(a, query, head, kv, q);
    for (int32_t t = 0; t < n; t++) {
        double sum = 0;
        const bool there = a->block_table[t / TOKENS] != KVANT_CUDA_NO_BLOCK;
        for (uint32_t j = 0; j < d; j++)
            sum += (double)q[j] * keys[(size_t)t * d + j];
        sum *= a->scale;
        sum = a->logit_softcap > 0 ? a->logit_softcap * tanh(sum / a->logit_softcap) : sum;
        scores[t] = there ? sum + bias_of(a, head, query, position, t) : -INFINITY;
        top = fmax(top, scores[t]);
    }
    for (int32_t t = 0; t < n; t++) {
        const double w = scores[t] > -INFINITY ? exp(scores[t] - top) : 0;
        for (uint32_t j = 0; w > 0 && j < d; j++)
            sums[j] += w * values[(size_t)t * d + j];
        seen += w;
    }
    total = seen + (a->sinks ? exp(a->sinks[head] - top) : 0);
    for (uint32_t j = 0; j < d; j++)
        y[j] = total > 0 ? (float)(sums[j] / total) : 0;
    const kvant_transform rotation = transform_of(a->v_codec, NULL, 0);
    kvant_transform_inverse(&rotation, kernels(), NULL, y, x);
    for (uint32_t j = 0; j < d; j++)
        out[j] = x[j] * (a->v_scale ? a->v_scale[kv * d + j] : 1) +
                 (a->v_center && total > 0 ? (float)(seen / total) * a->v_center[kv * d + j] : 0);
    if (a->lse)
        a->lse[query * a->n_heads + head] = total > 0 ? (float)(top + log(total)) : -INFINITY;
    free(scores);
}

static kvant_status attention(const kvant_cuda_attention_args *args, kvant_cuda_stream stream)
{
    const size_t rows = ((size_t)args->lengths[0] + 1) * args->k_codec->params.head_dim;
    const uint32_t group = args->n_heads / args->n_kv_heads;
    float *keys = malloc(rows * sizeof *keys), *values = malloc(rows * sizeof *values);
    (void)stream;
    for (uint32_t kv = 0; kv < args->n_kv_heads; kv++) {
        rows_of(args, true, kv, keys);
        rows_of(args, false, kv, values);
        for (uint32_t i = 0; i < args->query_tokens * group; i++)
            attend_head(args, keys, values, i / group, kv * group + i % group);
    }
    free(keys);
    free(values);
    return KVANT_OK;
}

static kvant_status transform_queries(const kvant_cuda_query_args *args, kvant_cuda_stream stream)
{
    const size_t d = args->k_codec->params.head_dim;
    (void)stream;
    for (size_t i = 0; i < (size_t)args->batch * args->n_heads; i++) {
        const size_t head = i % args->n_heads, kv = head / (args->n_heads / args->n_kv_heads);
        const float *q = (const float *)args->q + i / args->n_heads * args->q_batch_stride + head * args->q_head_stride,
                    *m = args->inverse_weights + kv * d * d;
        for (size_t j = 0; j < d; j++) {
            double sum = 0;
            for (size_t k = 0; k < d; k++)
                sum += (double)q[k] * m[k * d + j];
            args->out[i * d + j] = (float)sum;
        }
    }
    return KVANT_OK;
}

/* Transformed rows alone: what a cache asks for. */
static kvant_status decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    const kvant_codec *codec = source_of(args->codec);
    const uint32_t d = codec->info.head_dim;
    (void)stream;
    if (!args->transformed || args->type != KVANT_CUDA_F16)
        return KVANT_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < args->n_blocks; i++)
        for (uint32_t head = 0; head < args->n_kv_heads; head++)
            for (uint32_t t = 0; t < TOKENS; t++) {
                const uint8_t *page = page_of(&args->pages, args->blocks[i], head);
                const size_t row = (size_t)(args->to ? (uint32_t)args->to[i] : i) * TOKENS + t;
                float y[MOST];
                if (is_open(args->codec))
                    kvant_codec_decode_open(codec, kernels(), page, t, 1, y);
                else
                    kvant_codec_decode_transformed(codec, kernels(), page, t, y);
                kernels()->float_to_half(y, (uint16_t *)args->out + row * args->token_stride + head * args->head_stride, d);
            }
    return KVANT_OK;
}

static kvant_status copy_blocks(const kvant_cuda_pages *pages, size_t page_bytes, uint32_t n_kv_heads, const int32_t *from,
                                const int32_t *to, uint32_t n, kvant_cuda_stream stream)
{
    (void)pages, (void)page_bytes, (void)n_kv_heads, (void)from, (void)to, (void)n, (void)stream;
    return KVANT_ERR_UNSUPPORTED;
}

static kvant_status device_current(int *device)
{
    *device = 0;
    return KVANT_OK;
}

static kvant_status memory_new(void **memory, size_t bytes)
{
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (*memory)
        memset(*memory, 0, bytes);
    return *memory ? KVANT_OK : KVANT_ERR_MEMORY;
}

static void memory_free(void *memory)
{
    free(memory);
}

static kvant_status memory_copy(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    (void)stream;
    memcpy(to, from, bytes);
    return KVANT_OK;
}

static kvant_status memory_read(void *to, const void *from, size_t bytes, kvant_cuda_stream stream)
{
    return memory_copy(to, from, bytes, stream);
}

static kvant_status memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream)
{
    (void)stream;
    memset(memory, 0, bytes);
    return KVANT_OK;
}

static kvant_status largest(const kvant_cuda_numbers *numbers, float *out, kvant_cuda_stream stream)
{
    (void)stream;
    for (int i = 0; i < 2; i++) {
        const uint32_t bits = numbers->n[i] ? kernels()->magnitude(numbers->at[i], (uint32_t)numbers->n[i]) : 0;
        memcpy(&out[i], &bits, sizeof bits);
    }
    return KVANT_OK;
}

static double lse_of(const kvant_cuda_merge_args *a, uint32_t part, uint32_t query, uint32_t head)
{
    const float *center = a->centers[part], *q = a->q + query * a->q_token_stride + head * a->q_head_stride;
    double sum = 0;
    for (uint32_t j = 0; center && j < a->head_dim; j++)
        sum += (double)q[j] * center[head / (a->n_heads / a->n_kv_heads) * a->head_dim + j];
    return a->lses[((size_t)part * a->n_queries + query) * a->n_heads + head] + a->scale * sum;
}

static void merge_head(const kvant_cuda_merge_args *a, uint32_t query, uint32_t head)
{
    double total = a->sinks ? exp(a->sinks[head]) : 0, sums[MOST] = { 0 };
    float *out = a->out + query * a->out_token_stride + head * a->out_head_stride;
    for (uint32_t part = 0; part < a->n_parts; part++) {
        const double w = exp(lse_of(a, part, query, head));
        const float *from = a->outs + (((size_t)part * a->n_queries + query) * a->n_heads + head) * a->head_dim;
        for (uint32_t j = 0; j < a->head_dim; j++)
            sums[j] += w * from[j];
        total += w;
    }
    for (uint32_t j = 0; j < a->head_dim; j++)
        out[j] = total > 0 ? (float)(sums[j] / total) : 0;
    if (a->lse)
        a->lse[query * a->n_heads + head] = total > 0 ? (float)log(total) : -INFINITY;
}

static kvant_status merge(const kvant_cuda_merge_args *args, kvant_cuda_stream stream)
{
    (void)stream;
    for (uint32_t query = 0; query < args->n_queries; query++)
        for (uint32_t head = 0; head < args->n_heads; head++)
            merge_head(args, query, head);
    return KVANT_OK;
}

KVANT_API kvant_cuda_table_get_fn kvant_cuda_table_get;

const kvant_cuda_table *kvant_cuda_table_get(void)
{
    static const kvant_cuda_table table = { .version = KVANT_CUDA_TABLE_VERSION,
                                            .size = sizeof table,
                                            .view_bytes = sizeof(kvant_codec_view),
                                            .info_bytes = sizeof(kvant_codec_info),
#define ENTRY(result, name, parameters) .name = name,
                                            KVANT_CUDA_TABLE_FUNCTIONS(ENTRY)
#undef ENTRY
    };
    return &table;
}
