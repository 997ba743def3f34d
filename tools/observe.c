/* observe.c - from graph nodes to rows: which layer and role a node belongs to, and whether this
 * program can read its tensors. */
#include "observe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first failure is kept: later ones follow from it. */
static bool refuse(observer *o, const struct ggml_tensor *node, const char *what)
{
    if (o->error[0] == 0)
        snprintf(o->error, sizeof o->error, "%s (%s): %s", node->name, ll.ggml_op_name(node->op),
                 what);
    return false;
}

static const struct ggml_tensor *root_of(const struct ggml_tensor *tensor)
{
    while (tensor->view_src != NULL)
        tensor = tensor->view_src;
    return tensor;
}

/* "cache_k_l12": keys of layer 12. */
static bool parse_cache(const char *name, kvant_role *role, uint32_t *layer)
{
    if (strncmp(name, "cache_k_l", 9) != 0 && strncmp(name, "cache_v_l", 9) != 0)
        return false;
    char *end;
    const unsigned long number = strtoul(name + 9, &end, 10);
    *role = name[6] == 'k' ? KVANT_ROLE_K : KVANT_ROLE_V;
    *layer = (uint32_t)number;
    return end != name + 9 && *end == 0 && number < OBSERVE_MAX_LAYERS;
}

typedef enum node_kind { NODE_OTHER, NODE_WRITE, NODE_ATTENTION } node_kind;

/* By name, because the numbers of operations change between versions of ggml. */
static node_kind classify(const struct ggml_tensor *node, kvant_role *role, uint32_t *layer)
{
    const char *op = ll.ggml_op_name(node->op);
    if (strcmp(op, "SET_ROWS") == 0 && parse_cache(root_of(node)->name, role, layer))
        return NODE_WRITE;
    if (strcmp(op, "FLASH_ATTN_EXT") == 0 && node->src[1] != NULL &&
        parse_cache(root_of(node->src[1])->name, role, layer))
        return NODE_ATTENTION;
    return NODE_OTHER;
}

/* q [head_dim, tokens, heads], k and v [head_dim, cells, kv heads] */
static bool learn(observer *o, const struct ggml_tensor *node, uint32_t layer)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    if (k->ne[2] <= 0 || q->ne[2] % k->ne[2] != 0 || k->ne[2] != v->ne[2] || q->ne[0] != k->ne[0] ||
        k->ne[0] > KVANT_MAX_HEAD_DIM || v->ne[0] > KVANT_MAX_HEAD_DIM || q->ne[2] > 65536)
        return refuse(o, node, "heads of this shape are not supported");
    o->shapes[layer] = (observe_shape){ .n_kv_heads = (uint32_t)k->ne[2],
                                        .n_heads = (uint32_t)q->ne[2],
                                        .head_dim = { (uint32_t)k->ne[0], (uint32_t)v->ne[0] } };
    memcpy(&o->shapes[layer].attention, node->op_params, sizeof(observe_attention));
    o->n_layers = layer + 1 > o->n_layers ? layer + 1 : o->n_layers;
    return true;
}

/* Whether rows have no gaps between their numbers of `number` bytes, and lie in this process's
 * memory. */
static bool in_host(const struct ggml_tensor *tensor, size_t number)
{
    const struct ggml_tensor *root = root_of(tensor);
    return tensor->nb[0] == number && tensor->data != NULL && root->buffer != NULL &&
           ll.ggml_backend_buffer_is_host(root->buffer);
}

static bool readable(const struct ggml_tensor *tensor)
{
    return tensor->type == GGML_TYPE_F32 && in_host(tensor, sizeof(float));
}

static bool check(observer *o, const struct ggml_tensor *node, kvant_status status)
{
    return status == KVANT_OK || refuse(o, node, kvant_strerror(status));
}

static bool read_write(observer *o, const struct ggml_tensor *node, kvant_role role, uint32_t layer)
{
    const observe_shape *shape = &o->shapes[layer];
    const struct ggml_tensor *rows = node->src[0];
    if (shape->n_kv_heads == 0)
        return refuse(o, node, "the layer writes to the cache but has no attention node");
    if (!readable(rows) || rows->ne[2] != 1 || rows->ne[3] != 1 ||
        rows->ne[0] != (int64_t)shape->n_kv_heads * shape->head_dim[role])
        return refuse(o, node, "the rows are not f32 rows of all kv heads in host memory");
    o->n_writes++;
    if (o->sink != NULL)
        return o->sink->rows(o->sink->user, layer, role, rows->data, rows->nb[1] / sizeof(float),
                             (size_t)rows->ne[1]) ||
               refuse(o, node, "the rows could not be kept");
    return check(o, node,
                 kvant_calibrator_add_rows(o->calibrator, layer, role, shape->n_kv_heads,
                                           shape->head_dim[role], rows->data,
                                           rows->nb[1] / sizeof(float), (size_t)rows->ne[1]));
}

