/* layer_error.c - see layer_error.h. weights and outputs are [query that counts][head][...]; a query has a weight for each key of
 * its context, of which those that it does not see are 0. */
#define _POSIX_C_SOURCE 200809L
#include "layer_error.h"

#include "fail.h"

#include <kvant/tensor.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const capture_layer *shape_of(const layer_rows *l)
{
    return &l->capture->layers[l->layer];
}

static size_t context_of(const layer_rows *l, size_t token)
{
    return token / l->capture->n_ctx * l->capture->n_ctx;
}

static bool load_rows(layer_rows *l, kvant_role role, char *err, size_t errlen)
{
    const capture_layer *s = shape_of(l);
    const size_t dim = s->head_dim[role], n = l->capture->n_tokens;
    float *head = malloc(n * dim * sizeof *head);
    l->rows[role] = malloc(n * s->n_kv_heads * dim * sizeof *head);
    bool ok = head != NULL && l->rows[role] != NULL;
    if (!ok)
        fail(err, errlen, "out of memory");
    for (uint32_t h = 0; h < s->n_kv_heads && ok; h++) {
        ok = capture_rows(l->capture, l->layer, role == KVANT_ROLE_K ? CAPTURE_K : CAPTURE_V, h, 0, n, head, err,
                          errlen);
        for (size_t i = 0; i < n && ok; i++)
            memcpy(l->rows[role] + (i * s->n_kv_heads + h) * dim, head + i * dim, dim * sizeof *head);
    }
    free(head);
    return ok;
}

/* Those of the second half of a context, as evaluations score. */
static bool list_queries(layer_rows *l, size_t n_rows)
{
    const capture *c = l->capture;
    const size_t per_context = c->n_ctx / c->query_step;
    l->positions = malloc(n_rows * sizeof *l->positions + 1);
    l->query_rows = malloc(n_rows * sizeof *l->query_rows + 1);
    for (size_t i = 0; i < n_rows && l->positions != NULL && l->query_rows != NULL; i++) {
        const size_t in_context = (i % per_context + 1) * c->query_step - 1, first = i / per_context * c->n_ctx;
        const size_t left = c->n_tokens - first, length = left < c->n_ctx ? left : c->n_ctx;
        if (in_context < length / 2)
            continue;
        l->positions[l->n_queries] = first + in_context;
        l->query_rows[l->n_queries++] = i;
    }
    return l->positions != NULL && l->query_rows != NULL;
}

