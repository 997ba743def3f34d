/* test_blocks.c - attention over rows in ggml's formats on the GPU, against the CPU's attention
 * (kvant/block_attention.h), which computes in binary32. */
#include "cuda_support.h"

#include <kvant/block_attention.h>

typedef struct problem {
    kvant_block_type type;
    uint32_t head_dim, n_tokens, batch, query_tokens, n_heads, n_kv_heads;
    bool mask, sinks;
    float softcap, max_bias;
} problem;

/* Arrays of a problem, on the host and on the device. */
typedef struct arrays {
    uint8_t *rows[2], *gpu_rows[2];
    float *q, *gpu_q, *sinks, *gpu_sinks, *gpu_out;
    uint16_t *mask, *gpu_mask;
    size_t row_bytes, token_stride, batch_stride, n_q;
    uint32_t mask_stride;
} arrays;

static size_t block_bytes(kvant_block_type type)
{
    return type == KVANT_BLOCK_Q8_0 ? 34 : 18;
}

/* Random codes with scales that give numbers of variance about 1. */
static uint8_t *random_rows(const problem *p, size_t bytes)
{
    const size_t block = block_bytes(p->type);
    uint8_t *rows = malloc(bytes);
    for (size_t i = 0; i < bytes; i += block) {
        size_t size;
        const float scale =
            random_uniform(0.7f, 1.3f) / (p->type == KVANT_BLOCK_Q8_0 ? 74.0f : 4.6f);
        void *half = to_type(&scale, 1, KVANT_CUDA_F16, &size);
        memcpy(rows + i, half, 2);
        free(half);
        for (size_t j = 2; j < block; j++)
            rows[i + j] = (uint8_t)random_bits();
    }
    return rows;
}

static uint16_t *random_mask(const problem *p, uint32_t stride)
{
    const size_t n = (size_t)p->batch * p->query_tokens * stride;
    float *mask = malloc(n * sizeof *mask);
    size_t bytes;
    for (size_t i = 0; i < n; i++)
        mask[i] = i / stride % p->query_tokens == 1 || random_uniform(0, 1) < 0.4f
                      ? -INFINITY
                      : -fabsf(random_normal());
    void *halves = to_type(mask, n, KVANT_CUDA_F16, &bytes);
    free(mask);
    return halves;
}

static arrays arrays_new(const problem *p)
{
    arrays a = { .row_bytes = p->head_dim / 32 * block_bytes(p->type) };
    a.token_stride = p->n_kv_heads * a.row_bytes;
    a.batch_stride = (p->n_tokens + 5) * a.token_stride;
    a.mask_stride = (p->n_tokens + 31) / 32 * 32;
    a.n_q = (size_t)p->batch * p->query_tokens * p->n_heads * p->head_dim;
    a.q = malloc(a.n_q * sizeof *a.q);
    for (size_t i = 0; i < a.n_q; i++)
        a.q[i] = random_normal();
    for (int r = 0; r < 2; r++) {
        a.rows[r] = random_rows(p, p->batch * a.batch_stride);
        a.gpu_rows[r] = device_copy(a.rows[r], p->batch * a.batch_stride);
    }
    a.gpu_q = device_copy(a.q, a.n_q * sizeof *a.q);
    a.gpu_out = device_new(a.n_q * sizeof *a.q, 0xff);
    if (p->mask) {
        a.mask = random_mask(p, a.mask_stride);
        a.gpu_mask = device_copy(a.mask, (size_t)p->batch * p->query_tokens * a.mask_stride *
                                             sizeof *a.mask);
    }
    if (p->sinks) {
        a.sinks = malloc(p->n_heads * sizeof *a.sinks);
        for (uint32_t i = 0; i < p->n_heads; i++)
            a.sinks[i] = random_uniform(0, 4);
        a.gpu_sinks = device_copy(a.sinks, p->n_heads * sizeof *a.sinks);
    }
    return a;
}

static void arrays_free(arrays *a)
{
    for (int r = 0; r < 2; r++) {
        free(a->rows[r]);
        cudaFree(a->gpu_rows[r]);
    }
    free(a->q);
    free(a->mask);
    free(a->sinks);
    cudaFree(a->gpu_q);
    cudaFree(a->gpu_out);
    cudaFree(a->gpu_mask);
    cudaFree(a->gpu_sinks);
}

