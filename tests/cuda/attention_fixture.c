/* attention_fixture.c - see attention_fixture.h. */
#include "attention_fixture.h"

#include "../../src/base/half.h"

/* Sequences share no block. Table entries after a sequence's end do not point into the pool. A
 * block has the same number in both pools, and its bytes in the unused pool are all ones. */
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
            bool used = (int64_t)i * 64 < f->c->lengths[b],
                 last = (int64_t)(i + 1) * 64 >= f->c->lengths[b];
            bool open = f->c->open && (last || random_bits() % f->c->open == 0);
            int32_t block = used ? (int32_t)order[n++] : 0x7ffffff;
            f->table[b * f->blocks_per_row + i] = used && open ? -1 - block : block;
        }
    free(order);
}

located locate(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv_head)
{
    int32_t entry = f->table[b * f->blocks_per_row + (uint32_t)t / 64];
    if (entry < 0)
        return (located){ f->open.codec[role],
                          open_page(&f->open, role, (uint32_t)(-1 - entry), kv_head), true };
    return (located){ role == KVANT_ROLE_K ? f->cache.k : f->cache.v,
                      cache_page(&f->cache, role, (uint32_t)entry, kv_head), false };
}

/* For codecs that encode whole blocks, copies of the first row stand for the tokens that a last
 * block does not have. */
