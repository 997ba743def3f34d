/* attention_ggml.c - ggml's flash attention on its CPU back end as a subject of `kvant bench attention`.
 *
 * One graph has a node a layer, as a model's graph has: its threads start once per run and meet at a barrier between nodes.
 * Tensors have the order of llama.cpp's cache: a token's kv heads lie side by side. */
#include "attention_bench.h"

#include "command.h"
#include "configs.h"
#include "engine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct {
    engine engine;
    ggml_backend_t backend;
    bool open;
} runtime;

bool attention_ggml_knows(const char *name)
{
    enum ggml_type type;
    return configs_stock_type(name, &type);
}

/* Its threads sleep between runs: spinning, as llama.cpp lets them, they would take the CPUs of those who are measured next. */
bool attention_ggml_open(const char *folder, uint32_t n_threads)
{
    const engine_options options = { .runtime = folder, .n_threads = n_threads, .sleeping_threads = true };
    void (*set_threadpool)(ggml_backend_t, ggml_threadpool_t) = NULL;
    runtime.open = true;
    if (!engine_open_runtime(&runtime.engine, &options))
        return false;
    const ggml_backend_dev_t cpu = ll.ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    void *symbol = ll.ggml_backend_reg_get_proc_address(ll.ggml_backend_dev_backend_reg(cpu),
                                                        "ggml_backend_cpu_set_threadpool");
    runtime.backend = ll.ggml_backend_dev_init(cpu, NULL);
    if (symbol == NULL || runtime.backend == NULL)
        return complain("cannot start ggml's CPU back end");
    memcpy(&set_threadpool, &symbol, sizeof set_threadpool);
    set_threadpool(runtime.backend, runtime.engine.threadpool);
    return true;
}

void attention_ggml_close(void)
{
    if (!runtime.open)
        return;
    if (runtime.backend != NULL)
        ll.ggml_backend_free(runtime.backend);
    engine_close(&runtime.engine);
    runtime.backend = NULL;
    runtime.open = false;
}

typedef struct ggml_state {
    struct ggml_context *ctx;
    ggml_backend_buffer_t buffer;
    struct ggml_cgraph *graph;
    struct ggml_tensor *q, *mask, *last;
    struct ggml_tensor *caches[2][ATTENTION_MAX_LAYERS]; /* keys, values */
} ggml_state;

static bool run(attention_subject *subject, double *seconds)
{
    const ggml_state *s = subject->state;
    const double start = monotonic_seconds();
    if (ll.ggml_backend_graph_compute(runtime.backend, s->graph) != GGML_STATUS_SUCCESS)
        return complain("ggml could not compute flash attention");
    *seconds = (monotonic_seconds() - start) / subject->n_layers;
    return true;
}

static bool check(attention_subject *subject)
{
    const ggml_state *s = subject->state;
    const size_t bytes = ll.ggml_nbytes(s->last);
    float *out = malloc(bytes);
    if (out == NULL)
        return complain("out of memory");
    ll.ggml_backend_tensor_get(s->last, out, 0, bytes);
    const bool ok = attention_is_finite(out, bytes / sizeof *out);
    free(out);
    return ok;
}

static void release(void *state)
{
    ggml_state *s = state;
    if (s->buffer != NULL)
        ll.ggml_backend_buffer_free(s->buffer);
    if (s->ctx != NULL)
        ll.ggml_free(s->ctx);
    free(s);
}

