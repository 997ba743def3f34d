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

/* Decodes row (cell, head, stream) of a node's keys or values by ggml's own function. */
static void decode(const struct ggml_tensor *t, int64_t cell, int64_t head, int64_t stream,
                   float *x)
{
    const char *row = (const char *)t->data + (size_t)stream * t->nb[3] + (size_t)head * t->nb[2] +
                      (size_t)cell * t->nb[1];

    if (t->type == GGML_TYPE_F32)
        memcpy(x, row, (size_t)t->ne[0] * sizeof(*x));
    else
        ggml_get_type_traits(t->type)->to_float(row, x, t->ne[0]);
}

static float *decode_head(const struct ggml_tensor *t, int64_t head, int64_t stream)
{
    float *x = malloc((size_t)(t->ne[1] * t->ne[0]) * sizeof(*x));

    assert_non_null(x);
    for (int64_t j = 0; j < t->ne[1]; j++)
        decode(t, j, head, stream, x + j * t->ne[0]);
    return x;
}

/* The query of a node in a row that reference_attention() takes. */
static reference_row query_row(const struct ggml_tensor *node, int64_t head, int64_t token,
                               int64_t stream)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *sinks = node->src[4];
    const char *data = (const char *)q->data + (size_t)stream * q->nb[3] + (size_t)head * q->nb[2] +
                       (size_t)token * q->nb[1];
    float parameters[3]; /* scale, max_bias, logit_softcap */

    memcpy(parameters, node->op_params, sizeof(parameters));
    return (reference_row){ .q = (const float *)(const void *)data,
                            .key_stride = (size_t)k->ne[0],
                            .value_stride = (size_t)node->src[2]->ne[0],
                            .n_cells = (uint32_t)k->ne[1],
                            .k_dim = (uint32_t)k->ne[0],
                            .v_dim = (uint32_t)node->src[2]->ne[0],
                            .scale = parameters[0],
                            .softcap = parameters[2],
                            .sink = sinks != NULL ? (const float *)sinks->data + head : NULL };
}

/* The bias that an attention node adds to the scores of a query. */
static double *bias_of(const struct ggml_tensor *node, int64_t head, int64_t token, int64_t stream)
{
    const struct ggml_tensor *mask = node->src[3];
    const int64_t n_cells = node->src[1]->ne[1];
    double *bias = calloc((size_t)n_cells, sizeof(*bias));
    const ggml_fp16_t *row;
    float max_bias;

    assert_non_null(bias);
    if (mask == NULL)
        return bias;
    memcpy(&max_bias, node->op_params + 1, sizeof(max_bias));
    row = (const void *)((const char *)mask->data + (size_t)stream * mask->nb[3] +
                         (size_t)token * mask->nb[1]);
    for (int64_t j = 0; j < n_cells; j++)
        bias[j] = reference_slope((uint32_t)node->src[0]->ne[2], max_bias, (uint32_t)head) *
                  ggml_fp16_to_fp32(row[j]);
    return bias;
}

/* Attention of one head in double precision, into its part of out. */
static void exact_head(const struct ggml_tensor *node, int64_t head, int64_t stream, double *out)
{
    const struct ggml_tensor *q = node->src[0], *k = node->src[1], *v = node->src[2];
    const int64_t n_heads = q->ne[2], kv_head = head / (n_heads / k->ne[2]);
    float *keys = decode_head(k, kv_head, stream), *values = decode_head(v, kv_head, stream);
    double *weights = malloc((size_t)k->ne[1] * sizeof(*weights));

    assert_non_null(weights);
    for (int64_t t = 0; t < q->ne[1]; t++) {
        reference_row r = query_row(node, head, t, stream);
        double *bias = bias_of(node, head, t, stream);
        r.keys = keys;
        r.values = values;
        r.bias = bias;
        reference_attention(&r, weights,
                            out + ((stream * q->ne[1] + t) * n_heads + head) * v->ne[0]);
        free(bias);
    }
    free(keys);
    free(values);
    free(weights);
}

static double *exact_output(const struct ggml_tensor *node)
{
    double *out = malloc((size_t)ggml_nelements(node) * sizeof(*out));

    assert_non_null(out);
    for (int64_t s = 0; s < node->src[0]->ne[3]; s++)
        for (int64_t h = 0; h < node->src[0]->ne[2]; h++)
            exact_head(node, h, s, out);
    return out;
}

/* The root mean square of the difference. A node that was not computed holds NaNs, which make the
 * result NaN, and no bound accepts that. */
static double distance(const struct ggml_tensor *node, const double *exact)
{
    const float *x = node->data;
    int64_t n = ggml_nelements(node);
    double sum = 0;

    for (int64_t i = 0; i < n; i++)
        sum += (x[i] - exact[i]) * (x[i] - exact[i]);
    return sqrt(sum / (double)n);
}

/* The largest norm of a row of queries, keys or values. */
static double largest_norm(const struct ggml_tensor *t)
{
    float *x = malloc((size_t)t->ne[0] * sizeof(*x));
    double largest = 0;

    assert_non_null(x);
    for (int64_t i = 0; i < ggml_nrows(t); i++) {
        double sum = 0;
        decode(t, i % t->ne[1], i / t->ne[1] % t->ne[2], i / t->ne[1] / t->ne[2], x);
        for (int64_t j = 0; j < t->ne[0]; j++)
            sum += (double)x[j] * x[j];
        largest = fmax(largest, sqrt(sum));
    }
    free(x);
    return largest;
}

/* A bound on the distance that the roundings of binary32 cause. Each of a score's k_dim roundings
 * is at most 2^-24 of the sum of the products' sizes. This sum is at most the product of the norms.
 * An output has as many roundings as there are cells, and softmax errs below 2^-19 (kernels.h). An
 * error of all weights counts twice, because the sum of the weights has it, too. */