static void encode_block(fixture *f, kvant_role role, uint32_t b, int32_t first, uint32_t kv_head)
{
    const attention_case *c = f->c;
    static float rows[64 * MAX_D];
    uint32_t d = c->head_dim,
             n = c->lengths[b] - first < 64 ? (uint32_t)(c->lengths[b] - first) : 64;
    for (uint32_t t = 0; t < 64; t++)
        for (uint32_t j = 0; j < d; j++)
            rows[t * d + j] = t >= n
                                  ? rows[j]
                                  : random_normal() * (role == KVANT_ROLE_K ? c->key_size : 0.02f) +
                                        (role == KVANT_ROLE_V && j == 3 ? 0.1f : 0);
    const float *scale = role == KVANT_ROLE_V ? f->v_scale : f->k_scale;
    kvant_affine affine = { .center =
                                role == KVANT_ROLE_V && f->center ? f->center + kv_head * d : NULL,
                            .scale = scale ? scale + kv_head * d : NULL };
    located at = locate(f, role, b, first, kv_head);
    kvant_codec_info info = { .size = sizeof info };
    kvant_codec_get_info(at.codec, &info);
    assert_int_equal(
        kvant_codec_encode(at.codec, &affine, rows, d, 0, info.block_tokens == 1 ? n : 64, at.page),
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

static float *make_scale(uint32_t n, void **gpu)
{
    float *scale = malloc(n * sizeof *scale);
    for (uint32_t j = 0; j < n; j++)
        scale[j] = random_uniform(0.5f, 2);
    *gpu = device_copy(scale, n * sizeof *scale);
    return scale;
}

uint32_t query_tokens_of(const fixture *f, uint32_t b)
{
    return f->p.counts ? f->p.counts[b] : f->p.query_tokens;
}

uint32_t row_of(const fixture *f, uint32_t b, uint32_t token)
{
    return (uint32_t)f->starts[b] + token;
}

int32_t position_of(const fixture *f, uint32_t b, uint32_t token)
{
    const int32_t length = f->c->lengths[b] > 0 ? f->c->lengths[b] : 0;
    return length - (int32_t)query_tokens_of(f, b) + (int32_t)token;
}

/* The slope as kvant/attention.h defines it. */
float slope_of(const fixture *f, uint32_t head)
{
    uint32_t n = 1;
    while (2 * n <= f->c->n_heads)
        n *= 2;
    if (f->p.max_bias == 0)
        return 1;
    return head < n ? exp2f(-f->p.max_bias * (float)(head + 1) / (float)n)
                    : exp2f(-f->p.max_bias * (float)(2 * (head - n) + 1) / (float)(2 * n));
}

static void count_rows(fixture *f)
{
    f->starts = calloc(f->c->batch + 1, sizeof *f->starts);
    for (uint32_t b = 0; b < f->c->batch; b++)
        f->starts[b + 1] = f->starts[b] + (int32_t)query_tokens_of(f, b);
    f->n_rows = (uint32_t)f->starts[f->c->batch];
    if (f->p.counts)
        f->gpu_starts = device_copy(f->starts, (f->c->batch + 1) * sizeof *f->starts);
}

/* Hides one of eight cells, and all cells of one row in eight. Cells after a sequence's end are
 * NaN, which nothing may read. */
static void make_mask(fixture *f)
{
    f->mask_stride = 64 * f->blocks_per_row + 3;
    const size_t n = (size_t)f->n_rows * f->mask_stride;
    f->mask = malloc(n * sizeof *f->mask + 1);
    memset(f->mask, 0xff, n * sizeof *f->mask);
    for (uint32_t b = 0; b < f->c->batch; b++)
        for (uint32_t i = 0; i < query_tokens_of(f, b); i++) {
            const bool hidden = random_bits() % 8 == 0;
            for (int32_t t = 0; t < f->c->lengths[b]; t++)
                f->mask[(size_t)row_of(f, b, i) * f->mask_stride + (uint32_t)t] =
                    hidden || random_bits() % 8 == 0 ? 0xfc00
                                                     : kvant_half_from_float(random_uniform(-3, 3));
        }
    f->gpu_mask = device_copy(f->mask, n * sizeof *f->mask);
}

uint32_t matrix_of(const fixture *f, uint32_t b, int32_t t)
{
    return f->matrices ? f->matrices[b * f->blocks_per_row + (uint32_t)t / 64] : 0;
}

static void make_matrices(fixture *f)
{
    const uint32_t n = f->c->batch * f->blocks_per_row, width = f->c->n_kv_heads * f->c->head_dim;
    f->n_matrices = f->p.matrices ? f->p.matrices : 1;
    for (uint32_t i = 0; i < f->n_matrices; i++)
        f->q_ids[i] = (uint8_t)(random_bits() % f->n_matrices);
    if (f->p.matrices) {
        f->matrices = malloc(n);
        for (uint32_t i = 0; i < n; i++)
            f->matrices[i] =
                (uint8_t)(i > 0 && random_bits() % 3 != 0 ? f->matrices[i - 1]
                                                          : random_bits() % f->n_matrices);
        f->gpu_matrices = device_copy(f->matrices, n);
    }
    if (f->p.key_center) {
        f->k_center = malloc(f->n_matrices * width * sizeof *f->k_center);
        for (uint32_t i = 0; i < f->n_matrices * width; i++)
            f->k_center[i] = random_normal() * f->c->key_size;
        f->gpu_k_center = device_copy(f->k_center, f->n_matrices * width * sizeof *f->k_center);
    }
}

/* Offsets that the GPU has computed; NaN where they must not be read. */
static void find_offsets(fixture *f, const void *q)
{
    const attention_case *c = f->c;
    const size_t width = (size_t)c->n_heads * c->head_dim,
                 rows = (size_t)f->p.query_tokens * (c->n_heads / c->n_kv_heads),
                 n = (size_t)c->batch * c->n_kv_heads * f->blocks_per_row * rows;
    f->offset_bytes = n * sizeof(float);
    f->gpu_offsets = device_new(f->offset_bytes, 0xff);
    f->plain_queries =
        (kvant_cuda_page_offsets_args){ .size = sizeof f->plain_queries,
                                        .q = q,
                                        .type = c->type,
                                        .q_batch_stride = f->p.query_tokens * width,
                                        .q_token_stride = width,
                                        .q_head_stride = c->head_dim,
                                        .batch = c->batch,
                                        .n_heads = c->n_heads,
                                        .n_kv_heads = c->n_kv_heads,
                                        .head_dim = c->head_dim,
                                        .query_tokens = f->p.query_tokens,
                                        .query_starts = f->gpu_starts,
                                        .lengths = f->gpu_lengths,
                                        .table_stride = f->blocks_per_row,
                                        .block_centers = gpu_block_centers(&f->block_centers),
                                        .offsets = f->gpu_offsets };
    assert_int_equal(kvant_cuda_page_offsets(&f->plain_queries, NULL), KVANT_OK);
    float *offsets = malloc(n * sizeof *offsets);
    device_read(offsets, f->gpu_offsets, n * sizeof *offsets);
    for (size_t i = 0; f->hidden && i < n; i++)
        if (f->hidden[i / rows / f->blocks_per_row / c->n_kv_heads * f->blocks_per_row +
                      i / rows % f->blocks_per_row])
            offsets[i] = NAN;
    check_cuda(cudaMemcpy(f->gpu_offsets, offsets, n * sizeof *offsets, cudaMemcpyHostToDevice));
    free(offsets);
}

/* Centres are larger than keys, so that they decide which pages count. */
static void make_page_centers(fixture *f)
{
    const attention_case *c = f->c;
    const block_centers_shape shape = { c->head_dim, c->n_kv_heads, c->head_dim,
                                        c->head_dim % 3 == 2 };
    const size_t n = (size_t)f->n_rows * c->n_heads * c->head_dim;
    size_t bytes;
    block_centers_open(&f->block_centers, &shape, (size_t)c->batch * f->blocks_per_row,
                       f->n_matrices, f->matrices, 4 * c->key_size);
    f->plain_q = malloc(n * sizeof *f->plain_q);
    for (size_t i = 0; i < n; i++)
        f->plain_q[i] = round_to_type(random_normal(), c->type);
    void *typed = to_type(f->plain_q, n, c->type, &bytes), *gpu = device_copy(typed, bytes);
    find_offsets(f, gpu);
    free(typed);
}

/* Uploads the table that the GPU gets. */
static void upload_table(fixture *f)
{
    const size_t n = (size_t)f->c->batch * f->blocks_per_row;
    int32_t *table = memcpy(malloc(n * sizeof *table), f->table, n * sizeof *table);
    f->hidden = f->p.hidden && f->c->open ? calloc(n, sizeof *f->hidden) : NULL;
    for (size_t i = 0; f->hidden && i < n; i++)
        if ((f->hidden[i] = random_bits() % 4 == 0))
            table[i] = KVANT_CUDA_NO_BLOCK;
    f->gpu_table = device_copy(table, n * sizeof *table);
    free(table);
}

static void make_sinks(fixture *f)
{
    f->sinks = malloc(f->c->n_heads * sizeof *f->sinks);
    for (uint32_t h = 0; h < f->c->n_heads; h++)
        f->sinks[h] = random_uniform(-3, 6);
    f->gpu_sinks = device_copy(f->sinks, f->c->n_heads * sizeof *f->sinks);
}

void fixture_open(fixture *f, const attention_case *c, const attention_problem *p)
{
    *f = (fixture){ .c = c, .p = p ? *p : (attention_problem){ 0 } };
    f->p.query_tokens = f->p.query_tokens ? f->p.query_tokens : 1;
    count_rows(f);
    uint32_t n_blocks = 1, longest = 1, d = c->head_dim;
    for (uint32_t b = 0; b < c->batch; b++) {
        uint32_t n = c->lengths[b] > 0 ? ((uint32_t)c->lengths[b] + 63) / 64 : 0;
        n_blocks += n;
        longest = n > longest ? n : longest;
    }
    /* 0xff: memory that was never written decodes to NaN, which shows when it is read */
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
        f->k_scale = make_scale(c->n_kv_heads * d, &f->gpu_k_scale);
        f->v_scale = make_scale(c->n_kv_heads * d, &f->gpu_v_scale);
    }
    for (uint32_t b = 0; b < c->batch; b++)
        encode_sequence(f, b);
    check_cuda(cudaMemcpy(f->cache.gpu_pool, f->cache.pool, f->cache.block_bytes * n_blocks,
                          cudaMemcpyHostToDevice));
    open_pool_upload(&f->open);
    if (f->p.mask)
        make_mask(f);
    if (f->p.sinks)
        make_sinks(f);
    make_matrices(f);
    size_t n = (size_t)f->n_matrices * f->n_rows * c->n_heads * d;
    f->q = malloc(n * sizeof *f->q);
    for (size_t i = 0; i < n; i++)
        f->q[i] = round_to_type(random_normal(), c->type);
    void *typed = to_type(f->q, n, c->type, &f->q_bytes);
    f->gpu_q = device_copy(typed, f->q_bytes);
    free(typed);
    f->out_bytes = f->q_bytes / f->n_matrices;
    f->gpu_out = device_new(f->out_bytes, 0xff);
    f->gpu_lse = device_new((size_t)f->n_rows * c->n_heads * sizeof(float), 0xff);
    for (uint32_t i = 0; f->p.no_blocks && i < c->batch * longest; i++)
        f->table[i] = KVANT_CUDA_NO_BLOCK;
    upload_table(f);
    f->gpu_lengths = device_copy(c->lengths, c->batch * sizeof *c->lengths);
    if (f->p.page_centers)
        make_page_centers(f);
    const size_t one = kvant_cuda_attention_workspace(d),
                 pages = 1024 + 2 * longest * KVANT_CUDA_SCRATCH_PER_BLOCK(d);
    f->workspace_bytes = kvant_cuda_kernel_workspace(d, f->n_matrices);
    assert_true(one > 0 && f->workspace_bytes >= one);
    if (f->p.scratch && f->workspace_bytes < one + pages)
        f->workspace_bytes = one + pages;
    f->workspace = device_new(f->workspace_bytes, 0xff);
    check_cuda(cudaMemset(f->workspace, 0, one));
}

void fixture_close(fixture *f)
{
    forget_rows(f);
    open_pool_free(&f->open);
    cache_close(&f->cache);
    free(f->table);
    free(f->q);
    free(f->center);
    free(f->starts);
    free(f->mask);
    free(f->sinks);
    free(f->matrices);
    free(f->k_center);
    free(f->plain_q);
    free(f->hidden);
    if (f->p.page_centers)
        block_centers_close(&f->block_centers);
    cudaFree(f->gpu_offsets);
    cudaFree((void *)(uintptr_t)f->plain_queries.q);
    cudaFree(f->gpu_matrices);
    cudaFree(f->gpu_k_center);
    cudaFree(f->gpu_starts);
    cudaFree(f->gpu_mask);
    cudaFree(f->gpu_sinks);
    free(f->k_scale);
    free(f->v_scale);
    cudaFree(f->gpu_k_scale);
    cudaFree(f->gpu_v_scale);
    cudaFree(f->gpu_q);
    cudaFree(f->gpu_out);
    cudaFree(f->gpu_lse);
    cudaFree(f->gpu_table);
    cudaFree(f->gpu_lengths);
    cudaFree(f->gpu_center);
    cudaFree(f->workspace);
}
