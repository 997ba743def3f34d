/* ops_fixture.h - single attentions of the KVANT device and of ggml's CPU back end over the same
 * random tensors. */
#ifndef KVANT_TESTS_OPS_FIXTURE_H
#define KVANT_TESTS_OPS_FIXTURE_H

#include "ggml-cpu.h"
#include "ggml.h"
#include "harness.h"

#define N_CELLS 128 /* of one stream */

struct attention_case {
    const char *what;
    int heads, kv_heads, k_dim, v_dim, cells, tokens, streams, first_stream;
    bool mask, sinks;
    float softcap, max_bias;
};

static uint64_t random_state;

static inline float random_number(void)
{
    return harness_random(&random_state);
}

static inline float *random_numbers(size_t n)
{
    float *x = malloc(n * sizeof(float));

    assert_non_null(x);
    for (size_t i = 0; i < n; i++)
        x[i] = random_number();
    return x;
}

/* A device, the tensors that are allocated on it, and the function that sets its threads. */
struct device {
    ggml_backend_t backend;
    ggml_backend_dev_t device;
    struct ggml_context *context;
    ggml_backend_buffer_t buffer;
};

static inline struct device open_device(ggml_backend_dev_t dev, int n_threads)
{
    struct ggml_init_params params = { .mem_size = 64 * ggml_tensor_overhead(), .no_alloc = true };
    struct device device = { .backend = ggml_backend_dev_init(dev, NULL),
                             .device = dev,
                             .context = ggml_init(params) };
    void (*set_n_threads)(ggml_backend_t, int);
    void *symbol = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev),
                                                     "ggml_backend_set_n_threads");

    assert_non_null(device.backend);
    assert_non_null(symbol);
    memcpy(&set_n_threads, &symbol, sizeof(symbol));
    set_n_threads(device.backend, n_threads);
    return device;
}

static inline void close_device(struct device *device)
{
    ggml_backend_buffer_free(device->buffer);
    ggml_free(device->context);
    ggml_backend_free(device->backend);
}

static inline ggml_backend_dev_t kvant_device(void)
{
    return ggml_backend_reg_dev_get(harness_plugin(), 0);
}

static inline void allocate(struct device *device)
{
    device->buffer = ggml_backend_alloc_ctx_tensors_from_buft(
        device->context, ggml_backend_dev_buffer_type(device->device));
    assert_non_null(device->buffer);
    ggml_backend_buffer_clear(device->buffer, 0);
}

/* Computes the nodes, after asking for each whether the device supports it, as the scheduler
 * does. */
static inline void compute(struct device *device, struct ggml_tensor **nodes, int n)
{
    struct ggml_init_params params = { .mem_size = ggml_graph_overhead() + 1024, .no_alloc = true };
    struct ggml_context *context = ggml_init(params);
    struct ggml_cgraph *graph = ggml_new_graph(context);

    for (int i = n; i-- > 0;) /* attention first, because it shows head_dim */
        assert_true(ggml_backend_dev_supports_op(device->device, nodes[i]));
    for (int i = 0; i < n; i++)
        ggml_build_forward_expand(graph, nodes[i]);
    assert_int_equal(ggml_backend_graph_compute(device->backend, graph), GGML_STATUS_SUCCESS);
    ggml_free(context);
}

/* Inputs of a case, in host memory. Rows hold all streams, cell after cell. */
struct inputs {
    float *q, *k, *v, *sinks;
    int64_t *index;
    ggml_fp16_t *mask;
    size_t n_rows;
};

/* Hides half of the cells from each token, and all cells from the first token of every stream. */
static inline void fill_mask(const struct attention_case *c, struct inputs *in)
{
    for (int i = 0; i < c->tokens * c->streams; i++)
        for (int j = 0; j < c->cells; j++) {
            bool hidden = i % c->tokens == 0 || random_number() < 0;
            in->mask[i * c->cells + j] =
                ggml_fp32_to_fp16(hidden ? -INFINITY : -fabsf(8 * random_number()));
        }
}

