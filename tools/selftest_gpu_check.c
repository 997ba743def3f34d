/* selftest_gpu_check.c - `kvant selftest` on a GPU: append or seal must write portable C's bytes,
 * and decode and attention are compared with the problem's rows and outputs. Decode and attention
 * read portable C's pages, so that a wrong kernel does not make another one look wrong. */
#include "selftest_gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One role on the device. */
typedef struct role {
    kvant_cuda_codec *codec, *open;
    void *pool,
        *open_pool; /* what the device encodes; its fp16 pages, for codecs with groups of tokens */
    kvant_cuda_pages pages; /* portable C's */
    float *center, *scale, *weights, *inverse, *centroids,
        *feedback; /* of both kv heads, or NULL */
    size_t n_weights;
} role;

typedef struct checking {
    test_gpu *gpu;
    const test_problem *p;
    test_result *result;
    role roles[2];
    void *blocks; /* 0, 1, 2 */
    void *lengths;
    void *workspace;
    size_t workspace_bytes, scratch_bytes; /* without and with room for unpacked pages */
} checking;

static size_t pool_bytes(const checking *c, int r)
{
    return TEST_BLOCKS * TEST_KV_HEADS * c->p->info[r].page_bytes;
}

static kvant_cuda_pages pages_at(const void *memory, size_t page_bytes)
{
    return (kvant_cuda_pages){ (void *)(uintptr_t)memory, TEST_KV_HEADS * page_bytes, page_bytes };
}

/* Arrays of both kv heads side by side; NULL where the codecs have none. */
static float *upload_heads(test_gpu *gpu, const float *const *parts, size_t n)
{
    float *all = parts[0] != NULL && n > 0 ? malloc(TEST_KV_HEADS * n * sizeof *all) : NULL;
    if (all == NULL)
        return NULL;
    for (size_t head = 0; head < TEST_KV_HEADS; head++)
        memcpy(all + head * n, parts[head], n * sizeof *all);
    float *device = gpu_upload(gpu, all, TEST_KV_HEADS * n * sizeof *all);
    free(all);
    return device;
}

static void upload_tables(checking *c, int which)
{
    const size_t d = c->p->pair.head_dim;
    const float *parts[5][TEST_KV_HEADS];
    kvant_cuda_tables t = { .size = sizeof t };
    role *r = &c->roles[which];
    for (size_t head = 0; head < TEST_KV_HEADS; head++) {
        kvant_cuda_codec_tables(c->p->codec[which][head], &t);
        parts[0][head] = t.center, parts[1][head] = t.scale, parts[2][head] = t.weights;
        parts[3][head] = t.inverse_weights, parts[4][head] = t.centroids;
    }
    r->n_weights = t.n_weights;
    r->center = upload_heads(c->gpu, parts[0], d);
    r->scale = upload_heads(c->gpu, parts[1], d);
    r->weights = upload_heads(c->gpu, parts[2], t.n_weights);
    r->inverse = upload_heads(c->gpu, parts[3], t.n_weights);
    r->centroids = upload_heads(c->gpu, parts[4], t.n_centroids);
}

/* False after noting that there is no kernel, or what failed. */
static bool make_codec(checking *c, int which)
{
    role *r = &c->roles[which];
    char why[TEST_WHY_BYTES] = "";
    const kvant_status status =
        kvant_cuda_codec_from(c->p->codec[which][0], &r->codec, why, sizeof why);
    test_result *result = c->result;
    test_state *const states[] = { &result->encode, &result->decode, &result->attention };
    const test_state found = status == KVANT_ERR_UNSUPPORTED ? TEST_NO_KERNEL : TEST_FAILED;
    for (size_t i = 0; status != KVANT_OK && i < 3; i++)
        test_note(result, states[i], found, "%s", why);
    return status == KVANT_OK &&
           gpu_did(c->gpu, kvant_cuda_codec_create_open(r->codec, &r->open), "an open codec");
}

static bool place(checking *c, int which)
{
    role *r = &c->roles[which];
    upload_tables(c, which);
    r->pool = gpu_new(c->gpu, pool_bytes(c, which), 0);
    r->open_pool =
        gpu_new(c->gpu, (size_t)TEST_BLOCKS * TEST_KV_HEADS * 64 * c->p->pair.head_dim * 2, 0);
    r->pages = pages_at(gpu_upload(c->gpu, c->p->pages[which], pool_bytes(c, which)),
                        c->p->info[which].page_bytes);
    return c->gpu->error[0] == 0;
}

