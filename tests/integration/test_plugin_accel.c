/* test_plugin_accel.c - the KVANT_ACCEL device: attention on llama.cpp's own cache against the CPU
 * back end's attention, operation by operation and in the model. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include "ggml.h"
#include "../attention_reference.h"
#include "harness.h"

static ggml_backend_dev_t accel;

static const enum ggml_type types[] = { GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                        GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
                                        GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL };
enum { N_TYPES = sizeof(types) / sizeof(types[0]) };

struct attention_case {
    int heads, kv_heads, k_dim, v_dim, cells, tokens, streams;
    bool mask, sinks;
    float softcap, max_bias;
};

/* The tensors of a case, each in its own memory, and the operation on views as llama.cpp makes
 * them: heads of a token side by side. */
struct operation {
    struct ggml_context *context;
    struct ggml_tensor *q, *k, *v, *mask, *sinks, *node;
};

static uint64_t random_state;

static float random_number(void)
{
    return harness_random(&random_state);
}

static void fill(struct ggml_tensor *tensor)
{
    int64_t n = ggml_nelements(tensor);
    float *x = malloc((size_t)n * sizeof(*x));

    assert_non_null(x);
    for (int64_t i = 0; i < n; i++)
        x[i] = 2 * random_number();
    if (tensor->type == GGML_TYPE_F32)
        memcpy(tensor->data, x, (size_t)n * sizeof(*x));
    else
        ggml_quantize_chunk(tensor->type, x, tensor->data, 0, n / tensor->ne[0], tensor->ne[0],
                            NULL);
    free(x);
}

/* Hides half of the cells from each token, and all of them from the first of several tokens of a
 * stream. */
static void fill_mask(const struct attention_case *c, struct ggml_tensor *mask)
{
    ggml_fp16_t *half = mask->data;

    for (int i = 0; i < c->tokens * c->streams; i++)
        for (int j = 0; j < c->cells; j++) {
            bool hidden = (c->tokens > 1 && i % c->tokens == 0) || random_number() < 0;
            half[(size_t)(i * c->cells + j)] =
                ggml_fp32_to_fp16(hidden ? -INFINITY : -fabsf(8 * random_number()));
        }
}

static struct operation make_operation(const struct attention_case *c, enum ggml_type k_type,
                                       enum ggml_type v_type)
{
    struct ggml_init_params params = { .mem_size = 64u << 20 };
    struct operation o = { .context = ggml_init(params) };
    struct ggml_context *x = o.context;

    o.q = ggml_new_tensor_4d(x, GGML_TYPE_F32, c->k_dim, c->heads, c->tokens, c->streams);
    o.k = ggml_new_tensor_4d(x, k_type, c->k_dim, c->kv_heads, c->cells, c->streams);
    o.v = ggml_new_tensor_4d(x, v_type, c->v_dim, c->kv_heads, c->cells, c->streams);
    fill(o.q);
    fill(o.k);
    fill(o.v);
    if (c->mask) {
        o.mask = ggml_new_tensor_4d(x, GGML_TYPE_F16, c->cells, c->tokens, 1, c->streams);
        fill_mask(c, o.mask);
    }
    o.node = ggml_flash_attn_ext(x, ggml_permute(x, o.q, 0, 2, 1, 3),
                                 ggml_permute(x, o.k, 0, 2, 1, 3), ggml_permute(x, o.v, 0, 2, 1, 3),
                                 o.mask, 1 / sqrtf((float)c->k_dim), c->max_bias, c->softcap);
    if (c->sinks) {
        o.sinks = ggml_new_tensor_1d(x, GGML_TYPE_F32, c->heads);
        fill(o.sinks);
        ggml_flash_attn_ext_add_sinks(o.node, o.sinks);
    }
    return o;
}

