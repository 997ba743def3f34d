/* test_calibrated_attention.c - queries and attention with codecs of a calibration on the GPU,
 * compared with sums in binary64. test_calibrated.c tests bytes and decoded numbers. */
#include "calibrated_roles.h"

/* Queries and attention: batch x QUERY_HEADS heads, where all sequences have the same blocks. */
enum { BATCH = 3, QUERY_HEADS = 22 };

typedef struct problem {
    role_cache k, v;
    float *rows_k, *rows_v, *q;
    float scale;
} problem;

/* out = softmax(scale <q, k>) v over the decoded rows. Keys lack their centre, which would change
 * all scores by the same amount. */
static void reference(const problem *p, const float *keys, const float *values, uint32_t sequence,
                      uint32_t head, double *out)
{
    const uint32_t d = p->k.d, h = head / (QUERY_HEADS / HEADS);
    double weight[TOKENS], most = -INFINITY, sum = 0;
    memset(out, 0, d * sizeof *out);
    for (uint32_t t = 0; t < TOKENS; t++) {
        weight[t] = 0;
        for (uint32_t j = 0; j < d; j++)
            weight[t] += (double)p->q[((size_t)sequence * QUERY_HEADS + head) * d + j] *
                         keys[((size_t)t * HEADS + h) * d + j];
        weight[t] *= p->scale;
        most = fmax(most, weight[t]);
    }
    for (uint32_t t = 0; t < TOKENS; t++)
        sum += weight[t] = exp(weight[t] - most);
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t j = 0; j < d; j++)
            out[j] += weight[t] / sum * values[((size_t)t * HEADS + h) * d + j];
}

/* Compares numbers with d roundings of sums that cancel little. i: index of the row. */
static void compare_query(const float *got, const float *want, uint32_t d, size_t i)
{
    float largest = 0;
    for (uint32_t j = 0; j < d; j++)
        largest = fmaxf(largest, fabsf(want[j]));
    for (uint32_t j = 0; j < d; j++)
        if (!(fabsf(got[j] - want[j]) <= 2e-5f * largest))
            fail_msg("head_dim %u, query %zu, channel %u: %g, not %g", d, i, j, (double)got[j],
                     (double)want[j]);
}

static void compare_queries(const problem *p, const float *gpu)
{
    const uint32_t d = p->k.d;
    const size_t n = (size_t)BATCH * QUERY_HEADS * d;
    float *got = malloc(n * sizeof *got), want[MAX_D];
    device_read(got, gpu, n * sizeof *got);
    for (size_t i = 0; i < BATCH * QUERY_HEADS; i++) {
        assert_int_equal(
            kvant_codec_transform_query(p->k.codec[i % QUERY_HEADS / (QUERY_HEADS / HEADS)], NULL,
                                        p->q + i * d, want),
            KVANT_OK);
        compare_query(got + i * d, want, d, i);
    }
    free(got);
}

/* The same queries through a further matrix, whose results follow: the same bits as a separate
 * call. */
static void compare_further(const problem *p, const kvant_cuda_kernel_query_args *queries)
{
    const size_t bytes = (size_t)BATCH * QUERY_HEADS * p->k.d * sizeof(float);
    uint8_t *got = malloc(bytes), *want = malloc(bytes);
    kvant_cuda_kernel_query_args alone = *queries;
    alone.inverse_key_transform = queries->further[0];
    alone.n_further = 0;
    alone.out = device_new(bytes, 0xff);
    assert_int_equal(kvant_cuda_kernel_transform_queries(&alone, NULL), KVANT_OK);
    device_read(want, alone.out, bytes);
    device_read(got, (const uint8_t *)queries->out + bytes, bytes);
    assert_memory_equal(got, want, bytes);
    cudaFree(alone.out);
    free(got);
    free(want);
}

/* Many tokens, here BATCH tokens repeated, have a separate kernel. If it need not wait for other
 * calls, it computes the same bits. */
static void transform_many_queries(const problem *p, const kvant_cuda_kernel_query_args *queries)
{
    enum { MANY = 203 };
    const size_t token = (size_t)QUERY_HEADS * p->k.d, part = MANY * token,
                 bytes = 2 * part * sizeof(float);
    float *got = malloc(bytes), *again = malloc(bytes),
          *want = malloc(2 * BATCH * token * sizeof *want), *q = malloc(part * sizeof *q);
    kvant_cuda_kernel_query_args many = *queries;
    for (size_t i = 0; i < part; i++)
        q[i] = p->q[i % (BATCH * token)];
    many.q = device_copy(q, part * sizeof *q);
    many.batch = MANY;
    many.out = device_new(bytes, 0xff);
    assert_int_equal(kvant_cuda_kernel_transform_queries(&many, NULL), KVANT_OK);
    device_read(got, many.out, bytes);
    device_read(want, queries->out, 2 * BATCH * token * sizeof *want);
    for (size_t i = 0; i < 2 * MANY * QUERY_HEADS; i++)
        compare_query(got + i * p->k.d,
                      want + i / (MANY * QUERY_HEADS) * BATCH * token +
                          i % (MANY * QUERY_HEADS) % (BATCH * QUERY_HEADS) * p->k.d,
                      p->k.d, i);
    many.ready = 1;
    check_cuda(cudaMemset(many.out, 0xff, bytes));
    assert_int_equal(kvant_cuda_kernel_transform_queries(&many, NULL), KVANT_OK);
    device_read(again, many.out, bytes);
    assert_memory_equal(again, got, bytes);
    cudaFree((void *)(uintptr_t)many.q);
    cudaFree(many.out);
    free(got);
    free(again);
    free(want);
    free(q);
}

