/* test_cuda_attention.c - decode attention on the GPU against softmax in double precision over the CPU
 * decoder's rows.
 *
 * The bound is derived, not tuned; docs/cuda.md has the derivation. With u = 2^-11 (fp16), for one query
 * head:
 *   delta   = scale (unit 2^-12 sum |y_t| + step_error s_t |q|_1) + rounding: the largest error of a score,
 *   where
 *             unit is the power of two above max |R q|, y_t the decoded key in rotated space (L1 norm), s_t
 *             its
 *             stored scale, step_error the largest distance of a codebook entry from the byte that stands
 *             for it;
 *   e^(2 delta) - 1 bounds the relative error of a probability;
 *   a value's weight is rounded to fp16: u relative, and 2^-25 of the largest weight absolute (subnormal);
 *   scales of groups of 32 tokens of a channel multiply query numbers, which are rounded to fp16 again;
 *   those of 32 channels of
 *   a token multiply weights, which are rounded again;
 *   the values' codebook error is step_error s_t a channel, sqrt(d) of it in the L2 norm, which rotations
 *   keep;
 *   sums run in fp32 (2^-22 a step, tensor cores truncate) over numbers as large as their bias;
 *   the output is rounded to its type. */
#include "cuda_support.h"

#include <math.h>

#include "../../src/base/half.h"
#include "../../src/cuda/params.h"

enum { MAX_D = 256 };

/* Chunks: a direction, a norm and their product are rounded to fp16, (1 + 2^-11)^3, and the direction
 * comes of a few fp32 operations; where they are subnormal the errors are 2^-25 of their units, which are
 * 32 and at most 6. */
#define CHUNK_RELATIVE (3.02 * 0x1p-11)
#define CHUNK_ABSOLUTE 0x1p-20

typedef struct attention_case {
    const char *k_spec, *v_spec;
    uint32_t head_dim, n_kv_heads, n_heads, batch;
    kvant_cuda_type type;
    const int32_t *lengths;
    bool center;    /* of values, and factors of both */
    float key_size; /* how sharp the softmax is */
    uint32_t open;  /* 0: no open blocks; 1: all; n: about one of n, and the last of every sequence */
} attention_case;

typedef struct fixture {
    const attention_case *c;
    test_cache cache;
    test_open_pool open;
    uint32_t blocks_per_row;
    int32_t *table;
    float *q, *center, *k_factors, *v_factors;
    void *gpu_q, *gpu_out, *gpu_table, *gpu_lengths, *gpu_center, *gpu_k_factors, *gpu_v_factors, *workspace;
    float *gpu_lse;
    size_t q_bytes, out_bytes, workspace_bytes;
    double worst; /* error / bound */
} fixture;

/* Sequences share no block; table entries beyond a sequence's end point nowhere near the pool. A block has
 * the same number in both pools, and the bytes of the one that is not used are all ones. */