static float dot(const float *a, const float *b, size_t n)
{
    float sums[8] = { 0 };
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (size_t j = 0; j < 8; j++)
            sums[j] += a[i + j] * b[i + j];
    for (; i < n; i++)
        sums[0] += a[i] * b[i];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* Softmax over the keys first .. position of the query's kv head; weights[i] belongs to key first + i. */
static void softmax(const layer_rows *l, const float *keys, const float *q, uint32_t kv_head, size_t first,
                    size_t position, float *weights)
{
    const capture_layer *s = shape_of(l);
    const size_t dim = s->head_dim[KVANT_ROLE_K], stride = dim * s->n_kv_heads;
    float top = -INFINITY;
    double sum = 0;
    for (size_t i = first; i <= position; i++) {
        float score = s->attention.scale * dot(q, keys + i * stride + kv_head * dim, dim);
        if (s->attention.softcap > 0)
            score = s->attention.softcap * tanhf(score / s->attention.softcap);
        weights[i - first] = score;
        top = score > top ? score : top;
    }
    for (size_t i = 0; i <= position - first; i++)
        sum += weights[i] = expf(weights[i] - top);
    for (size_t i = 0; i <= position - first; i++)
        weights[i] = (float)(weights[i] / sum);
}

static void weigh(const layer_rows *l, const float *values, const float *weights, uint32_t kv_head, size_t first,
                  size_t position, float *out)
{
    const size_t dim = shape_of(l)->head_dim[KVANT_ROLE_V], stride = dim * shape_of(l)->n_kv_heads;
    memset(out, 0, dim * sizeof *out);
    for (size_t i = first; i <= position; i++) {
        const float w = weights[i - first];
        const float *v = values + i * stride + kv_head * dim;
        for (size_t j = 0; j < dim && w > 0; j++)
            out[j] += w * v[j];
    }
}

typedef struct place {
    size_t query, head, first, position;
    uint32_t kv_head;
} place;

static place place_of(const layer_rows *l, size_t query, uint32_t head)
{
    const capture_layer *s = shape_of(l);
    const size_t position = l->positions[query], start = context_of(l, position);
    const size_t first = s->window > 0 && position - start >= s->window ? position + 1 - s->window : start;
    return (place){ query, head, first, position, head / (s->n_heads / s->n_kv_heads) };
}

static const float *query_of(const layer_rows *l, const place *p)
{
    const size_t dim = shape_of(l)->head_dim[KVANT_ROLE_K];
    const capture *c = l->capture;
    return l->queries +
           (p->head * capture_query_rows(c->n_tokens, c->n_ctx, c->query_step) + l->query_rows[p->query]) * dim;
}

static float *weights_of(const layer_rows *l, const place *p)
{
    return l->weights + (p->query * shape_of(l)->n_heads + p->head) * l->capture->n_ctx;
}

static float *output_of(const layer_rows *l, const place *p)
{
    return l->outputs + (p->query * shape_of(l)->n_heads + p->head) * shape_of(l)->head_dim[KVANT_ROLE_V];
}

static void compute_exact(layer_rows *l)
{
    for (size_t i = 0; i < l->n_queries; i++)
        for (uint32_t h = 0; h < shape_of(l)->n_heads; h++) {
            const place p = place_of(l, i, h);
            softmax(l, l->rows[KVANT_ROLE_K], query_of(l, &p), p.kv_head, p.first, p.position, weights_of(l, &p));
            weigh(l, l->rows[KVANT_ROLE_V], weights_of(l, &p), p.kv_head, p.first, p.position, output_of(l, &p));
        }
}

bool layer_rows_load(layer_rows *l, const capture *c, uint32_t layer, char *err, size_t errlen)
{
    *l = (layer_rows){ .capture = c, .layer = layer };
    const capture_layer *s = shape_of(l);
    const size_t n_rows = capture_query_rows(c->n_tokens, c->n_ctx, c->query_step), dim = s->head_dim[KVANT_ROLE_K];
    if (s->attention.max_bias != 0)
        return fail(err, errlen, "layer %lu: ALiBi is not supported here", (unsigned long)layer);
    if (!load_rows(l, KVANT_ROLE_K, err, errlen) || !load_rows(l, KVANT_ROLE_V, err, errlen))
        return false;
    l->queries = malloc(s->n_heads * n_rows * dim * sizeof(float) + 1);
    if (l->queries == NULL || !list_queries(l, n_rows))
        return fail(err, errlen, "out of memory");
    for (uint32_t h = 0; h < s->n_heads; h++)
        if (!capture_rows(c, layer, CAPTURE_Q, h, 0, n_rows, l->queries + h * n_rows * dim, err, errlen))
            return false;
    l->weights = calloc(l->n_queries * s->n_heads * c->n_ctx + 1, sizeof(float));
    l->outputs = calloc(l->n_queries * s->n_heads * s->head_dim[KVANT_ROLE_V] + 1, sizeof(float));
    if (l->weights == NULL || l->outputs == NULL)
        return fail(err, errlen, "out of memory");
    compute_exact(l);
    return true;
}

void layer_rows_free(layer_rows *l)
{
    free(l->rows[0]);
    free(l->rows[1]);
    free(l->queries);
    free(l->weights);
    free(l->outputs);
    free(l->positions);
    free(l->query_rows);
    *l = (layer_rows){ .capture = NULL };
}

/* Rows of one context through the tensor and back. */
static kvant_status through_tensor(kvant_tensor *tensor, const float *rows, size_t stride, size_t n,
                                   uint32_t n_threads, float *back)
{
    int64_t slots[ENGINE_UBATCH];
    kvant_status status = KVANT_OK;
    kvant_tensor_clear(tensor);
    for (size_t first = 0; first < n && status == KVANT_OK; first += ENGINE_UBATCH) {
        const size_t count = n - first < ENGINE_UBATCH ? n - first : ENGINE_UBATCH;
        for (size_t i = 0; i < count; i++)
            slots[i] = (int64_t)(first + i);
        status = kvant_tensor_write(tensor, slots, count, rows + first * stride, stride, n_threads);
    }
    return status == KVANT_OK ? kvant_tensor_read(tensor, 0, n, back, stride) : status;
}

typedef struct codec_set {
    kvant_codec **codecs; /* one per kv head */
    uint32_t n;
} codec_set;

static bool make_codecs(codec_set *set, const layer_rows *l, kvant_role role, const char *spec,
                        const kvant_calibration *calibration, char *err, size_t errlen)
{
    const capture_layer *s = shape_of(l);
    set->n = s->n_kv_heads;
    set->codecs = calloc(set->n, sizeof *set->codecs);
    if (set->codecs == NULL)
        return fail(err, errlen, "out of memory");
    for (uint32_t h = 0; h < set->n; h++)
        if (kvant_codec_create_calibrated(spec, s->head_dim[role], role, 0, calibration, l->layer, h,
                                          &set->codecs[h], err, errlen) != KVANT_OK)
            return false;
    return true;
}

static void free_codecs(codec_set *set)
{
    for (uint32_t h = 0; h < set->n && set->codecs != NULL; h++)
        kvant_codec_free(&set->codecs[h]);
    free(set->codecs);
}

/* All rows of the layer as a cache with these codecs gives them back. */
static bool pass_rows(const layer_rows *l, kvant_role role, const codec_set *set, uint32_t n_threads, float *back,
                      char *err, size_t errlen)
{
    const capture *c = l->capture;
    const size_t stride = (size_t)set->n * shape_of(l)->head_dim[role];
    const kvant_tensor_params params = {
        .size = sizeof params,
        .codecs = (const kvant_codec *const *)set->codecs,
        .n_kv_heads = set->n,
        .n_sequences = 1,
        .n_blocks = (c->n_ctx + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS,
    };
    size_t bytes;
    void *memory = NULL;
    kvant_tensor *tensor = NULL;
    if (kvant_tensor_size(&params, &bytes) != KVANT_OK)
        return fail(err, errlen, "%s", kvant_error_message());
    if (posix_memalign(&memory, KVANT_PAGE_ALIGN, bytes) != 0)
        return fail(err, errlen, "out of memory");
    memset(memory, 0, bytes);
    kvant_status status = kvant_tensor_create(&params, memory, &tensor);
    for (size_t first = 0; first < c->n_tokens && status == KVANT_OK; first += c->n_ctx) {
        const size_t left = c->n_tokens - first, n = left < c->n_ctx ? left : c->n_ctx;
        status = through_tensor(tensor, l->rows[role] + first * stride, stride, n, n_threads, back + first * stride);
    }
    kvant_tensor_free(&tensor);
    free(memory);
    return status == KVANT_OK || fail(err, errlen, "%s", kvant_strerror(status));
}

static void compare(const layer_rows *l, kvant_role role, const float *back, float *weights, float *out,
                    double *errors)
{
    const size_t dim = shape_of(l)->head_dim[KVANT_ROLE_V];
    double size = 0;
    for (uint32_t h = 0; h < shape_of(l)->n_kv_heads; h++)
        errors[h] = 0;
    for (size_t i = 0; i < l->n_queries; i++)
        for (uint32_t h = 0; h < shape_of(l)->n_heads; h++) {
            const place p = place_of(l, i, h);
            const float *exact = output_of(l, &p);
            if (role == KVANT_ROLE_K)
                softmax(l, back, query_of(l, &p), p.kv_head, p.first, p.position, weights);
            weigh(l, role == KVANT_ROLE_V ? back : l->rows[KVANT_ROLE_V],
                  role == KVANT_ROLE_K ? weights : weights_of(l, &p), p.kv_head, p.first, p.position, out);
            for (size_t j = 0; j < dim; j++) {
                errors[p.kv_head] += ((double)out[j] - exact[j]) * ((double)out[j] - exact[j]);
                size += (double)exact[j] * exact[j];
            }
        }
    for (uint32_t h = 0; h < shape_of(l)->n_kv_heads; h++)
        errors[h] = size > 0 ? errors[h] / size : 0;
}

bool layer_error(const layer_rows *l, kvant_role role, const char *spec, const kvant_calibration *calibration,
                 uint32_t n_threads, double *errors, char *err, size_t errlen)
{
    const capture_layer *s = shape_of(l);
    codec_set set = { .n = 0 };
    float *back = malloc(l->capture->n_tokens * s->n_kv_heads * s->head_dim[role] * sizeof *back);
    float *weights = malloc(l->capture->n_ctx * sizeof *weights), *out = malloc(KVANT_MAX_HEAD_DIM * sizeof *out);
    bool ok = back != NULL && weights != NULL && out != NULL;
    if (!ok)
        fail(err, errlen, "out of memory");
    ok = ok && make_codecs(&set, l, role, spec, calibration, err, errlen) &&
         pass_rows(l, role, &set, n_threads, back, err, errlen);
    if (ok)
        compare(l, role, back, weights, out, errors);
    free_codecs(&set);
    free(back);
    free(weights);
    free(out);
    return ok;
}