/* The same in the launch that also stores rows; none of these rows is stored. */
static void transform_queries_with_rows(const problem *p,
                                        const kvant_cuda_kernel_query_args *queries)
{
    const uint32_t d = p->k.d;
    const size_t part = (size_t)BATCH * QUERY_HEADS * d;
    const int64_t none[BATCH] = { -1, -1, -1 };
    for (int open = 0; open < 2; open++) {
        void *slots = device_copy(none, sizeof none),
             *rows = device_new((size_t)BATCH * HEADS * d * sizeof(float), 0);
        kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                               .k = gpu_rows_of(&p->k, rows, open),
                                               .n_tokens = BATCH,
                                               .n_kv_heads = HEADS,
                                               .slots = slots,
                                               .queries = *queries };
        args.queries.further[0] = queries->inverse_key_transform;
        check_cuda(cudaMemset(queries->out, 0xff, 2 * part * sizeof(float)));
        assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
        compare_queries(p, queries->out);
        compare_queries(p, queries->out + part);
        args.queries.batch = BATCH - 1;
        assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_ERR_ARGUMENT);
        cudaFree(slots);
        cudaFree(rows);
    }
}

/* The same with more tokens, here one token repeated: blocks of several tokens. */
static void transform_several_with_rows(const problem *p,
                                        const kvant_cuda_kernel_query_args *queries)
{
    enum { SEVERAL = 41 };
    const uint32_t d = p->k.d;
    const size_t token = (size_t)QUERY_HEADS * d, part = SEVERAL * token;
    float *got = malloc(part * sizeof *got), *want = malloc(token * sizeof *want);
    int64_t none[SEVERAL];
    for (int i = 0; i < SEVERAL; i++)
        none[i] = -1;
    void *slots = device_copy(none, sizeof none),
         *rows = device_new((size_t)SEVERAL * HEADS * d * sizeof(float), 0);
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .k = gpu_rows_of(&p->k, rows, false),
                                           .n_tokens = SEVERAL,
                                           .n_kv_heads = HEADS,
                                           .slots = slots,
                                           .queries = *queries };
    args.queries.n_further = 0;
    args.queries.batch = SEVERAL;
    args.queries.q_batch_stride = 0;
    args.queries.out = device_new(part * sizeof *got, 0xff);
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    device_read(got, args.queries.out, part * sizeof *got);
    device_read(want, queries->out, token * sizeof *want);
    for (size_t i = 0; i < (size_t)SEVERAL * QUERY_HEADS; i++)
        compare_query(got + i * d, want + i % QUERY_HEADS * d, d, i);
    cudaFree(args.queries.out);
    cudaFree(slots);
    cudaFree(rows);
    free(got);
    free(want);
}

static float *transform_queries(const problem *p, const void *gpu_q)
{
    const uint32_t d = p->k.d;
    const size_t n = 2 * (size_t)BATCH * QUERY_HEADS * d;
    float *out = device_new(n * sizeof *out, 0xff);
    kvant_cuda_kernel_query_args args = { .size = sizeof args,
                                          .k_codec = p->k.gpu,
                                          .batch = BATCH,
                                          .n_heads = QUERY_HEADS,
                                          .n_kv_heads = HEADS,
                                          .q = gpu_q,
                                          .q_batch_stride = QUERY_HEADS * d,
                                          .q_head_stride = d,
                                          .inverse_key_transform = p->k.inverse,
                                          .out = out,
                                          .n_further = 1,
                                          .further = { p->k.key_transform } };
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_OK);
    compare_queries(p, out);
    compare_further(p, &args);
    transform_many_queries(p, &args);
    transform_queries_with_rows(p, &args);
    transform_several_with_rows(p, &args);
    args.n_further = 2;
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_ERR_ARGUMENT);
    args.n_further = 0;
    args.k_codec = p->v.gpu;
    assert_int_equal(kvant_cuda_kernel_transform_queries(&args, NULL), KVANT_ERR_ARGUMENT);
    return out;
}

/* Queries and probabilities are rounded to 11 bits. The bound 1e-2 of the largest value is ten
 * times that effect. A wrong matrix errs as much as values differ. */