static void fill_table(fixture *f)
{
    uint32_t n = 0, *order = malloc(f->cache.n_blocks * sizeof *order);
    for (uint32_t i = 0; i < f->cache.n_blocks; i++)
        order[i] = i;
    for (uint32_t i = f->cache.n_blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(random_bits() % (i + 1)), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    for (uint32_t b = 0; b < f->c->batch; b++)
        for (uint32_t i = 0; i < f->blocks_per_row; i++) {
            bool used = (int64_t)i * 64 < f->c->lengths[b], last = (int64_t)(i + 1) * 64 >= f->c->lengths[b];
            bool open = f->c->open && (last || random_bits() % f->c->open == 0);
            int32_t block = used ? (int32_t)order[n++] : 0x7ffffff;
            f->table[b * f->blocks_per_row + i] = used && open ? -1 - block : block;
        }
    free(order);
}

typedef struct located {
    const kvant_codec *codec;
    void *page;
    bool open;
} located;

/* The page of sequence b that holds token t. */
static located locate(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv_head)
{
    int32_t entry = f->table[b * f->blocks_per_row + (uint32_t)t / 64];
    if (entry < 0)
        return (located){ f->open.codec[role], open_page(&f->open, role, (uint32_t)(-1 - entry), kv_head), true };
    return (located){ role == KVANT_ROLE_K ? f->cache.k : f->cache.v,
                      cache_page(&f->cache, role, (uint32_t)entry, kv_head), false };
}

/* Codecs that take whole blocks get copies of the first row for the tokens that a last block does not
 * have. */
static void encode_block(fixture *f, kvant_role role, uint32_t b, int32_t first, uint32_t kv_head)
{
    const attention_case *c = f->c;
    static float rows[64 * MAX_D];
    uint32_t d = c->head_dim, n = c->lengths[b] - first < 64 ? (uint32_t)(c->lengths[b] - first) : 64;
    for (uint32_t t = 0; t < 64; t++)
        for (uint32_t j = 0; j < d; j++)
            rows[t * d + j] = t >= n ? rows[j]
                                     : random_normal() * (role == KVANT_ROLE_K ? c->key_size : 0.02f) +
                                           (role == KVANT_ROLE_V && j == 3 ? 0.1f : 0);
    const float *factors = role == KVANT_ROLE_V ? f->v_factors : f->k_factors;
    kvant_affine affine = { .center = role == KVANT_ROLE_V && f->center ? f->center + kv_head * d : NULL,
                            .scale = factors ? factors + kv_head * d : NULL };
    located at = locate(f, role, b, first, kv_head);
    kvant_codec_info info = { .size = sizeof info };
    kvant_codec_get_info(at.codec, &info);
    assert_int_equal(kvant_codec_encode(at.codec, &affine, rows, d, 0, info.block_tokens == 1 ? n : 64, at.page),
                     KVANT_OK);
}

static void encode_sequence(fixture *f, uint32_t b)
{
    for (int32_t t = 0; t < f->c->lengths[b]; t += 64)
        for (uint32_t h = 0; h < f->c->n_kv_heads; h++) {
            encode_block(f, KVANT_ROLE_K, b, t, h);
            encode_block(f, KVANT_ROLE_V, b, t, h);
        }
}

static float *make_factors(uint32_t n, void **gpu)
{
    float *factors = malloc(n * sizeof *factors);
    for (uint32_t j = 0; j < n; j++)
        factors[j] = random_uniform(0.5f, 2);
    *gpu = device_copy(factors, n * sizeof *factors);
    return factors;
}

static void fixture_open(fixture *f, const attention_case *c)
{
    *f = (fixture){ .c = c };
    uint32_t n_blocks = 1, longest = 1, d = c->head_dim;
    for (uint32_t b = 0; b < c->batch; b++) {
        uint32_t n = c->lengths[b] > 0 ? ((uint32_t)c->lengths[b] + 63) / 64 : 0;
        n_blocks += n;
        longest = n > longest ? n : longest;
    }
    /* 0xff: what was never written decodes to NaN, so that reading it would show */
    cache_open(&f->cache, c->k_spec, c->v_spec, d, c->n_kv_heads, n_blocks, 0xff);
    open_pool_new(&f->open, &f->cache);
    f->blocks_per_row = longest;
    f->table = malloc(c->batch * longest * sizeof *f->table);
    fill_table(f);
    if (c->center) {
        f->center = malloc(c->n_kv_heads * d * sizeof *f->center);
        for (uint32_t j = 0; j < c->n_kv_heads * d; j++)
            f->center[j] = random_normal() * 0.05f;
        f->gpu_center = device_copy(f->center, c->n_kv_heads * d * sizeof *f->center);
        f->k_factors = make_factors(c->n_kv_heads * d, &f->gpu_k_factors);
        f->v_factors = make_factors(c->n_kv_heads * d, &f->gpu_v_factors);
    }
    for (uint32_t b = 0; b < c->batch; b++)
        encode_sequence(f, b);
    check_cuda(
        cudaMemcpy(f->cache.gpu_pool, f->cache.pool, f->cache.block_bytes * n_blocks, cudaMemcpyHostToDevice));
    open_pool_upload(&f->open);
    size_t n = (size_t)c->batch * c->n_heads * d;
    f->q = malloc(n * sizeof *f->q);
    for (size_t i = 0; i < n; i++)
        f->q[i] = round_to_type(random_normal(), c->type);
    void *typed = to_type(f->q, n, c->type, &f->q_bytes);
    f->gpu_q = device_copy(typed, f->q_bytes);
    free(typed);
    f->out_bytes = f->q_bytes;
    f->gpu_out = device_new(f->out_bytes, 0xff);
    f->gpu_lse = device_new((size_t)c->batch * c->n_heads * sizeof(float), 0xff);
    f->gpu_table = device_copy(f->table, c->batch * longest * sizeof *f->table);
    f->gpu_lengths = device_copy(c->lengths, c->batch * sizeof *c->lengths);
    f->workspace_bytes = kvant_cuda_attention_workspace(d);
    assert_true(f->workspace_bytes > 0);
    f->workspace = device_new(f->workspace_bytes, 0xff);
    check_cuda(cudaMemset(f->workspace, 0, f->workspace_bytes));
}

static void fixture_close(fixture *f)
{
    open_pool_free(&f->open);
    cache_close(&f->cache);
    free(f->table);
    free(f->q);
    free(f->center);
    free(f->k_factors);
    free(f->v_factors);
    cudaFree(f->gpu_k_factors);
    cudaFree(f->gpu_v_factors);
    cudaFree(f->gpu_q);
    cudaFree(f->gpu_out);
    cudaFree(f->gpu_lse);
    cudaFree(f->gpu_table);
    cudaFree(f->gpu_lengths);
    cudaFree(f->gpu_center);
    cudaFree(f->workspace);
}

static kvant_cuda_attention_args attention_args(const fixture *f)
{
    const attention_case *c = f->c;
    const kvant_cuda_pages none = { NULL, 0,
                                    0 }; /* then kernels that know no open pages are used where there are any */
    return (kvant_cuda_attention_args){ .size = sizeof(kvant_cuda_attention_args),
                                        .k_codec = f->cache.gpu_k,
                                        .v_codec = f->cache.gpu_v,
                                        .k = cache_pages(&f->cache, KVANT_ROLE_K),
                                        .v = cache_pages(&f->cache, KVANT_ROLE_V),
                                        .k_open = c->open ? open_pages(&f->open, KVANT_ROLE_K) : none,
                                        .v_open = c->open ? open_pages(&f->open, KVANT_ROLE_V) : none,
                                        .block_table = f->gpu_table,
                                        .table_stride = f->blocks_per_row,
                                        .blocks_per_row = f->blocks_per_row,
                                        .lengths = f->gpu_lengths,
                                        .batch = c->batch,
                                        .n_heads = c->n_heads,
                                        .n_kv_heads = c->n_kv_heads,
                                        .type = c->type,
                                        .q = f->gpu_q,
                                        .q_batch_stride = (size_t)c->n_heads * c->head_dim,
                                        .q_head_stride = c->head_dim,
                                        .out = f->gpu_out,
                                        .out_batch_stride = (size_t)c->n_heads * c->head_dim,
                                        .out_head_stride = c->head_dim,
                                        .lse = f->gpu_lse,
                                        .scale = 1 / sqrtf((float)c->head_dim),
                                        .v_center = f->gpu_center,
                                        .k_factors = f->gpu_k_factors,
                                        .v_factors = f->gpu_v_factors,
                                        .workspace = f->workspace,
                                        .workspace_bytes = f->workspace_bytes };
}

static double step_error(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    double worst = 0;
    for (uint32_t i = 0; p->kind >= KVANT_CUDA_CODEBOOK2 && i < 1u << p->bits; i++)
        worst =
            fmax(worst, fabs(p->values[i] - p->step * ((p->bytes[i / 4] >> 8 * (i % 4) & 255) - (double)p->bias)));
    return worst;
}

typedef struct reference {
    double out[MAX_D], lse, bound, lse_bound;
} reference;

/* The largest scale and zero point of a token, and powers of two above those of its page (for groups of
 * channels). */
typedef struct sizes {
    double scale, zero, page_scale, page_zero;
} sizes;

static double half_at(const kvant_cuda_params *p, const uint8_t *page, uint32_t i)
{
    return fabs(kvant_half_to_float(((const uint16_t *)(page + p->metadata_offset))[i]));
}

static void grow(const kvant_cuda_params *p, const uint8_t *page, uint32_t i, double *scale, double *zero)
{
    bool zeros = p->kind < KVANT_CUDA_CODEBOOK2 && !p->symmetric;
    *scale = fmax(*scale, half_at(p, page, i));
    *zero = fmax(*zero, zeros ? half_at(p, page, p->n_scales + i) : fabs(p->offset) * half_at(p, page, i));
}

/* valid: tokens of the page that are there. */
static sizes sizes_of(const kvant_cuda_params *p, const uint8_t *page, uint32_t token, uint32_t valid)
{
    sizes s = { 0, 0, 0x1p-14, 0x1p-14 };
    if (p->grouping == KVANT_CUDA_GROUP_TOKEN)
        grow(p, page, token, &s.scale, &s.zero);
    for (uint32_t j = 0; p->grouping == KVANT_CUDA_GROUP_TOKENS32 && j < p->head_dim; j++)
        grow(p, page, token / 32 * p->head_dim + j, &s.scale, &s.zero);
    for (uint32_t g = 0; p->grouping == KVANT_CUDA_GROUP_CHANNELS32 && g < p->head_dim / 32; g++) {
        grow(p, page, g * 64 + token, &s.scale, &s.zero);
        for (uint32_t t = 0; t < valid; t++)
            grow(p, page, g * 64 + t, &s.page_scale, &s.page_zero);
    }
    s.page_scale *= 2;
    s.page_zero *= 2;
    return s;
}

typedef struct rows_of_page {
    float rows[64 * MAX_D];
    located at;
    uint32_t valid;
} rows_of_page;

/* Decodes the page that holds token t when t is its first. */
static const float *row_at(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv,
                           rows_of_page *page)
{
    uint32_t d = f->c->head_dim;
    int32_t left = f->c->lengths[b] - t;
    if (t % 64 == 0) {
        page->at = locate(f, role, b, t, kv);
        page->valid = left < 64 ? (uint32_t)left : 64;
        kvant_codec_decode(page->at.codec, NULL, page->at.page, 0, page->valid, page->rows, d);
    }
    return page->rows + (uint32_t)t % 64 * d;
}

/* The largest code of a kind, with what it is too large by before a bias or a zero point is taken off; of
 * chunks the largest number for a scale of 1. */
static double largest_code(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    if (kvant_cuda_has_chunks(p->kind))
        return codec->book.n_secondaries ? (1 << codec->book.radius_bits) - 1
                                         : codec->book.norm[(1 << codec->book.norm_bits) - 1];
    return p->kind >= KVANT_CUDA_CODEBOOK2 ? 255 * p->step : p->levels * 2 + 2;
}

/* Fills scores; returns the largest error of one. */
static double score_errors(const fixture *f, uint32_t b, uint32_t kv, const float *given, double *scores)
{
    static rows_of_page page;
    const kvant_cuda_codec *codec = f->cache.gpu_k;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = f->c->head_dim;
    double scale = 1 / sqrtf((float)d), largest_q = 0, q1 = 0, delta = 0, k_error = step_error(f->cache.gpu_k);
    float rotated[MAX_D], y[MAX_D], q[MAX_D] = { 0 };
    for (uint32_t j = 0; j < d; j++) /* rows are decoded without factors, so queries get them */
        q[j] = f->k_factors ? given[j] * f->k_factors[kv * d + j] : given[j];
    kvant_codec_transform_query(f->cache.k, NULL, q, rotated);
    for (uint32_t j = 0; j < d; j++) {
        largest_q = fmax(largest_q, fabs(rotated[j]));
        q1 += fabs(rotated[j]);
    }
    double unit = exp2(floor(log2(largest_q)) + 1);
    for (int32_t t = 0; t < f->c->lengths[b]; t++) {
        const float *row = row_at(f, KVANT_ROLE_K, b, t, kv, &page);
        double sum = 0, y1 = 0, of_scales = 0, qy = 0;
        kvant_codec_transform_query(f->cache.k, NULL, row, y);
        for (uint32_t j = 0; j < d; j++) {
            sum += (double)q[j] * row[j];
            y1 += fabs(y[j]);
            qy += fabs((double)rotated[j] * y[j]);
        }
        scores[t] = scale * sum;
        sizes s = page.at.open ? (sizes){ 0 } : sizes_of(p, page.at.page, (uint32_t)t % 64, page.valid);
        if (p->grouping == KVANT_CUDA_GROUP_TOKENS32) /* rounded to fp16 once more */
            of_scales = largest_code(codec) * (0x1p-11 * q1 * s.scale + 0x1p-25 * unit * d);
        if (kvant_cuda_has_chunks(p->kind) && !page.at.open)
            of_scales = CHUNK_RELATIVE * qy + CHUNK_ABSOLUTE * s.scale * q1;
        /* last term: fp32 sums of codes of up to 255 with their bias, and exponents of base 2 at most 2^7 */
        delta = fmax(delta, scale * (unit * 0x1p-12 * y1 + k_error * s.scale * q1 + of_scales +
                                     (d / 16) * 0x1p-22 * q1 * (s.scale * 255 + s.zero + fabs(y1 / d))) +
                                fabs(scores[t]) * 0x1p-20);
    }
    return delta;
}

/* Softmax over the decoded rows of sequence b for one query head, and the bound of the head comment. */
static void compute_reference(const fixture *f, uint32_t b, uint32_t head, reference *r)
{
    static rows_of_page page;
    const attention_case *c = f->c;
    const kvant_cuda_codec *codec = f->cache.gpu_v;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = c->head_dim, kv = head / (c->n_heads / c->n_kv_heads);
    int32_t n = c->lengths[b];
    double *scores = malloc((size_t)n * sizeof *scores), top = -INFINITY, v_error = step_error(f->cache.gpu_v);
    double delta = score_errors(f, b, kv, f->q + ((size_t)b * c->n_heads + head) * d, scores);
    for (int32_t t = 0; t < n; t++)
        top = fmax(top, scores[t]);
    double total = 0, norms = 0, rounded = 0, summed = 0, largest = 0, small = 0, small_zero = 0,
           weighted_scale = 0;
    double root = sqrt(d), code = largest_code(codec);
    memset(r->out, 0, sizeof r->out);
    for (int32_t t = 0; t < n; t++) {
        const float *row = row_at(f, KVANT_ROLE_V, b, t, kv, &page);
        double w = exp(scores[t] - top), norm = 0;
        for (uint32_t j = 0; j < d; j++) {
            r->out[j] += w * row[j];
            norm += (double)row[j] * row[j];
        }
        total += w;
        norms += w * sqrt(norm);
        if (page.at.open) { /* weights are relative to the page's largest */
            rounded += w * sqrt(norm);
            summed += w * sqrt(norm);
            small_zero += sqrt(norm);
            largest = fmax(largest, w * 0x1p-16);
            continue;
        }
        sizes s = sizes_of(p, page.at.page, (uint32_t)t % 64, page.valid);
        weighted_scale += w * s.scale;
        summed += w * (s.scale * code + s.zero) * root;
        if (p->grouping == KVANT_CUDA_GROUP_TOKEN) {
            rounded += w * s.scale * code * root;
            small += code * root;
            largest = fmax(largest, w * s.scale);
        } else if (p->grouping == KVANT_CUDA_GROUP_TOKENS32) { /* weights without a scale */
            rounded += w * (s.scale * code + s.zero) * root;
            small_zero += (s.scale * code + s.zero) * root;
        } else { /* weight, scale and product are rounded, zero points too */
            rounded += w * (2 * s.scale * code + s.zero) * root;
            small += (3 * code + s.zero / s.page_scale) * root;
            summed += w * s.page_zero * 0x1p-3 * root; /* 2^-25 for a zero point, as 2^-22 of an eighth */
            largest = fmax(largest, w * s.page_scale);
        }
    }
    double factor = 1; /* the largest */
    for (uint32_t j = 0; j < d; j++) {
        double own = f->v_factors ? f->v_factors[kv * d + j] : 1;
        r->out[j] = own * r->out[j] / total + (f->center ? f->center[kv * d + j] : 0);
        factor = fmax(factor, own);
    }
    const double of_chunks =
        kvant_cuda_has_chunks(p->kind) ? CHUNK_RELATIVE * norms + CHUNK_ABSOLUTE * weighted_scale * root : 0;
    double norm = 0, growth = exp(2 * delta) - 1,
           rounding = c->type == KVANT_CUDA_F32   ? 0x1p-22
                      : c->type == KVANT_CUDA_F16 ? 0x1p-11
                                                  : 0x1p-8;
    for (uint32_t j = 0; j < d; j++)
        norm += r->out[j] * r->out[j];
    r->lse = top + log(total);
    r->lse_bound = delta + 0x1p-20 * (1 + fabs(r->lse));
    r->bound = (growth * norms + 0x1p-11 * rounded + 0x1p-25 * (largest * small + small_zero) +
                v_error * weighted_scale * root + of_chunks + (n / 16 + 16) * 0x1p-22 * summed) /
                   total * factor +
               rounding * sqrt(norm) + (c->type == KVANT_CUDA_F16 ? 0x1p-25 * root : 0);
    free(scores);
}

static void check_head(fixture *f, const void *out, const float *lse, uint32_t b, uint32_t head)
{
    const attention_case *c = f->c;
    uint32_t d = c->head_dim;
    size_t at = ((size_t)b * c->n_heads + head) * d;
    if (c->lengths[b] <= 0) {
        for (uint32_t j = 0; j < d; j++)
            assert_true(from_type(out, at + j, c->type) == 0);
        assert_true(lse[b * c->n_heads + head] == -INFINITY);
        return;
    }
    reference r;
    compute_reference(f, b, head, &r);
    double error = 0;
    for (uint32_t j = 0; j < d; j++) {
        double difference = from_type(out, at + j, c->type) - r.out[j];
        error += difference * difference;
    }
    error = sqrt(error);
    f->worst = fmax(f->worst, error / r.bound);
    if (!(error <= r.bound))
        fail_msg("%s / %s, head_dim %u, sequence %u of %d tokens, head %u: error %g, bound %g", c->k_spec,
                 c->v_spec, d, b, c->lengths[b], head, error, r.bound);
    if (!(fabs(lse[b * c->n_heads + head] - r.lse) <= r.lse_bound))
        fail_msg("%s, head_dim %u, sequence %u, head %u: log-sum-exp %g, reference %g, bound %g", c->k_spec, d, b,
                 head, lse[b * c->n_heads + head], r.lse, r.lse_bound);
}

/* Runs once, checks every head, then replays a graph three times into poisoned outputs and wants the same
 * bytes. */
static void run_attention(const attention_case *c)
{
    fixture f;
    fixture_open(&f, c);
    kvant_cuda_attention_args args = attention_args(&f);
    size_t lse_bytes = (size_t)c->batch * c->n_heads * sizeof(float);
    uint8_t *out = malloc(f.out_bytes), *again = malloc(f.out_bytes);
    float *lse = malloc(lse_bytes);
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_OK);
    check_cuda(cudaDeviceSynchronize());
    device_read(out, f.gpu_out, f.out_bytes);
    device_read(lse, f.gpu_lse, lse_bytes);
    for (uint32_t b = 0; b < c->batch; b++)
        for (uint32_t h = 0; h < c->n_heads; h++)
            check_head(&f, out, lse, b, h);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamCreate(&stream));
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(kvant_cuda_attention(&args, stream), KVANT_OK);
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < 3; i++) {
        check_cuda(cudaMemsetAsync(f.gpu_out, 0xff, f.out_bytes, stream));
        check_cuda(cudaGraphLaunch(exec, stream));
        check_cuda(cudaStreamSynchronize(stream));
        device_read(again, f.gpu_out, f.out_bytes);
        assert_memory_equal(again, out, f.out_bytes);
    }
    printf("%-28s %-28s d %3u  kv %u  q %2u  batch %3u  type %d  open %u: error / bound %.3f\n", c->k_spec,
           c->v_spec, c->head_dim, c->n_kv_heads, c->n_heads, c->batch, c->type, c->open, f.worst);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    free(out);
    free(again);
    free(lse);
    fixture_close(&f);
}