/* Numbers that fp16 holds, so that both caches hold the same numbers. Cells are in random order. */
static inline struct inputs make_inputs(const struct attention_case *c)
{
    struct inputs in = { .n_rows = (size_t)(c->first_stream + c->streams) * N_CELLS };

    in.q = random_numbers((size_t)(c->k_dim * c->heads * c->tokens * c->streams));
    in.k = random_numbers(in.n_rows * (size_t)(c->k_dim * c->kv_heads));
    in.v = random_numbers(in.n_rows * (size_t)(c->v_dim * c->kv_heads));
    in.sinks = random_numbers((size_t)c->heads);
    in.index = malloc(in.n_rows * sizeof(int64_t));
    in.mask = malloc((size_t)(c->tokens * c->streams * c->cells) * sizeof(ggml_fp16_t));
    for (size_t i = 0; i < in.n_rows * (size_t)(c->k_dim * c->kv_heads); i++)
        in.k[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(in.k[i]));
    for (size_t i = 0; i < in.n_rows * (size_t)(c->v_dim * c->kv_heads); i++)
        in.v[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(in.v[i]));
    for (size_t i = 0; i < in.n_rows; i++) {
        size_t j = (size_t)((random_number() + 1) / 2 * (float)i);
        in.index[i] = in.index[j];
        in.index[j] = (int64_t)i;
    }
    fill_mask(c, &in);
    return in;
}

static inline void free_inputs(struct inputs *in)
{
    free(in->q);
    free(in->k);
    free(in->v);
    free(in->sinks);
    free(in->index);
    free(in->mask);
}

/* The attention node on caches of the given type, with its inputs. Host inputs are copied to device
 * memory. */
struct node {
    struct ggml_tensor *k, *v, *q, *mask, *sinks, *out;
};

static inline struct ggml_tensor *head_view(struct ggml_context *context, struct ggml_tensor *cache,
                                            int dim, const struct attention_case *c)
{
    size_t element = ggml_element_size(cache);
    struct ggml_tensor *view =
        ggml_view_4d(context, cache, dim, c->kv_heads, c->cells, c->streams, (size_t)dim * element,
                     cache->nb[1], cache->nb[2], (size_t)c->first_stream * cache->nb[2]);

    return ggml_permute(context, view, 0, 2, 1, 3);
}

static inline struct node make_node(struct ggml_context *context, const struct attention_case *c,
                                    enum ggml_type type)
{
    int n_streams = c->first_stream + c->streams;
    struct node n = {
        .k = ggml_new_tensor_3d(context, type, c->k_dim * c->kv_heads, N_CELLS, n_streams),
        .v = ggml_new_tensor_3d(context, type, c->v_dim * c->kv_heads, N_CELLS, n_streams),
        .q = ggml_new_tensor_4d(context, GGML_TYPE_F32, c->k_dim, c->heads, c->tokens, c->streams),
        .mask = c->mask
                    ? ggml_new_tensor_4d(context, GGML_TYPE_F16, c->cells, c->tokens, 1, c->streams)
                    : NULL,
        .sinks = c->sinks ? ggml_new_tensor_1d(context, GGML_TYPE_F32, c->heads) : NULL,
    };

    ggml_set_name(n.k, "cache_k_l0");
    ggml_set_name(n.v, "cache_v_l0");
    n.out = ggml_flash_attn_ext(context, ggml_permute(context, n.q, 0, 2, 1, 3),
                                head_view(context, n.k, c->k_dim, c),
                                head_view(context, n.v, c->v_dim, c), n.mask,
                                1.0f / sqrtf((float)c->k_dim), c->max_bias, c->softcap);
    ggml_flash_attn_ext_add_sinks(n.out, n.sinks);
    return n;
}

static inline void set_inputs(const struct node *n, const struct inputs *in)
{
    ggml_backend_tensor_set(n->q, in->q, 0, ggml_nbytes(n->q));
    if (n->mask != NULL)
        ggml_backend_tensor_set(n->mask, in->mask, 0, ggml_nbytes(n->mask));
    if (n->sinks != NULL)
        ggml_backend_tensor_set(n->sinks, in->sinks, 0, ggml_nbytes(n->sinks));
}