/* Encode */

/* Tokens first to end - 1; all of a role, into sealed or open pages. */
static void append(checking *c, int which, bool open, void *slots, const void *rows, uint32_t first,
                   uint32_t end)
{
    const role *r = &c->roles[which];
    const size_t d = c->p->pair.head_dim, width = TEST_KV_HEADS * d;
    kvant_cuda_append_args args = { .size = sizeof args,
                                    .type = KVANT_CUDA_BF16,
                                    .n_tokens = end - first,
                                    .n_kv_heads = TEST_KV_HEADS,
                                    .slots = (const int64_t *)slots + first,
                                    .centroids = { c->roles[0].centroids, c->roles[1].centroids } };
    *(which == KVANT_ROLE_K ? &args.k : &args.v) =
        (kvant_cuda_rows){ .codec = open ? r->open : r->codec,
                           .pages = open ? pages_at(r->open_pool, 64 * d * 2)
                                         : pages_at(r->pool, c->p->info[which].page_bytes),
                           .rows = (const uint16_t *)rows + first * width,
                           .token_stride = width,
                           .head_stride = d,
                           .center = r->center,
                           .scale = r->scale,
                           .weights = r->weights };
    gpu_did(c->gpu, kvant_cuda_append(&args, c->gpu->stream), "append");
}

static void seal(checking *c, int which)
{
    const role *r = &c->roles[which];
    kvant_cuda_seal_args args = { .size = sizeof args,
                                  .n_blocks = TEST_BLOCKS,
                                  .n_kv_heads = TEST_KV_HEADS,
                                  .from = c->blocks,
                                  .to = c->blocks,
                                  .centroids = { c->roles[0].centroids, c->roles[1].centroids } };
    *(which == KVANT_ROLE_K ? &args.k : &args.v) =
        (kvant_cuda_seal_pages){ r->codec,
                                 pages_at(r->open_pool, 64 * (size_t)c->p->pair.head_dim * 2),
                                 pages_at(r->pool, c->p->info[which].page_bytes) };
    gpu_did(c->gpu, kvant_cuda_seal(&args, c->gpu->stream), "seal");
}

/* Many tokens, 64 and one have kernels of their own. */
static void encode(checking *c, int which)
{
    static const uint32_t ends[] = { TEST_ROWS - 65, TEST_ROWS - 1, TEST_ROWS };
    const bool groups = c->p->info[which].block_tokens > 1;
    int64_t slots[TEST_ROWS];
    uint8_t *pages = malloc(pool_bytes(c, which));
    for (int i = 0; i < TEST_ROWS; i++)
        slots[i] = i;
    void *device_slots = gpu_upload(c->gpu, slots, sizeof slots);
    void *rows = gpu_upload_bf16(c->gpu, c->p->rows[which],
                                 (size_t)TEST_ROWS * TEST_KV_HEADS * c->p->pair.head_dim);
    for (uint32_t i = 0, first = 0; c->gpu->error[0] == 0 && i < 3; first = ends[i++])
        append(c, which, groups, device_slots, rows, first, ends[i]);
    if (groups && c->gpu->error[0] == 0)
        seal(c, which);
    if (pages == NULL)
        gpu_did(c->gpu, KVANT_ERR_MEMORY, "encode");
    else if (gpu_read(c->gpu, pages, c->roles[which].pool, pool_bytes(c, which)))
        test_compare_pages(c->result, c->p, (kvant_role)which, pages);
    free(pages);
}

/* Decode */

static void decode(checking *c, int which)
{
    const role *r = &c->roles[which];
    const size_t d = c->p->pair.head_dim, n = (size_t)TEST_ROWS * TEST_KV_HEADS * d;
    float *rows = malloc(n * sizeof *rows), *out = gpu_new(c->gpu, n * sizeof *rows, 0xff);
    kvant_cuda_decode_args args = { .size = sizeof args,
                                    .codec = r->codec,
                                    .pages = r->pages,
                                    .blocks = c->blocks,
                                    .n_blocks = TEST_BLOCKS,
                                    .n_kv_heads = TEST_KV_HEADS,
                                    .type = KVANT_CUDA_F32,
                                    .out = out,
                                    .token_stride = TEST_KV_HEADS * d,
                                    .head_stride = d,
                                    .center = r->center,
                                    .scale = r->scale,
                                    .inverse_weights = r->inverse,
                                    .centroids = r->centroids };
    if (rows == NULL)
        gpu_did(c->gpu, KVANT_ERR_MEMORY, "decode");
    else if (c->gpu->error[0] == 0 &&
             gpu_did(c->gpu, kvant_cuda_decode(&args, c->gpu->stream), "decode") &&
             gpu_read(c->gpu, rows, out, n * sizeof *rows))
        test_compare_rows(c->result, c->p, (kvant_role)which, rows);
    free(rows);
}

