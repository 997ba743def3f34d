/* attention_fixture.c - see attention_fixture.h. */
#include "attention_fixture.h"

#include <math.h>

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

located locate(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv_head)
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

void fixture_open(fixture *f, const attention_case *c)
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

void fixture_close(fixture *f)
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

kvant_cuda_attention_args attention_args(const fixture *f)
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

void run_attention(const attention_case *c)
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
