/* capture_read.c - reads captures: every shape is checked against the others before a row is. */
#include "capture.h"

#include "fail.h"

#include <kvant/codec.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_TOKENS (1u << 28)
#define MAX_HEADS 65536u

size_t capture_query_rows(size_t n_tokens, uint32_t n_ctx, uint32_t query_step)
{
    return n_tokens / n_ctx * (n_ctx / query_step) + n_tokens % n_ctx / query_step;
}

/* A whole number of 1 to max among the metadata. */
static bool noted_number(const capture *c, const char *key, uint64_t max, uint64_t *value, char *err, size_t errlen)
{
    const char *text = safetensors_noted(&c->file, key);
    char *end = NULL;
    const unsigned long long n = text != NULL && text[0] >= '0' && text[0] <= '9' ? strtoull(text, &end, 10) : 0;
    if (end == NULL || *end != 0 || n < 1 || n > max)
        return fail(err, errlen, "%s is missing or not a number from 1 to %llu", key, (unsigned long long)max);
    *value = n;
    return true;
}

static bool read_origin(capture *c, char *err, size_t errlen)
{
    const char *format = safetensors_noted(&c->file, "format"),
               *print = safetensors_noted(&c->file, "model_fingerprint");
    uint64_t tokens = 0, ctx = 0, step = 0;
    if (format == NULL || strcmp(format, "kvant-capture-1") != 0)
        return fail(err, errlen, "not a capture of this version's (kvant-capture-1)");
    if (!noted_number(c, "tokens", MAX_TOKENS, &tokens, err, errlen) ||
        !noted_number(c, "ctx", MAX_TOKENS, &ctx, err, errlen) ||
        !noted_number(c, "query_step", MAX_TOKENS, &step, err, errlen))
        return false;
    c->n_tokens = tokens;
    c->n_ctx = (uint32_t)ctx;
    c->query_step = (uint32_t)step;
    c->model_fingerprint = print != NULL ? strtoull(print, NULL, 16) : 0;
    return true;
}

static bool find_tensors(capture *c, uint32_t layer, char *err, size_t errlen)
{
    static const char letters[] = "kvq";
    capture_layer *l = &c->layers[layer];
    uint32_t n = 0;
    for (int kind = 0; kind < 3; kind++) {
        char name[32];
        snprintf(name, sizeof name, "layers.%lu.%c", (unsigned long)layer, letters[kind]);
        l->tensors[kind] = safetensors_find(&c->file, name);
        if (l->tensors[kind] == NULL)
            continue;
        n++;
        if (strcmp(l->tensors[kind]->type, "F16") != 0 || l->tensors[kind]->n_dims != 3)
            return fail(err, errlen, "%s is not [heads, rows, head_dim] of F16", name);
    }
    return n == 0 || n == 3 || fail(err, errlen, "layer %lu lacks keys, values or queries", (unsigned long)layer);
}

static bool check_shapes(capture *c, uint32_t layer, char *err, size_t errlen)
{
    capture_layer *l = &c->layers[layer];
    const uint64_t *k = l->tensors[CAPTURE_K]->shape, *v = l->tensors[CAPTURE_V]->shape,
                   *q = l->tensors[CAPTURE_Q]->shape;
    if (k[0] == 0 || k[0] > MAX_HEADS || q[0] == 0 || q[0] > MAX_HEADS || q[0] % k[0] != 0 || v[0] != k[0] ||
        k[1] != c->n_tokens || v[1] != c->n_tokens ||
        q[1] != capture_query_rows(c->n_tokens, c->n_ctx, c->query_step) || k[2] == 0 ||
        k[2] > KVANT_MAX_HEAD_DIM || v[2] == 0 || v[2] > KVANT_MAX_HEAD_DIM || q[2] != k[2])
        return fail(err, errlen, "the shapes of layer %lu do not fit each other", (unsigned long)layer);
    l->n_kv_heads = (uint32_t)k[0];
    l->n_heads = (uint32_t)q[0];
    l->head_dim[KVANT_ROLE_K] = (uint32_t)k[2];
    l->head_dim[KVANT_ROLE_V] = (uint32_t)v[2];
    c->n_layers = layer + 1;
    return true;
}

static bool read_attention(capture *c, uint32_t layer, char *err, size_t errlen)
{
    observe_attention *a = &c->layers[layer].attention;
    char key[48];
    snprintf(key, sizeof key, "layers.%lu.attention", (unsigned long)layer);
    const char *text = safetensors_noted(&c->file, key);
    if (text == NULL || sscanf(text, "%f %f %f", &a->scale, &a->max_bias, &a->softcap) != 3 ||
        !isfinite(a->scale) || !isfinite(a->max_bias) || !isfinite(a->softcap))
        return fail(err, errlen, "%s is missing or not three numbers", key);
    return true;
}

static bool read_windows(capture *c, char *err, size_t errlen)
{
    const safetensors_tensor *t = safetensors_find(&c->file, "windows");
    unsigned char bytes[4 * OBSERVE_MAX_LAYERS];
    if (t == NULL || strcmp(t->type, "I32") != 0 || t->bytes > sizeof bytes || t->bytes < 4ull * c->n_layers)
        return fail(err, errlen, "the tensor windows is missing or has another size");
    if (!safetensors_read(&c->file, t, 0, bytes, (size_t)t->bytes, err, errlen))
        return false;
    for (uint32_t layer = 0; layer < c->n_layers; layer++)
        for (int i = 3; i >= 0; i--)
            c->layers[layer].window = c->layers[layer].window << 8 | bytes[4 * layer + (uint32_t)i];
    return true;
}

static bool read_layers(capture *c, char *err, size_t errlen)
{
    for (uint32_t layer = 0; layer < OBSERVE_MAX_LAYERS; layer++) {
        if (!find_tensors(c, layer, err, errlen))
            return false;
        if (c->layers[layer].tensors[CAPTURE_K] != NULL &&
            (!check_shapes(c, layer, err, errlen) || !read_attention(c, layer, err, errlen)))
            return false;
    }
    return c->n_layers > 0 ? read_windows(c, err, errlen) : fail(err, errlen, "it holds no layer");
}

bool capture_open(capture *c, const char *path, char *err, size_t errlen)
{
    char reason[256] = "";
    memset(c, 0, sizeof *c);
    if (!safetensors_open(&c->file, path, err, errlen))
        return false;
    return (read_origin(c, reason, sizeof reason) && read_layers(c, reason, sizeof reason)) ||
           fail(err, errlen, "%s: %s", path, reason);
}

void capture_close(capture *c)
{
    safetensors_close(&c->file);
}

bool capture_rows(const capture *c, uint32_t layer, capture_kind kind, uint32_t head, size_t first, size_t n,
                  float *rows, char *err, size_t errlen)
{
    const safetensors_tensor *t = c->layers[layer].tensors[kind];
    const size_t dim = (size_t)t->shape[2], row_bytes = dim * sizeof(ggml_fp16_t);
    if (head >= t->shape[0] || first > t->shape[1] || n > t->shape[1] - first)
        return fail(err, errlen, "%s has no such rows", t->name);
    /* Half of the place that the floats take: read into its end, converted from its beginning on. */
    ggml_fp16_t *halves = (ggml_fp16_t *)(void *)rows + n * dim;
    if (!safetensors_read(&c->file, t, (head * t->shape[1] + first) * row_bytes, halves, n * row_bytes, err,
                          errlen))
        return false;
    for (size_t i = 0; i < n * dim; i++) {
        const ggml_fp16_t half = halves[i];
        ll.ggml_fp16_to_fp32_row(&half, rows + i, 1);
    }
    return true;
}