/* Attention */

/* Queries as attention takes them: bf16, or through a matrix and binary32. */
static void *queries_of(checking *c, const test_call *call, kvant_cuda_type *type)
{
    const role *k = &c->roles[KVANT_ROLE_K];
    const size_t d = c->p->pair.head_dim, n = (size_t)call->n_queries * TEST_HEADS * d;
    *type = KVANT_CUDA_BF16;
    if (k->n_weights <= d)
        return gpu_upload_bf16(c->gpu, call->q, n);
    *type = KVANT_CUDA_F32;
    float *out = gpu_new(c->gpu, n * sizeof *out, 0xff);
    kvant_cuda_query_args args = { .size = sizeof args,
                                   .k_codec = k->codec,
                                   .batch = call->n_queries,
                                   .n_heads = TEST_HEADS,
                                   .n_kv_heads = TEST_KV_HEADS,
                                   .type = KVANT_CUDA_F32,
                                   .q = gpu_upload(c->gpu, call->q, n * sizeof *out),
                                   .q_batch_stride = TEST_HEADS * d,
                                   .q_head_stride = d,
                                   .inverse_weights = k->inverse,
                                   .out = out };
    if (c->gpu->error[0] == 0)
        gpu_did(c->gpu, kvant_cuda_transform_queries(&args, c->gpu->stream),
                "queries through a matrix");
    return out;
}

static kvant_cuda_attention_args attention_args(checking *c, const test_call *call, size_t which)
{
    const role *k = &c->roles[KVANT_ROLE_K], *v = &c->roles[KVANT_ROLE_V];
    const size_t d = c->p->pair.head_dim, n = (size_t)call->n_queries * TEST_HEADS;
    kvant_cuda_attention_args args = { .size = sizeof args,
                                       .k_codec = k->codec,
                                       .v_codec = v->codec,
                                       .k = k->pages,
                                       .v = v->pages,
                                       .block_table = c->blocks,
                                       .table_stride = TEST_BLOCKS,
                                       .blocks_per_row = TEST_BLOCKS,
                                       .lengths = c->lengths,
                                       .batch = 1,
                                       .n_heads = TEST_HEADS,
                                       .n_kv_heads = TEST_KV_HEADS,
                                       .q_batch_stride = n * d,
                                       .q_head_stride = d,
                                       .out_batch_stride = n * d,
                                       .out_head_stride = d,
                                       .scale = 1 / sqrtf((float)d),
                                       .v_center = v->center,
                                       .k_scale = k->n_weights == d ? k->inverse : k->scale,
                                       .v_scale = v->scale,
                                       .workspace = c->workspace,
                                       .workspace_bytes = which + 1 < TEST_CALLS
                                                              ? c->workspace_bytes
                                                              : c->scratch_bytes,
                                       .query_tokens = call->n_queries,
                                       .q_token_stride = TEST_HEADS * d,
                                       .out_token_stride = TEST_HEADS * d,
                                       .causal = call->n_queries > 1,
                                       .centroids = { k->centroids, v->centroids } };
    args.q = queries_of(c, call, &args.type);
    args.out = gpu_new(c->gpu, n * d * sizeof(float), 0xff);
    args.lse = gpu_new(c->gpu, n * sizeof(float), 0xff);
    return args;
}

static void widen(const uint16_t *halves, float *numbers, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)halves[i] << 16;
        memcpy(&numbers[i], &bits, sizeof bits);
    }
}

/* Outputs of one run, then the same bits again: blocks of threads that wait wrongly show. */
static bool run_call(checking *c, const kvant_cuda_attention_args *args, size_t bytes, void *out,
                     void *again)
{
    bool ok = true;
    for (int i = 0; ok && i < 2; i++)
        ok = gpu_ok(c->gpu, c->gpu->driver->fill(gpu_at(args->out), 0xff, bytes, c->gpu->stream),
                    "cuMemsetD8") &&
             gpu_did(c->gpu, kvant_cuda_attention(args, c->gpu->stream), "attention") &&
             gpu_read(c->gpu, i == 0 ? out : again, args->out, bytes);
    if (ok && memcmp(out, again, bytes) != 0)
        test_note(c->result, &c->result->attention, TEST_WRONG,
                  "attention of %u query tokens: two runs, two results", args->query_tokens);
    return ok;
}