static double binary32_roundings(const struct ggml_tensor *node)
{
    const struct ggml_tensor *k = node->src[1], *v = node->src[2];
    double score = largest_norm(node->src[0]) * largest_norm(k) * query_row(node, 0, 0, 0).scale,
           weights = (double)k->ne[0] * score * 0x1p-24 + 0x1p-19 + (double)k->ne[1] * 0x1p-24;

    return 2 * weights * largest_norm(v) / sqrt((double)v->ne[0]);
}

/* ggml rounds queries to 8 bits or to fp16, and sums f16 values in fp16. In addition it has the
 * roundings of binary32, as we have. With f32, both sides have only the roundings of binary32, in
 * different orders. */
static void check_case(const struct attention_case *c, enum ggml_type k_type, enum ggml_type v_type)
{
    struct operation o = make_operation(c, k_type, v_type);
    double *exact = exact_output(o.node), ours, stock;

    setenv("KVANT_ACCEL", "1", 1);
    assert_true(ggml_backend_dev_supports_op(accel, o.node));
    compute(accel, &o);
    ours = distance(o.node, exact);
    compute(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &o);
    stock = distance(o.node, exact);
    print_message(
        "%s/%s, head_dim %d, %d tokens: distance to exact %.2g (bound %.2g), stock %.2g\n",
        ggml_type_name(k_type), ggml_type_name(v_type), c->k_dim, c->tokens, ours,
        binary32_roundings(o.node), stock);
    assert_true(ours <= binary32_roundings(o.node));
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

/* Sums over a model's attention nodes. */
static struct {
    int n_nodes;
    double ours, stock, bound; /* squares of distances to double precision */
} nodes;

/* A tensor with the same data that no graph computes. */
static struct ggml_tensor *leaf_of(struct ggml_context *x, const struct ggml_tensor *t)
{
    struct ggml_tensor *leaf = ggml_new_tensor_1d(x, GGML_TYPE_F32, 1);

    *leaf = *t;
    leaf->op = GGML_OP_NONE;
    leaf->view_src = NULL;
    memset(leaf->src, 0, sizeof(leaf->src));
    return leaf;
}

/* The distance of the CPU back end's result for a node that the device computed. */
static double stock_distance(const struct ggml_tensor *node, const double *exact)
{
    struct ggml_init_params params = { .mem_size = 64u << 20 };
    struct operation o = { .context = ggml_init(params) };
    double result;

    o.node = ggml_dup_tensor(o.context, node);
    o.node->op = node->op;
    memcpy(o.node->op_params, node->op_params, sizeof(node->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++)
        o.node->src[i] = node->src[i] != NULL ? leaf_of(o.context, node->src[i]) : NULL;
    compute(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &o);
    result = distance(o.node, exact);
    ggml_free(o.context);
    return result;
}

/* Called by llama.cpp before and after each node of a graph. A failure here would jump over frames
 * of llama.cpp, so the test checks the sums afterwards. */
static bool add_node(struct ggml_tensor *node, bool ask, void *user)
{
    double *exact, ours, stock, bound;

    if (node->op != GGML_OP_FLASH_ATTN_EXT || ask)
        return node->op == GGML_OP_FLASH_ATTN_EXT;
    exact = exact_output(node);
    ours = distance(node, exact);
    stock = stock_distance(node, exact);
    bound = binary32_roundings(node);
    nodes.n_nodes++;
    nodes.ours += ours * ours;
    nodes.stock += stock * stock;
    nodes.bound += bound * bound;
    free(exact);
    return true;
}

/* With rows of the model, the device computes attention as precisely as with random rows. On the
 * same queries and the same q8_0 or q4_0 rows it is nearer to double precision than llama.cpp is.
 * With f16 and a prompt, llama.cpp does not round queries either. If the CPU back end computed the
 * nodes, both distances would be equal. The logits have the same bits when no callback stops the
 * graph after each node.
 *
 * Distances of logits to those of an f32 cache do not show this. They are the errors of the rows,
 * and the model multiplies a rounding of attention by several hundred. With the narrow model, q4_0
 * and these 160 tokens, the distance is 0.76 for llama.cpp, 0.94 for the device, and 0.98 for
 * attention in double precision on the same rows. On 64 other texts, the mean squares of the device
 * and of llama.cpp differ by -0.05 +- 0.04. On a single text, they often differ by more than 3
 * standard errors over tokens, in both directions, because a token's error reaches all later
 * tokens. */
CASE(attention_of_a_model_is_nearer_to_exact_than_stock)
{
    static const char *const names[] = { "f16", "q8_0", "q4_0" };
    size_t bytes = (size_t)N_PROMPT * harness_n_vocab() * sizeof(float);

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        harness_options options = { .type = names[i], .accel = true, .n_ctx = 512 };
        float *ours = harness_prompt_logits(&options, N_PROMPT), *stopped;
        memset(&nodes, 0, sizeof(nodes));
        options.eval = add_node;
        stopped = harness_prompt_logits(&options, N_PROMPT);
        print_message("%s: distance to exact in %d nodes %.2g (bound %.2g), stock %.2g\n", names[i],
                      nodes.n_nodes, sqrt(nodes.ours), sqrt(nodes.bound), sqrt(nodes.stock));
        assert_int_equal(nodes.n_nodes, llama_model_n_layer(harness_model()));
        assert_true(nodes.ours <= nodes.bound);
        assert_true(nodes.ours != nodes.stock);
        assert_true(nodes.ours <= nodes.stock || strcmp(names[i], "f16") == 0);
        assert_memory_equal(stopped, ours, bytes);
        free(ours);
        free(stopped);
    }
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