static const int32_t odd_lengths[] = { 1, 0, 64, 63, 65, 200, -3, 1000, 7, 129 };
static const int32_t one_long[] = { 12345 };
static const int32_t one_token[] = { 1 };
static const int32_t empties[] = { 0, 0, 0 };

static void test_codecs(void **unused)
{
    (void)unused;
    static const char *const specs[] = { "int-4",
                                         "int-4:sym",
                                         "int-8",
                                         "int-8:sym",
                                         "bdr-4",
                                         "bdr-4:block=16",
                                         "turboquant-2:rotate=hadamard",
                                         "turboquant-3:rotate=hadamard",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-4:scale=norm,rotate=none" };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++) {
            attention_case c = { specs[s],
                                 specs[s],
                                 dims[i],
                                 2,
                                 8,
                                 10,
                                 (kvant_cuda_type)((s + i) % 3),
                                 odd_lengths,
                                 i % 2 == 1,
                                 s % 2 ? 1.0f : 0.3f,
                                 0 };
            run_attention(&c);
        }
}

/* Keys of one kind with values of another: every pair that the library has, besides those above. */
static void test_mixed_codecs(void **unused)
{
    (void)unused;
    static const char *const keys[] = { "int-8", "int-4", "turboquant-4:rotate=hadamard",
                                        "turboquant-3:rotate=hadamard", "turboquant-2:rotate=hadamard" };
    static const char *const values[] = { "int-8:sym", "bdr-4", "turboquant-4:rotate=none",
                                          "turboquant-3:rotate=hadamard", "turboquant-2:rotate=hadamard" };
    static const uint32_t dims[] = { 128, 64, 256, 96 };
    size_t n = 0;
    for (size_t k = 0; k < 5; k++)
        for (size_t v = 0; v < 5; v++) {
            attention_case c = { keys[k],     values[v],  dims[n % 4], 2, 6, 10, (kvant_cuda_type)(n % 3),
                                 odd_lengths, n % 2 == 0, 1.0f,        0 };
            if (v >= k || (k == 2 && v == 1)) { /* values of no more bits */
                run_attention(&c);
                n++;
            }
        }
    assert_int_equal(n, 16);
}