static void attend(checking *c, size_t which)
{
    const test_call *call = &c->p->calls[which];
    const size_t rows = (size_t)call->n_queries * TEST_HEADS, n = rows * c->p->pair.head_dim;
    const kvant_cuda_attention_args args = attention_args(c, call, which);
    const bool halves = args.type == KVANT_CUDA_BF16;
    float *out = malloc(n * sizeof *out), *raw = malloc(n * sizeof *raw),
          *again = malloc(n * sizeof *again);
    float *lse = malloc(rows * sizeof *lse);
    if (out == NULL || raw == NULL || again == NULL || lse == NULL)
        gpu_did(c->gpu, KVANT_ERR_MEMORY, "attention");
    else if (c->gpu->error[0] == 0 && run_call(c, &args, n * (halves ? 2 : 4), raw, again) &&
             gpu_read(c->gpu, lse, args.lse, rows * sizeof *lse)) {
        if (halves)
            widen((const uint16_t *)(const void *)raw, out, n);
        test_compare_call(c->result, c->p, which,
                          &(test_outputs){ .out = halves ? out : raw,
                                           .lse = lse,
                                           .place = TEST_ON_GPU,
                                           .rounding = halves ? 0x1p-8 : 0x1p-22 });
    }
    free(out);
    free(raw);
    free(again);
    free(lse);
}

/* Whether attention takes this pair. */
static bool has_kernel(checking *c)
{
    char why[TEST_WHY_BYTES] = "";
    const kvant_status status =
        kvant_cuda_attention_check(c->roles[0].codec, c->roles[1].codec, why, sizeof why);
    if (status != KVANT_OK)
        test_note(c->result, &c->result->attention,
                  status == KVANT_ERR_UNSUPPORTED ? TEST_NO_KERNEL : TEST_FAILED, "%s", why);
    return status == KVANT_OK;
}

static void prepare_attention(checking *c)
{
    const uint32_t d = c->p->pair.head_dim;
    const int32_t length = TEST_TOKENS;
    c->workspace_bytes = kvant_cuda_attention_workspace(d);
    c->scratch_bytes =
        c->workspace_bytes + KVANT_CUDA_SCRATCH_PER_BLOCK(d) * TEST_BLOCKS * TEST_KV_HEADS;
    c->workspace = gpu_new(c->gpu, c->scratch_bytes, 0);
    c->lengths = gpu_upload(c->gpu, &length, sizeof length);
    if (c->workspace_bytes == 0)
        gpu_did(c->gpu, KVANT_ERR_CUDA, "the workspace of attention");
}

/* An error belongs to the step that it happened in. */
static void note_error(checking *c, test_state *state)
{
    if (c->gpu->error[0] != 0)
        test_note(c->result, state, TEST_FAILED, "%s", c->gpu->error);
}

static void check(checking *c)
{
    static const int32_t blocks[TEST_BLOCKS] = { 0, 1, 2 };
    c->blocks = gpu_upload(c->gpu, blocks, sizeof blocks);
    const bool placed = place(c, KVANT_ROLE_K) && place(c, KVANT_ROLE_V);
    for (int r = 0; placed && r < 2; r++)
        encode(c, r);
    note_error(c, &c->result->encode);
    for (int r = 0; placed && c->gpu->error[0] == 0 && r < 2; r++)
        decode(c, r);
    note_error(c, &c->result->decode);
    const bool attends = c->gpu->error[0] == 0 && has_kernel(c);
    if (attends)
        prepare_attention(c);
    for (size_t i = 0; attends && c->gpu->error[0] == 0 && i < TEST_CALLS; i++)
        attend(c, i);
    note_error(c, &c->result->attention);
}

void test_gpu_check(test_gpu *gpu, const test_problem *p, test_result *r)
{
    checking c = { .gpu = gpu, .p = p, .result = r };
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    if (!gpu->lost)
        gpu_begin(gpu);
    if (gpu->error[0] != 0)
        note_error(&c, &r->encode);
    else if (make_codec(&c, KVANT_ROLE_K) && make_codec(&c, KVANT_ROLE_V))
        check(&c);
    for (int i = 0; i < 2; i++) {
        kvant_cuda_codec_free(&c.roles[i].codec);
        kvant_cuda_codec_free(&c.roles[i].open);
    }
}