static kvant_cuda_block_args arguments(const problem *p, const arrays *a)
{
    const size_t token = (size_t)p->n_heads * p->head_dim;
    kvant_cuda_block_args args = { .size = sizeof args,
                                   .head_dim = p->head_dim,
                                   .n_tokens = p->n_tokens,
                                   .batch = p->batch,
                                   .query_tokens = p->query_tokens,
                                   .n_heads = p->n_heads,
                                   .n_kv_heads = p->n_kv_heads,
                                   .q = a->gpu_q,
                                   .q_batch_stride = p->query_tokens * token,
                                   .q_token_stride = token,
                                   .q_head_stride = p->head_dim,
                                   .out = a->gpu_out,
                                   .out_batch_stride = p->query_tokens * token,
                                   .out_token_stride = token,
                                   .out_head_stride = p->head_dim,
                                   .scale = 1 / sqrtf((float)p->head_dim),
                                   .logit_softcap = p->softcap,
                                   .max_bias = p->max_bias,
                                   .mask = a->gpu_mask,
                                   .mask_batch_stride = (size_t)p->query_tokens * a->mask_stride,
                                   .mask_token_stride = a->mask_stride,
                                   .sinks = a->gpu_sinks };
    args.k = (kvant_cuda_block_rows){ (uint32_t)p->type, a->gpu_rows[0], a->token_stride,
                                      a->row_bytes, a->batch_stride };
    args.v = (kvant_cuda_block_rows){ (uint32_t)p->type, a->gpu_rows[1], a->token_stride,
                                      a->row_bytes, a->batch_stride };
    return args;
}

static void on_the_cpu(const problem *p, const arrays *a, float *out)
{
    const size_t token = (size_t)p->n_heads * p->head_dim;
    for (uint32_t b = 0; b < p->batch; b++) {
        kvant_block_rows rows[2];
        for (int r = 0; r < 2; r++)
            rows[r] = (kvant_block_rows){ .size = sizeof rows[r],
                                          .type = p->type,
                                          .head_dim = p->head_dim,
                                          .n_kv_heads = p->n_kv_heads,
                                          .data = a->rows[r] + b * a->batch_stride,
                                          .bytes = a->batch_stride,
                                          .token_stride = a->token_stride,
                                          .head_stride = a->row_bytes };
        const kvant_attention_problem one = {
            .size = sizeof one,
            .n_tokens = p->n_tokens,
            .n_queries = p->query_tokens,
            .n_heads = p->n_heads,
            .q = a->q + b * p->query_tokens * token,
            .q_token_stride = token,
            .q_head_stride = p->head_dim,
            .mask = a->mask ? a->mask + (size_t)b * p->query_tokens * a->mask_stride : NULL,
            .mask_token_stride = a->mask_stride,
            .sinks = a->sinks,
            .scale = 1 / sqrtf((float)p->head_dim),
            .max_bias = p->mask ? p->max_bias : 0,
            .logit_softcap = p->softcap,
            .out = out + b * p->query_tokens * token,
            .out_token_stride = token,
            .out_head_stride = p->head_dim,
            .n_threads = 4
        };
        size_t bytes;
        assert_int_equal(kvant_block_attention_workspace(&rows[0], &rows[1], &one, &bytes),
                         KVANT_OK);
        void *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
        assert_int_equal(kvant_block_attention(&rows[0], &rows[1], &one, workspace, bytes),
                         KVANT_OK);
        free(workspace);
    }
}

/* Scores err by 2^-11 of sum |q k|, because queries are rounded, and by less for sums. Weights and
 * values are rounded by 2^-11 each. With channels of variance 1 and the scale 1 / 16, the sum of |q
 * k| over 256 channels is below 20. */
static void check(const problem *p)
{
    arrays a = arrays_new(p);
    kvant_cuda_block_args args = arguments(p, &a);
    float *out = malloc(a.n_q * sizeof *out), *exact = malloc(a.n_q * sizeof *exact), worst = 0;
    const float score = 20 * 0x1p-11f, bound = 4.0f * (2 * score + 2 * 0x1p-11f + 0x1p-16f);

    args.workspace_bytes = kvant_cuda_block_workspace(&args);
    assert_true(args.workspace_bytes > 0);
    args.workspace = device_new(args.workspace_bytes, 0);
    for (int i = 0; i < 2; i++) /* each call leaves the workspace ready for the next call */
        assert_int_equal(kvant_cuda_block_attention(&args, NULL), KVANT_OK);
    device_read(out, a.gpu_out, a.n_q * sizeof *out);
    on_the_cpu(p, &a, exact);
    for (size_t i = 0; i < a.n_q; i++) {
        const float error = fabsf(out[i] - exact[i]);
        worst = error > worst || isnan(error) ? error : worst;
        if (isnan(worst))
            break;
    }
    print_message("type %d, head_dim %u, %u tokens, %u x %u query rows, %u kv heads: largest error "
                  "%.5f of %.5f\n",
                  (int)p->type, p->head_dim, p->n_tokens, p->batch,
                  p->query_tokens * (p->n_heads / p->n_kv_heads), p->n_kv_heads, (double)worst,
                  (double)bound);
    assert_true(worst <= bound);
    cudaFree(args.workspace);
    free(out);
    free(exact);
    arrays_free(&a);
}

CASE(attention_is_the_cpus)
{
    static const kvant_block_type types[] = { KVANT_BLOCK_Q8_0, KVANT_BLOCK_Q4_0 };
    static const uint32_t dims[] = { 64, 128, 256 };
    for (int t = 0; t < 2; t++)
        for (int d = 0; d < 3; d++) {
            check(&(problem){ types[t], dims[d], 1000, 1, 1, 8, 2, false, false, 0, 0 });
            check(&(problem){ types[t], dims[d], 4097, 2, 3, 8, 2, true, true, 0, 0 });
            check(&(problem){ types[t], dims[d], 1, 1, 1, 3, 3, false, true, 0, 0 });
            check(&(problem){ types[t], dims[d], 300, 3, 16, 2, 2, true, false, 5, 8 });
        }
}