/* Open pages beside sealed ones, and nothing but open ones; kinds with groups of 32, with and without open
 * pages. */
static void test_open_pages(void **unused)
{
    (void)unused;
    static const struct {
        const char *k, *v;
    } specs[] = { { "turboquant-4:rotate=hadamard", "turboquant-3:rotate=hadamard" },
                  { "int-4", "int-4" },
                  { "int-8:sym", "bdr-8" },
                  { "turboquant-2:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "int-2", "int-2:sym" },
                  { "int-3:sym", "int-3" },
                  { "int-4", "int-2" },
                  { "kivi-2", "kivi-2" },
                  { "int-2:group=32,axis=channel,sym", "int-2:group=32,sym" },
                  { "innerq-base", "innerq-base" },
                  { "innerq-small", "innerq-small" },
                  { "int-3:group=32", "int-3:group=32,axis=channel" } };
    static const uint32_t dims[] = { 64, 96, 128, 256 }, open[] = { 3, 0, 1 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++) {
            attention_case c = { specs[s].k,
                                 specs[s].v,
                                 dims[i],
                                 2,
                                 s % 2 ? 8 : 6,
                                 10,
                                 (kvant_cuda_type)((s + i) % 3),
                                 odd_lengths,
                                 i % 2 == 0,
                                 s % 2 ? 1.0f : 0.3f,
                                 open[(s + i) % 3] };
            run_attention(&c);
            c.open = c.open == 3 ? 0 : 3;
            run_attention(&c);
        }
    attention_case c = { "kivi-2", "kivi-2", 128, 2, 8, 1, KVANT_CUDA_F32, one_long, false, 0.5f, 20 };
    run_attention(&c);
    c.k_spec = c.v_spec = "turboquant-4";
    run_attention(&c);
}

/* Codes of several channels, each with and without open pages. */
static void test_chunks(void **unused)
{
    (void)unused;
    static const char *const specs[] = { "octopus-2:rotate=hadamard",
                                         "octopus-3:rotate=hadamard",
                                         "octopus-4:rotate=hadamard",
                                         "hqmq-s96r4",
                                         "hqmq-s192r6",
                                         "octopus-4:rotate=none,scale=norm",
                                         "hqmq-s96r4:rotate=hadamard,scale=norm,book=random" };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++)
            for (uint32_t open = 0; open < 4; open += 3) {
                attention_case c = { specs[s],
                                     specs[s],
                                     dims[i],
                                     2,
                                     s % 2 ? 8 : 6,
                                     10,
                                     (kvant_cuda_type)((s + i) % 3),
                                     odd_lengths,
                                     i % 2 == 1,
                                     s % 2 ? 1.0f : 0.3f,
                                     open };
                run_attention(&c);
            }
    for (size_t s = 0; s < 5; s++) {
        attention_case c = { specs[s], specs[s], 128, 2, 8, 1, KVANT_CUDA_F32, one_long, false, 0.5f, 20 };
        run_attention(&c);
    }
}