static void compute(ggml_backend_dev_t device, struct operation *o)
{
    ggml_backend_t backend = ggml_backend_dev_init(device, NULL);
    struct ggml_cgraph *graph = ggml_new_graph(o->context);

    assert_non_null(backend);
    ggml_build_forward_expand(graph, o->node);
    memset(o->node->data, 0xff, ggml_nbytes(o->node));
    assert_int_equal(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
    ggml_backend_free(backend);
}

/* Decodes row (cell, head, stream) by ggml's own function. */
static void decode(const struct ggml_tensor *t, int cell, int head, int stream, float *x)
{
    const char *row = (const char *)t->data + (size_t)stream * t->nb[3] + (size_t)cell * t->nb[2] +
                      (size_t)head * t->nb[1];

    if (t->type == GGML_TYPE_F32)
        memcpy(x, row, (size_t)t->ne[0] * sizeof(*x));
    else
        ggml_get_type_traits(t->type)->to_float(row, x, t->ne[0]);
}

static float *decode_head(const struct attention_case *c, const struct ggml_tensor *t, int head,
                          int stream)
{
    float *x = malloc((size_t)c->cells * (size_t)t->ne[0] * sizeof(*x));

    assert_non_null(x);
    for (int j = 0; j < c->cells; j++)
        decode(t, j, head / (c->heads / c->kv_heads), stream, x + (size_t)j * (size_t)t->ne[0]);
    return x;
}

/* Attention of one query in double precision. */
static void exact_row(const struct attention_case *c, const struct operation *o, int head,
                      int token, int stream, double *out)
{
    float *keys = decode_head(c, o->k, head, stream), *values = decode_head(c, o->v, head, stream);
    double *weights = malloc((size_t)c->cells * sizeof(*weights)),
           *bias = calloc((size_t)c->cells, sizeof(*bias));
    const ggml_fp16_t *mask = o->mask != NULL ? o->mask->data : NULL;
    const size_t row = (size_t)stream * (size_t)c->tokens + (size_t)token;
    const reference_row r = {
        .q = (const float *)o->q->data + (row * (size_t)c->heads + (size_t)head) * (size_t)c->k_dim,
        .keys = keys,
        .values = values,
        .key_stride = (size_t)c->k_dim,
        .value_stride = (size_t)c->v_dim,
        .n_cells = (uint32_t)c->cells,
        .k_dim = (uint32_t)c->k_dim,
        .v_dim = (uint32_t)c->v_dim,
        .scale = 1 / sqrtf((float)c->k_dim),
        .softcap = c->softcap,
        .bias = bias,
        .sink = o->sinks != NULL ? (const float *)o->sinks->data + head : NULL
    };

    for (int j = 0; mask != NULL && j < c->cells; j++)
        bias[j] = reference_slope((uint32_t)c->heads, c->max_bias, (uint32_t)head) *
                  ggml_fp16_to_fp32(mask[row * (size_t)c->cells + (size_t)j]);
    reference_attention(&r, weights, out);
    free(keys);
    free(values);
    free(weights);
    free(bias);
}

static double *exact_output(const struct attention_case *c, const struct operation *o)
{
    double *out = malloc((size_t)ggml_nelements(o->node) * sizeof(*out));

    assert_non_null(out);
    for (int s = 0; s < c->streams; s++)
        for (int t = 0; t < c->tokens; t++)
            for (int h = 0; h < c->heads; h++)
                exact_row(c, o, h, t, s,
                          out + (size_t)(((s * c->tokens + t) * c->heads + h) * c->v_dim));
    return out;
}

/* The root mean square of the difference. A node that was not computed holds NaNs, which make the
 * result NaN, and no bound accepts that. */
static double distance(const struct operation *o, const double *exact)
{
    const float *x = o->node->data;
    int64_t n = ggml_nelements(o->node);
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (x[i] - exact[i]) * (x[i] - exact[i]);
    return sqrt(sum / (double)n);
}

/* ggml rounds queries to 8 bits or to fp16, and sums f16 values in fp16. In addition it has the
 * roundings of binary32, as we have. With f32, both sides have only the roundings of binary32, in
 * different orders. Then the distance has its own bound: scores have k_dim roundings, sums have as
 * many as there are cells, softmax errs below 2^-19 (kernels.h), and no output exceeds 2. */
static void check_case(const struct attention_case *c, enum ggml_type k_type, enum ggml_type v_type)
{
    struct operation o = make_operation(c, k_type, v_type);
    double *exact = exact_output(c, &o), ours, stock,
           own_roundings = 2 * ((c->k_dim * 16 + c->cells) * 0x1p-24 + 0x1p-19);

    setenv("KVANT_ACCEL", "1", 1);
    assert_true(ggml_backend_dev_supports_op(accel, o.node));
    compute(accel, &o);
    ours = distance(&o, exact);
    compute(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &o);
    stock = distance(&o, exact);
    print_message("%s/%s, head_dim %d, %d tokens: distance to exact %.2g, stock %.2g\n",
                  ggml_type_name(k_type), ggml_type_name(v_type), c->k_dim, c->tokens, ours, stock);
    assert_true(ours <= own_roundings);
    assert_true(ours <= stock || k_type == GGML_TYPE_F32);
    free(exact);
    ggml_free(o.context);
}

CASE(attention_is_nearer_to_exact_than_stock)
{
    static const struct attention_case cases[] = {
        { .heads = 9,
          .kv_heads = 3,
          .k_dim = 64,
          .v_dim = 64,
          .cells = 300,
          .tokens = 1,
          .streams = 1,
          .mask = true },
        { .heads = 9,
          .kv_heads = 3,
          .k_dim = 64,
          .v_dim = 64,
          .cells = 257,
          .tokens = 33,
          .streams = 1,
          .mask = true },
        { .heads = 14,
          .kv_heads = 2,
          .k_dim = 128,
          .v_dim = 64,
          .cells = 1100,
          .tokens = 2,
          .streams = 2,
          .mask = true,
          .sinks = true },
        { .heads = 6,
          .kv_heads = 6,
          .k_dim = 96,
          .v_dim = 96,
          .cells = 70,
          .tokens = 5,
          .streams = 1,
          .mask = true,
          .softcap = 5,
          .max_bias = 8 },
        { .heads = 4,
          .kv_heads = 1,
          .k_dim = 256,
          .v_dim = 256,
          .cells = 63,
          .tokens = 1,
          .streams = 1 },
    };

    random_state = 7;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (int t = 0; t < N_TYPES; t++)
            check_case(&cases[i], types[t], types[t]);
        check_case(&cases[i], GGML_TYPE_Q8_0, GGML_TYPE_Q4_0);
    }
}