/* Tokens whose rows are damaged. */
static const uint32_t damaged[] = { 0, 5, 6, 15, 16, 130, 299 };
#define N_DAMAGED (sizeof damaged / sizeof *damaged)

/* Odd query tokens see the damaged tokens, even query tokens do not. */
static void hide_damage(const problem *p, arrays *a)
{
    const size_t rows = (size_t)p->batch * p->query_tokens;
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < N_DAMAGED; i++)
            a->mask[row * a->mask_stride + damaged[i]] = row % p->query_tokens % 2 ? 0 : 0xfc00;
    cudaFree(a->gpu_mask);
    a->gpu_mask = device_copy(a->mask, rows * a->mask_stride * sizeof *a->mask);
}

/* Scales of the damaged tokens' keys (0) or values (1) become NaN, infinite or, in fp16 products
 * with codes, infinite. */
static void damage_rows(const problem *p, arrays *a, int which, uint16_t scale)
{
    for (uint32_t b = 0; b < p->batch; b++)
        for (size_t i = 0; i < N_DAMAGED; i++)
            for (size_t at = 0; at < a->token_stride; at += block_bytes(p->type))
                memcpy(a->rows[which] + b * a->batch_stride + damaged[i] * a->token_stride + at,
                       &scale, sizeof scale);
    cudaFree(a->gpu_rows[which]);
    a->gpu_rows[which] = device_copy(a->rows[which], p->batch * a->batch_stride);
}

static void attend(const problem *p, const arrays *a, float *out)
{
    kvant_cuda_block_args args = arguments(p, a);
    args.workspace_bytes = kvant_cuda_block_workspace(&args);
    args.workspace = device_new(args.workspace_bytes, 0);
    assert_int_equal(kvant_cuda_block_attention(&args, NULL), KVANT_OK);
    device_read(out, a->gpu_out, a->n_q * sizeof *out);
    cudaFree(args.workspace);
}

/* Outputs of query tokens that see no damage keep their bits. All remaining outputs are not finite
 * if the scales are not. A large finite key may also win or lose everywhere. */
static void check_damage(const problem *p, int which, uint16_t scale)
{
    arrays a = arrays_new(p);
    const size_t token = (size_t)p->n_heads * p->head_dim;
    float *out = malloc(a.n_q * sizeof *out), *before = malloc(a.n_q * sizeof *before);
    hide_damage(p, &a);
    attend(p, &a, before);
    damage_rows(p, &a, which, scale);
    attend(p, &a, out);
    for (size_t i = 0; i < a.n_q; i++) {
        if (i / token % p->query_tokens % 2 == 0)
            assert_memory_equal(&out[i], &before[i], sizeof *out);
        else
            assert_true(!isfinite(out[i]) || scale == 0x7bff);
    }
    free(out);
    free(before);
    arrays_free(&a);
}

CASE(hidden_rows_have_no_influence)
{
    static const kvant_block_type types[] = { KVANT_BLOCK_Q8_0, KVANT_BLOCK_Q4_0 };
    static const uint32_t dims[] = { 64, 128, 256 };
    static const uint16_t scales[] = { 0x7e00, 0x7c00, 0x7bff };
    for (int t = 0; t < 2; t++)
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < 6; i++) {
                check_damage(&(problem){ types[t], dims[d], 300, 2, 1, 8, 2, true, true, 0, 0 },
                             i % 2, scales[i / 2]);
                check_damage(&(problem){ types[t], dims[d], 300, 1, 2, 8, 2, true, false, 0, 0 },
                             i % 2, scales[i / 2]);
                check_damage(&(problem){ types[t], dims[d], 4097, 2, 4, 8, 2, true, false, 0, 0 },
                             i % 2, scales[i / 2]);
            }
}

CASE(others_are_not_taken)
{
    const problem p = { KVANT_BLOCK_Q8_0, 128, 64, 1, 1, 8, 2, false, false, 0, 0 };
    arrays a = arrays_new(&p);
    kvant_cuda_block_args args = arguments(&p, &a), other = args;
    other.query_tokens = 5;
    assert_int_equal(kvant_cuda_block_workspace(&other), 0);
    other = args, other.head_dim = 96;
    assert_int_equal(kvant_cuda_block_workspace(&other), 0);
    other = args, other.k.type = KVANT_BLOCK_F16;
    assert_int_equal(kvant_cuda_block_attention(&other, NULL), KVANT_ERR_UNSUPPORTED);
    other = args, other.k.data = a.gpu_rows[0] + 2;
    assert_int_equal(kvant_cuda_block_attention(&other, NULL), KVANT_ERR_UNSUPPORTED);
    other = args, other.workspace = a.gpu_out, other.workspace_bytes = 16;
    assert_int_equal(kvant_cuda_block_attention(&other, NULL), KVANT_ERR_ARGUMENT);
    arrays_free(&a);
}

RUN_CASES_ON_GPU(NULL, NULL)