static void test_head_groups(void **unused)
{
    (void)unused;
    static const uint32_t groups[] = { 1, 2, 3, 5, 7, 8, 9, 12, 16 };
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        attention_case c = { "turboquant-4",  "turboquant-4", 128,  3, 3 * groups[i], 4, KVANT_CUDA_F32,
                             odd_lengths + 4, false,          0.5f, 0 };
        run_attention(&c);
    }
}

static void test_shapes(void **unused)
{
    (void)unused;
    static int32_t many[300];
    for (int i = 0; i < 300; i++)
        many[i] = (int32_t)(random_bits() % 150);
    const attention_case cases[] = {
        { "int-4", "int-4", 128, 2, 14, 1, KVANT_CUDA_F16, one_long, false, 1.0f, 0 },
        { "turboquant-4", "turboquant-4", 128, 1, 8, 1, KVANT_CUDA_BF16, one_long, true, 0.2f, 0 },
        { "turboquant-4", "turboquant-4", 256, 1, 4, 1, KVANT_CUDA_BF16, one_long, false, 1.0f, 0 },
        { "int-8", "int-8", 64, 1, 3, 1, KVANT_CUDA_F32, one_long, false, 0.1f, 0 },
        { "turboquant-4", "turboquant-4", 128, 2, 4, 1, KVANT_CUDA_F32, one_token, false, 1.0f, 0 },
        { "int-4", "int-4", 128, 2, 4, 3, KVANT_CUDA_F32, empties, false, 1.0f, 0 },
        { "int-4", "int-4", 128, 2, 6, 300, KVANT_CUDA_F32, many, true, 1.0f, 0 },
        { "int-4:sym", "bdr-4", 128, 2, 8, 10, KVANT_CUDA_F32, odd_lengths, false, 1.0f, 0 },
        { "turboquant-4:scale=norm", "turboquant-4:rotate=none", 128, 2, 8, 10, KVANT_CUDA_F32, odd_lengths, false,
          1.0f, 0 },
        { "turboquant-4", "turboquant-4", 128, 2, 8, 10, KVANT_CUDA_F32, odd_lengths, false, 20.0f, 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run_attention(&cases[i]);
}

/* Two sequences that share their blocks (a common prefix) and a length beyond the table, which is cut. */
static void test_shared_blocks(void **unused)
{
    (void)unused;
    static const int32_t lengths[] = { 200, 200 };
    attention_case c = { "turboquant-4", "turboquant-4", 128, 2, 8, 2, KVANT_CUDA_F32, lengths, false, 1.0f, 0 };
    fixture f;
    fixture_open(&f, &c);
    memcpy(f.table + f.blocks_per_row, f.table, f.blocks_per_row * sizeof *f.table);
    check_cuda(cudaMemcpy(f.gpu_table, f.table, 2 * f.blocks_per_row * sizeof *f.table, cudaMemcpyHostToDevice));
    memcpy(f.q + (size_t)c.n_heads * 128, f.q, (size_t)c.n_heads * 128 * sizeof(float));
    check_cuda(cudaMemcpy(f.gpu_q, f.q, f.q_bytes, cudaMemcpyHostToDevice));
    int32_t beyond[] = { 192, 1 << 30 };
    kvant_cuda_attention_args args = attention_args(&f);
    args.blocks_per_row = 3; /* of 4: the second length is cut to 192 */
    check_cuda(cudaMemcpy(f.gpu_lengths, beyond, sizeof beyond, cudaMemcpyHostToDevice));
    assert_int_equal(kvant_cuda_attention(&args, NULL), KVANT_OK);
    float *out = malloc(f.out_bytes);
    device_read(out, f.gpu_out, f.out_bytes);
    static const int32_t cut[] = { 192, 192 };
    c.lengths = cut;
    float lse[16];
    device_read(lse, f.gpu_lse, sizeof lse);
    for (uint32_t b = 0; b < 2; b++)
        for (uint32_t h = 0; h < c.n_heads; h++)
            check_head(&f, out, lse, b, h);
    free(out);
    fixture_close(&f);
}

int main(void)
{
    if (!have_device())
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codecs),        cmocka_unit_test(test_mixed_codecs),
        cmocka_unit_test(test_open_pages),    cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_head_groups),   cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_shared_blocks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