static inline float *result(const struct node *n)
{
    float *out = malloc(ggml_nbytes(n->out));

    assert_non_null(out);
    ggml_backend_tensor_get(n->out, out, 0, ggml_nbytes(n->out));
    return out;
}

/* A cache whose rows enter through SET_ROWS in the order of index; row i of in->k belongs to cell
 * i. */
struct filled {
    struct device device;
    struct node node;
};

static inline struct filled fill_kvant(const struct attention_case *c, const struct inputs *in,
                                       int n_threads)
{
    struct filled filled = { .device = open_device(kvant_device(), n_threads) };
    struct ggml_context *context = filled.device.context;
    const int64_t n_rows = (int64_t)in->n_rows;
    struct ggml_tensor *k_rows =
        ggml_new_tensor_2d(context, GGML_TYPE_F32, c->k_dim * c->kv_heads, n_rows);
    struct ggml_tensor *v_rows =
        ggml_new_tensor_2d(context, GGML_TYPE_F32, c->v_dim * c->kv_heads, n_rows);
    struct ggml_tensor *index = ggml_new_tensor_1d(context, GGML_TYPE_I64, n_rows);
    struct node n = filled.node = make_node(context, c, GGML_TYPE_F16);
    struct ggml_tensor *nodes[2] = {
        ggml_set_rows(context, ggml_reshape_2d(context, n.k, n.k->ne[0], n_rows), k_rows, index),
        ggml_set_rows(context, ggml_reshape_2d(context, n.v, n.v->ne[0], n_rows), v_rows, index),
    };

    allocate(&filled.device);
    set_inputs(&n, in);
    ggml_backend_tensor_set(index, in->index, 0, ggml_nbytes(index));
    for (size_t i = 0; i < in->n_rows; i++) {
        size_t cell = (size_t)in->index[i];
        ggml_backend_tensor_set(k_rows, in->k + cell * (size_t)k_rows->ne[0], i * k_rows->nb[1],
                                k_rows->nb[1]);
        ggml_backend_tensor_set(v_rows, in->v + cell * (size_t)v_rows->ne[0], i * v_rows->nb[1],
                                v_rows->nb[1]);
    }
    /* Attention shows head_dim. */
    assert_true(ggml_backend_dev_supports_op(filled.device.device, n.out));
    compute(&filled.device, nodes, 2);
    return filled;
}

static inline float *attend(struct filled *filled)
{
    compute(&filled->device, &filled->node.out, 1);
    return result(&filled->node);
}

static inline float *run_cpu(const struct attention_case *c, const struct inputs *in)
{
    struct device device = open_device(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), 1);
    struct node n = make_node(device.context, c, GGML_TYPE_F32);
    float *out;

    allocate(&device);
    set_inputs(&n, in);
    ggml_backend_tensor_set(n.k, in->k, 0, ggml_nbytes(n.k));
    ggml_backend_tensor_set(n.v, in->v, 0, ggml_nbytes(n.v));
    compute(&device, &n.out, 1);
    out = result(&n);
    close_device(&device);
    return out;
}

/* Both sides compute in f32, so differences are rounding, which behaves like noise. With numbers
 * below 1, products have a root mean square of 1/3, and partial sums of a score reach sqrt(k_dim) /
 * 3. There are k_dim roundings of 2^-25 / sqrt(3) of that, times the scale 1 / sqrt(k_dim).
 * Together they are sqrt(k_dim) 2^-25 / 5.
 *
 * A mask of up to 8 rounds by 2^-21. The exponential is good to 2^-21 (and 30 * 2^-24 for exponents
 * down to -30), and sums over cells add sqrt(cells) 2^-25. An output is at most 1, and errs on
 * either side by at most twice the relative error of its probabilities. The test allows 16 standard
 * deviations. Queries or accumulators in fp16 would exceed that. */
static inline double tolerance(const struct attention_case *c)
{
    double unit = ldexp(1, -25), score = 16 * sqrt(c->k_dim) * unit / 5 + 16 * unit;
    double exp_error = 16 * unit + 60 * unit;

    return 2 * 2 * (score + exp_error + 16 * sqrt(c->cells) * unit);
}

#endif