/* Rows of all query heads, head by head. */
static bool hand_over_queries(observer *o, const struct ggml_tensor *node, uint32_t layer)
{
    const struct ggml_tensor *q = node->src[0];
    for (uint32_t h = 0; h < o->shapes[layer].n_heads; h++) {
        const char *head = (const char *)q->data + h * q->nb[2];
        if (!o->sink->queries(o->sink->user, layer, h, (const float *)(const void *)head,
                              q->nb[1] / sizeof(float), (size_t)q->ne[1]))
            return refuse(o, node, "the queries could not be kept");
    }
    return true;
}

static bool read_queries(observer *o, const struct ggml_tensor *node, uint32_t layer)
{
    const observe_shape *shape = &o->shapes[layer];
    const struct ggml_tensor *q = node->src[0];
    if (!readable(q) || q->ne[3] != 1 || q->ne[0] != shape->head_dim[KVANT_ROLE_K] ||
        q->ne[2] != shape->n_heads)
        return refuse(o, node, "the queries are not f32 rows in host memory");
    o->n_queries++;
    if (o->sink != NULL)
        return hand_over_queries(o, node, layer);
    for (uint32_t h = 0; h < shape->n_heads; h++) {
        const char *head = (const char *)q->data + h * q->nb[2];
        const kvant_status status = kvant_calibrator_add_queries(
            o->calibrator, layer, h / (shape->n_heads / shape->n_kv_heads),
            shape->head_dim[KVANT_ROLE_K], (const float *)(const void *)head,
            q->nb[1] / sizeof(float), (size_t)q->ne[1]);
        if (!check(o, node, status))
            return false;
    }
    return true;
}

/* One query in 16 shows which keys attention looks at. More queries would change little and take
 * time. */
enum { ATTENTION_STEP = 16 };

/* kvant keeps the first keys of a context, where attention sinks are, in 16 bits when a transform
 * is used. It takes a page of them, or less, so the sample leaves a page out. */
enum { EXACT_KEYS = KVANT_PAGE_TOKENS };

/* Numbers of a row of f16 or f32. */
static void read_row(const struct ggml_tensor *t, size_t row_offset, float *out, size_t n)
{
    const char *row = (const char *)t->data + row_offset;
    if (t->type == GGML_TYPE_F32)
        memcpy(out, row, n * sizeof *out);
    else
        ll.ggml_fp16_to_fp32_row((const ggml_fp16_t *)(const void *)row, out, (int64_t)n);
}

static bool is_rows(const struct ggml_tensor *t)
{
    return readable(t) || (t->type == GGML_TYPE_F16 && in_host(t, sizeof(ggml_fp16_t)));
}

typedef struct attention_sample {
    float *keys, *queries, *mask;
    size_t n_keys, n_tokens; /* tokens: those looked at */
} attention_sample;

static bool allocate_sample(attention_sample *s, const observe_shape *shape,
                            const struct ggml_tensor *q, const struct ggml_tensor *k)
{
    const size_t d = shape->head_dim[KVANT_ROLE_K], group = shape->n_heads / shape->n_kv_heads;
    s->n_keys = (size_t)k->ne[1];
    s->n_tokens = (size_t)q->ne[1] / ATTENTION_STEP;
    s->keys = malloc(s->n_keys * d * sizeof(float));
    s->queries = malloc(s->n_tokens * group * d * sizeof(float) + 1);
    s->mask = malloc(s->n_tokens * group * s->n_keys * sizeof(float) + 1);
    return s->keys != NULL && s->queries != NULL && s->mask != NULL;
}

static void free_sample(attention_sample *s)
{
    free(s->keys);
    free(s->queries);
    free(s->mask);
}

/* The token of a batch that is a sample's. */
static size_t sampled(size_t token)
{
    return token * ATTENTION_STEP + ATTENTION_STEP - 1;
}

/* A row for each query, in the order of fill_queries; all kv heads have the same ones. */
static void fill_mask(attention_sample *s, const struct ggml_tensor *mask, size_t group)
{
    for (size_t t = 0; t < s->n_tokens; t++) {
        float *first = s->mask + t * group * s->n_keys;
        read_row(mask, sampled(t) * mask->nb[1], first, s->n_keys);
        for (size_t g = 1; g < group; g++)
            memcpy(first + g * s->n_keys, first, s->n_keys * sizeof *first);
    }
}