static void build(ggml_state *s, const attention_shape *shape, enum ggml_type type, uint32_t n_layers)
{
    const size_t row = ll.ggml_row_size(type, shape->head_dim), q_row = shape->head_dim * sizeof(float);
    s->q = ll.ggml_new_tensor_2d(s->ctx, GGML_TYPE_F32, (int64_t)shape->head_dim * shape->n_heads, shape->n_queries);
    s->mask = ll.ggml_new_tensor_2d(s->ctx, GGML_TYPE_F16, shape->n_tokens, shape->n_queries);
    s->graph = ll.ggml_new_graph(s->ctx);
    struct ggml_tensor *q = ll.ggml_view_3d(s->ctx, s->q, shape->head_dim, shape->n_queries, shape->n_heads,
                                            shape->n_heads * q_row, q_row, 0);
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        struct ggml_tensor *kv[2];
        for (int role = 0; role < 2; role++) {
            s->caches[role][layer] =
                ll.ggml_new_tensor_2d(s->ctx, type, (int64_t)shape->head_dim * shape->n_kv_heads, shape->n_tokens);
            kv[role] = ll.ggml_view_3d(s->ctx, s->caches[role][layer], shape->head_dim, shape->n_tokens,
                                       shape->n_kv_heads, shape->n_kv_heads * row, row, 0);
        }
        s->last = ll.ggml_flash_attn_ext(s->ctx, q, kv[0], kv[1], s->mask, 1 / sqrtf((float)shape->head_dim), 0, 0);
        ll.ggml_build_forward_expand(s->graph, s->last);
    }
}

/* The distinct rows, quantised once, until the caches are full. */
static bool fill(const attention_inputs *in, enum ggml_type type, const float *rows, struct ggml_tensor **caches,
                 uint32_t n_layers)
{
    const int64_t width = (int64_t)in->shape.n_kv_heads * in->shape.head_dim;
    const size_t row = ll.ggml_row_size(type, width);
    void *bytes = malloc(in->n_rows * row);
    if (bytes == NULL)
        return false;
    ll.ggml_quantize_chunk(type, rows, bytes, 0, in->n_rows, width, NULL);
    for (uint32_t layer = 0; layer < n_layers; layer++)
        for (uint32_t first = 0; first < in->shape.n_tokens; first += in->n_rows) {
            const uint32_t left = in->shape.n_tokens - first, n = left < in->n_rows ? left : in->n_rows;
            ll.ggml_backend_tensor_set(caches[layer], bytes, first * row, n * row);
        }
    free(bytes);
    return true;
}

static bool make_graph(ggml_state *s, const attention_inputs *in, enum ggml_type type, uint32_t n_layers)
{
    /* Five tensors a layer (two caches, their views, the result), three beside them, and the graph. */
    const struct ggml_init_params params = {
        .mem_size = (5 * n_layers + 8) * ll.ggml_tensor_overhead() + ll.ggml_graph_overhead(), .no_alloc = true
    };
    if ((s->ctx = ll.ggml_init(params)) == NULL)
        return false;
    build(s, &in->shape, type, n_layers);
    if ((s->buffer = ll.ggml_backend_alloc_ctx_tensors(s->ctx, runtime.backend)) == NULL)
        return false;
    ll.ggml_backend_tensor_set(s->q, in->q, 0, ll.ggml_nbytes(s->q));
    ll.ggml_backend_tensor_set(s->mask, in->mask, 0, ll.ggml_nbytes(s->mask));
    return fill(in, type, in->k, s->caches[0], n_layers) && fill(in, type, in->v, s->caches[1], n_layers);
}

bool attention_ggml(attention_subject *subject, const attention_inputs *in, const char *name)
{
    const attention_shape *shape = &in->shape;
    enum ggml_type type;
    *subject = (attention_subject){ .run = run, .check = check, .free = release };
    if (!configs_stock_type(name, &type))
        return false;
    if (shape->head_dim % ll.ggml_blck_size(type) != 0)
        return complain("--stock %s: its blocks of %d do not divide head_dim %u", name, (int)ll.ggml_blck_size(type),
                 (unsigned)shape->head_dim);
    subject->bytes = 2.0 * (double)ll.ggml_row_size(type, (int64_t)shape->n_kv_heads * shape->head_dim) * shape->n_tokens;
    subject->n_layers = attention_layers(shape, subject->bytes);
    ggml_state *s = subject->state = calloc(1, sizeof *s);
    if (s != NULL && make_graph(s, in, type, subject->n_layers))
        return true;
    return complain("out of memory");
}