static void check_attention(const problem *p, bool full)
{
    const uint32_t d = p->k.d;
    const size_t n = (size_t)BATCH * QUERY_HEADS * d, rows = (size_t)BLOCKS * 64 * HEADS * d;
    int32_t table[BATCH][BLOCKS] = { { 0, 1, 2 }, { 0, 1, 2 }, { 0, 1, 2 } },
            lengths[BATCH] = { TOKENS, TOKENS, TOKENS };
    void *gpu_table = device_copy(table, sizeof table),
         *gpu_lengths = device_copy(lengths, sizeof lengths);
    void *gpu_q = device_copy(p->q, n * sizeof(float)), *out = device_new(n * sizeof(float), 0xff);
    const size_t workspace = kvant_cuda_attention_workspace(d);
    void *gpu_workspace = device_new(workspace, 0);
    float *transformed = full ? transform_queries(p, gpu_q) : NULL;
    kvant_cuda_kernel_attention_args args = { .size = sizeof args,
                                              .k_codec = p->k.gpu,
                                              .v_codec = p->v.gpu,
                                              .k = gpu_pages(&p->k, false),
                                              .v = gpu_pages(&p->v, false),
                                              .block_table = gpu_table,
                                              .table_stride = BLOCKS,
                                              .blocks_per_row = BLOCKS,
                                              .lengths = gpu_lengths,
                                              .batch = BATCH,
                                              .n_heads = QUERY_HEADS,
                                              .n_kv_heads = HEADS,
                                              .q = full ? transformed : gpu_q,
                                              .q_batch_stride = QUERY_HEADS * d,
                                              .q_head_stride = d,
                                              .out = out,
                                              .out_batch_stride = QUERY_HEADS * d,
                                              .out_head_stride = d,
                                              .scale = p->scale,
                                              .k_scale = full ? NULL : p->k.inverse,
                                              .v_center = p->v.center,
                                              .workspace = gpu_workspace,
                                              .workspace_bytes = workspace };
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
    float *got = malloc(n * sizeof *got), *keys = malloc(rows * sizeof *keys),
          *values = malloc(rows * sizeof *values);
    double want[MAX_D], largest = 0;
    device_read(got, out, n * sizeof *got);
    decode_on_gpu(&p->k, false, keys);
    decode_on_gpu(&p->v, false, values);
    for (size_t i = 0; i < (size_t)TOKENS * HEADS * d; i++)
        largest = fmax(largest, fabs((double)values[i]));
    for (uint32_t i = 0; i < BATCH * QUERY_HEADS; i++) {
        reference(p, keys, values, i / QUERY_HEADS, i % QUERY_HEADS, want);
        for (uint32_t j = 0; j < d; j++)
            if (!(fabs(got[(size_t)i * d + j] - want[j]) <= 1e-2 * largest))
                fail_msg("%s, head_dim %u, query %u, channel %u: %g, not %g",
                         p->k.codec[0]->info.spec, d, i, j, (double)got[(size_t)i * d + j],
                         want[j]);
    }
    void *arrays[] = { gpu_table, gpu_lengths, gpu_q, out, gpu_workspace, transformed };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        cudaFree(arrays[i]);
    free(got);
    free(keys);
    free(values);
}

CASE(attention_through_weights)
{
    static const uint32_t dims[] = { 64, 96, 128, 256, 80, 192 };
    static const struct {
        const char *k, *v;
        bool full;
    } cases[] = { { "trellis-4:transform=file", "trellis-4:center=file,rotate=hadamard", true },
                  { "int-4:transform=file", "int-4", true },
                  { "turboquant-4:transform=diagonal,rotate=hadamard",
                    "turboquant-4:rotate=hadamard", false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t k = 0; k < sizeof dims / sizeof *dims; k++) {
            const uint32_t d = dims[k];
            problem p = { .scale = 0.02f / sqrtf((float)d) };
            kvant_calibration *calibration = calibrate_fixed(d);
            role_open(&p.k, cases[i].k, d, KVANT_ROLE_K, calibration);
            role_open(&p.v, cases[i].v, d, KVANT_ROLE_V, calibration);
            p.rows_k = make_rows(d), p.rows_v = make_rows(d);
            p.q = malloc((size_t)BATCH * QUERY_HEADS * d * sizeof *p.q);
            for (size_t n = 0; n < (size_t)BATCH * QUERY_HEADS * d; n++)
                p.q[n] = 8 * random_normal();
            append_on_gpu(&p.k, p.rows_k, false, KVANT_OK);
            append_on_gpu(&p.v, p.rows_v, false, KVANT_OK);
            check_attention(&p, cases[i].full);
            role_close(&p.k);
            role_close(&p.v);
            kvant_calibration_free(&calibration);
            free(p.rows_k);
            free(p.rows_v);
            free(p.q);
        }
}

RUN_CASES_ON_GPU(NULL, NULL)