/* The CPU keeps all operations except attention on types that kvant knows. */
CASE(other_operations_are_declined)
{
    const struct attention_case odd = {
        .heads = 2, .kv_heads = 2, .k_dim = 40, .v_dim = 40, .cells = 64, .tokens = 1, .streams = 1
    };
    struct operation o = make_operation(&odd, GGML_TYPE_F16, GGML_TYPE_F16);
    struct ggml_tensor *wide = ggml_new_tensor_4d(o.context, GGML_TYPE_F16, 576, 64, 2, 1);
    struct ggml_tensor *wide_q = ggml_new_tensor_4d(o.context, GGML_TYPE_F32, 576, 1, 2, 1);
    struct ggml_tensor *mxfp4 = ggml_new_tensor_4d(o.context, GGML_TYPE_MXFP4, 64, 64, 2, 1);
    struct ggml_tensor *q = ggml_new_tensor_4d(o.context, GGML_TYPE_F32, 64, 1, 2, 1);

    assert_int_equal(ggml_backend_dev_type(accel), GGML_BACKEND_DEVICE_TYPE_ACCEL);
    assert_string_equal(ggml_backend_dev_name(accel), "KVANT_ACCEL");
    assert_ptr_equal(ggml_backend_dev_buffer_type(accel), ggml_backend_cpu_buffer_type());
    assert_true(ggml_backend_dev_supports_buft(accel, ggml_backend_cpu_buffer_type()));
    assert_false(ggml_backend_dev_supports_buft(
        accel, ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(harness_plugin(), 0))));
    assert_false(ggml_backend_dev_supports_op(accel, o.node));
    assert_false(ggml_backend_dev_supports_op(
        accel, ggml_flash_attn_ext(o.context, wide_q, wide, wide, NULL, 1, 0, 0)));
    assert_false(ggml_backend_dev_supports_op(
        accel, ggml_flash_attn_ext(o.context, q, mxfp4, mxfp4, NULL, 1, 0, 0)));
    assert_false(ggml_backend_dev_supports_op(accel, ggml_mul_mat(o.context, o.q, o.q)));
    assert_false(ggml_backend_dev_supports_op(accel, ggml_add(o.context, o.q, o.q)));
    ggml_free(o.context);
}

/* Models */

#define N_PROMPT 160

/* With the same type, both sides round keys and values; llama.cpp's CPU code also rounds queries
 * and sums. So compared with a cache and attention in f32, the device should be no further away
 * than llama.cpp is. Its mean squared error may exceed llama.cpp's by at most 3 standard errors of
 * the difference per token.
 *
 * The test above checks the operation itself ten thousand times as precisely. This model multiplies
 * a rounding by several hundred, because its activations are quantised to 8 bits. */
static void check_logits(const char *type, const float *exact, const float *stock,
                         const float *ours)
{
    const harness_comparison c = harness_compare_logits(ours, stock, exact, N_PROMPT);

    print_message("%s: distance of logits to f32 (rms) %.4f, stock's %.4f; mean squares differ by "
                  "%.5f +- %.5f\n",
                  type, sqrt(c.a), sqrt(c.b), c.a - c.b, c.difference_error);
    assert_true(c.a - c.b <= 3 * c.difference_error);
}