/* The queries of the kv head's query heads, token by token. */
static void fill_queries(attention_sample *s, const struct ggml_tensor *q, size_t d, size_t group,
                         size_t kv_head)
{
    for (size_t t = 0; t < s->n_tokens; t++)
        for (size_t g = 0; g < group; g++)
            read_row(q, sampled(t) * q->nb[1] + (kv_head * group + g) * q->nb[2],
                     s->queries + (t * group + g) * d, d);
}

static kvant_status add_attention(observer *o, const struct ggml_tensor *node, uint32_t layer,
                                  attention_sample *s, float scale)
{
    const observe_shape *shape = &o->shapes[layer];
    const struct ggml_tensor *k = node->src[1];
    const size_t d = shape->head_dim[KVANT_ROLE_K], group = shape->n_heads / shape->n_kv_heads;
    kvant_status status = KVANT_OK;
    fill_mask(s, node->src[3], group);
    for (uint32_t h = 0; h < shape->n_kv_heads && status == KVANT_OK; h++) {
        for (size_t i = 0; i < s->n_keys; i++)
            read_row(k, i * k->nb[1] + h * k->nb[2], s->keys + i * d, d);
        fill_queries(s, node->src[0], d, group, h);
        const kvant_calibrator_attention attention = { .size = sizeof attention,
                                                       .keys = s->keys,
                                                       .key_stride = d,
                                                       .n_keys = (uint32_t)s->n_keys,
                                                       .queries = s->queries,
                                                       .query_stride = d,
                                                       .n_queries = (uint32_t)(s->n_tokens * group),
                                                       .mask = s->mask,
                                                       .mask_stride = s->n_keys,
                                                       .scale = scale };
        status = kvant_calibrator_add_attention(o->calibrator, layer, h, (uint32_t)d, EXACT_KEYS,
                                                &attention);
    }
    return status;
}

/* Gives the calibrator a sample of attention. Attention whose scores are not <q, k> times a factor
 * plus a mask is skipped: the calibrator works without samples. */
static bool read_attention(observer *o, const struct ggml_tensor *node, uint32_t layer)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *mask = node->src[3];
    const observe_attention parameters = o->shapes[layer].attention;
    if (mask == NULL || !is_rows(mask) || !is_rows(k) || mask->ne[0] < k->ne[1] ||
        mask->ne[1] < q->ne[1] || mask->ne[2] != 1 || parameters.max_bias != 0 ||
        parameters.softcap != 0)
        return true;
    attention_sample s = { .n_keys = 0 };
    kvant_status status = KVANT_ERR_MEMORY;
    if (allocate_sample(&s, &o->shapes[layer], q, k))
        status = add_attention(o, node, layer, &s, parameters.scale);
    free_sample(&s);
    return check(o, node, status);
}

/* Counts the keys that the last token of a batch sees: the most of all tokens. A layer with a
 * sliding window sees fewer keys than other layers. */
static bool count_visible(observer *o, const struct ggml_tensor *node, uint32_t layer)
{
    const struct ggml_tensor *q = node->src[0], *mask = node->src[3];
    observe_shape *shape = &o->shapes[layer];
    if (mask == NULL || !is_rows(mask) || mask->ne[1] < q->ne[1] ||
        mask->ne[0] < node->src[1]->ne[1])
        return refuse(o, node, "attention without a mask in host memory");
    const size_t n = (size_t)node->src[1]->ne[1];
    float *row = malloc(n * sizeof *row);
    if (row == NULL)
        return check(o, node, KVANT_ERR_MEMORY);
    read_row(mask, ((size_t)q->ne[1] - 1) * mask->nb[1], row, n);
    uint32_t visible = 0;
    for (size_t i = 0; i < n; i++)
        visible += row[i] > -INFINITY;
    free(row);
    if (visible > shape->n_visible)
        shape->n_visible = visible;
    return true;
}

/* llama.cpp calls this before it computes a node, to ask whether its result is wanted, and again
 * with the result, while the node's sources are still in memory. Returning false the second time
 * ends the graph. */
bool observe_node(struct ggml_tensor *node, bool ask, void *user)
{
    observer *o = user;
    kvant_role role = KVANT_ROLE_K;
    uint32_t layer = 0;
    const node_kind kind = o->error[0] != 0 ? NODE_OTHER : classify(node, &role, &layer);
    if (kind == NODE_OTHER)
        return !ask && o->error[0] == 0;
    if (o->calibrator == NULL && o->sink == NULL) {
        if (ask && kind == NODE_ATTENTION)
            learn(o, node, layer);
        return !ask;
    }
    if (ask)
        return true;
    if (kind == NODE_WRITE)
        return read_write(o, node, role, layer);
    return read_queries(o, node, layer) &&
           (o->sink != NULL ? count_visible(o, node, layer) : read_attention(o, node, layer));
}