CASE(logits_are_no_further_from_f32_than_stocks)
{
    static const char *const names[] = { "f16", "q8_0", "q4_0" };
    float *exact =
        harness_prompt_logits(&(harness_options){ .exact = true, .n_ctx = 512 }, N_PROMPT);
    size_t bytes = (size_t)N_PROMPT * harness_n_vocab() * sizeof(float);

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        float *stock =
            harness_prompt_logits(&(harness_options){ .type = names[i], .n_ctx = 512 }, N_PROMPT);
        float *ours = harness_prompt_logits(
            &(harness_options){ .type = names[i], .accel = true, .n_ctx = 512 }, N_PROMPT);
        assert_memory_not_equal(stock, ours, bytes); /* so the device took part */
        check_logits(names[i], exact, stock, ours);
        free(stock);
        free(ours);
    }
    free(exact);
}

/* In a context that does not use the device, llama.cpp computes the same bits as before the device
 * was registered. */
static float *before;

CASE(unwanted_instances_change_nothing)
{
    float *after =
        harness_prompt_logits(&(harness_options){ .type = "q8_0", .n_ctx = 512 }, N_PROMPT);

    assert_memory_equal(before, after, (size_t)N_PROMPT * harness_n_vocab() * sizeof(float));
    free(after);
}

#define N_GREEDY 48

/* The largest difference between a logit of llama.cpp's and the same logit with a cache in f32. */
static double stock_error(const float *stock, const float *exact)
{
    double most = 0;

    for (size_t i = 0; i < (size_t)harness_n_vocab(); i++)
        most = fmax(most, fabs((double)stock[i] - exact[i]));
    return most;
}

/* The device writes the same text as llama.cpp, token by token, for a text that the model is sure
 * of. If another token is chosen, rounding decided. With errors of at most e on either side,
 * llama.cpp's logits of the two tokens differ by at most 4 e. */
CASE(greedy_text_is_the_stock_text)
{
    const harness_options options[3] = { { .type = "q8_0", .n_ctx = 512 },
                                         { .type = "q8_0", .accel = true, .n_ctx = 512 },
                                         { .type = "f32", .n_ctx = 512 } };
    llama_token prompt[256];
    int n = harness_counting(prompt, 256), equal = 0;
    struct llama_context *contexts[3];

    for (int i = 0; i < 3; i++) {
        contexts[i] = harness_context(&options[i]);
        harness_decode(contexts[i], prompt, n, 0, 0, false);
    }
    for (int k = 0; k < N_GREEDY; k++) {
        const float *logits[3];
        llama_token chosen[2];
        for (int i = 0; i < 3; i++)
            logits[i] = llama_get_logits_ith(contexts[i], -1);
        for (int i = 0; i < 2; i++)
            chosen[i] = harness_argmax(logits[i]);
        equal += chosen[0] == chosen[1];
        assert_true(logits[0][chosen[0]] - logits[0][chosen[1]] <=
                    4 * stock_error(logits[0], logits[2]));
        for (int i = 0; i < 3; i++)
            harness_decode(contexts[i], &chosen[0], 1, n + k, 0, false);
    }
    print_message("%d of %d tokens are equal\n", equal, N_GREEDY);
    assert_true(equal >= N_GREEDY * 3 / 4);
    for (int i = 0; i < 3; i++)
        llama_free(contexts[i]);
}

/* A state moves from llama.cpp's own cache to the device and back, byte by byte, and each side
 * chooses the next token from it. */
CASE(states_are_stock_states)
{
    struct llama_context *contexts[2];
    llama_token tokens[100];
    uint8_t *from_stock, *from_accel;
    size_t bytes, accel_bytes;

    harness_tokens(tokens, 100);
    for (int i = 0; i < 2; i++)
        contexts[i] =
            harness_context(&(harness_options){ .type = "q4_0", .accel = i == 1, .n_ctx = 256 });
    harness_decode(contexts[0], tokens, 99, 0, 0, false);
    from_stock = harness_save_state(contexts[0], &bytes);
    assert_int_equal(llama_state_seq_set_data(contexts[1], from_stock, bytes, 0), bytes);
    from_accel = harness_save_state(contexts[1], &accel_bytes);
    assert_int_equal(bytes, accel_bytes);
    assert_memory_equal(from_stock, from_accel, bytes);
    for (int i = 0; i < 2; i++)
        harness_decode(contexts[i], tokens + 99, 1, 99, 0, false);
    assert_int_equal(harness_argmax(llama_get_logits_ith(contexts[0], -1)),
                     harness_argmax(llama_get_logits_ith(contexts[1], -1)));
    free(from_stock);
    free(from_accel);
    llama_free(contexts[0]);
    llama_free(contexts[1]);
}

static int start(void **state)
{
    if (harness_start(state) != 0)
        return -1;
    before = harness_prompt_logits(&(harness_options){ .type = "q8_0", .n_ctx = 512 }, N_PROMPT);
    accel = harness_add_accel();
    return 0;
}

static int stop(void **state)
{
    free(before);
    return harness_stop(state);
}

RUN_CASES(start, stop)
