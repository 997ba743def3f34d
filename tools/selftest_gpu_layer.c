/* selftest_gpu_layer.c - the keys and values of a layer on a GPU, for `kvant selftest`. A check
 * lets the GPU encode, and compares the bytes. Then it puts portable C's pages in their place: a
 * wrong encoder must not make decode and attention look wrong. A measurement has long
 * sequences, which no cache of a GPU holds. */
#include "selftest_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CENTER, SCALE, WEIGHTS, INVERSE, CENTROIDS, N_TABLES };
enum { ENCODED = 4096, MOST_SEQUENCES = 16 };

typedef struct layer {
    test_gpu *gpu;
    const test_problem *p;
    test_result *result;
    uint32_t kv_heads, sequences, blocks, tokens; /* blocks and tokens of a sequence */
    kvant_cuda_codec *codec[2], *open[2];
    float *tables[2][N_TABLES]; /* of all kv heads (kvant_cuda_tables), or NULL */
    size_t key_transform_size[2];
    size_t block_bytes;
    void *pool;         /* per block pages of keys, then of values, as a problem has them */
    void *open_pool[2]; /* fp16 pages, for codecs with groups of tokens */
    int32_t *table;     /* of blocks, which lie in order */
    int32_t *lengths;
    void *workspace;
    size_t workspace_bytes, scratch_bytes; /* without and with room for unpacked pages */
    kvant_cuda_attention_args attention;
    kvant_cuda_append_args append;
} layer;

static kvant_cuda_pages pages_of(const layer *l, int role, bool open)
{
    const size_t bytes = open ? 128 * (size_t)l->p->pair.head_dim : l->p->info[role].page_bytes;
    const size_t keys = l->kv_heads * l->p->info[KVANT_ROLE_K].page_bytes;
    return open ? (kvant_cuda_pages){ l->open_pool[role], l->kv_heads * bytes, bytes }
                : (kvant_cuda_pages){ (char *)l->pool + (role ? keys : 0), l->block_bytes, bytes };
}

/* Arrays of all kv heads side by side; these share the problem's codecs. */
static void upload_tables(layer *l, int role)
{
    const size_t d = l->p->pair.head_dim;
    for (uint32_t head = 0; head < l->kv_heads; head++) {
        kvant_cuda_tables t = { .size = sizeof t };
        kvant_cuda_codec_tables(l->p->codec[role][head % TEST_KV_HEADS], &t);
        const float *parts[] = { t.center, t.scale, t.key_transform, t.inverse_key_transform,
                                 t.centroids };
        const size_t sizes[] = { d, d, t.key_transform_size, t.key_transform_size, t.n_centroids };
        l->key_transform_size[role] = t.key_transform_size;
        for (int i = 0; i < N_TABLES; i++) {
            const size_t bytes = sizes[i] * sizeof(float);
            if (parts[i] == NULL)
                continue;
            if (head == 0)
                l->tables[role][i] = gpu_new(l->gpu, l->kv_heads * bytes, 0);
            gpu_write(l->gpu, l->tables[role][i], head * bytes, parts[i], bytes);
        }
    }
}

static void make_table(layer *l)
{
    const size_t n = l->sequences * l->blocks;
    int32_t *table = malloc((n + l->sequences) * sizeof *table);
    for (size_t i = 0; table != NULL && i < n + l->sequences; i++)
        table[i] = i < n ? (int32_t)i : (int32_t)l->tokens;
    gpu_did(l->gpu, table != NULL ? KVANT_OK : KVANT_ERR_MEMORY, "a table of blocks");
    l->table = gpu_upload(l->gpu, table, (n + l->sequences) * sizeof *table);
    l->lengths = l->table != NULL ? l->table + n : NULL;
    free(table);
}

/* False after noting that there is no kernel, or with an error. */
static bool make_codecs(layer *l)
{
    char why[TEST_WHY_BYTES] = "";
    kvant_status status = KVANT_OK;
    for (int role = 0; status == KVANT_OK && role < 2; role++)
        status = kvant_cuda_codec_from(l->p->codec[role][0], &l->codec[role], why, sizeof why);
    for (int i = 0; status != KVANT_OK && i < TEST_STEPS; i++)
        test_note(l->result, (test_step)i,
                  status == KVANT_ERR_UNSUPPORTED ? TEST_NO_KERNEL : TEST_FAILED, "%s", why);
    for (int role = 0; status == KVANT_OK && role < 2; role++)
        if (gpu_did(l->gpu, kvant_cuda_codec_create_open(l->codec[role], &l->open[role]),
                    "an open codec"))
            upload_tables(l, role);
    return status == KVANT_OK && l->gpu->error[0] == 0;
}

static bool open_layer(layer *l)
{
    const uint32_t d = l->p->pair.head_dim;
    gpu_begin(l->gpu);
    if (l->gpu->error[0] != 0 || !make_codecs(l))
        return false;
    l->block_bytes = l->kv_heads / TEST_KV_HEADS * l->p->block_bytes;
    l->pool = gpu_new(l->gpu, l->sequences * l->blocks * l->block_bytes, 0);
    make_table(l);
    l->workspace_bytes = kvant_cuda_attention_workspace(d);
    l->scratch_bytes =
        l->workspace_bytes + KVANT_CUDA_SCRATCH_PER_BLOCK(d) * l->blocks * l->kv_heads;
    if (l->workspace_bytes == 0)
        gpu_did(l->gpu, KVANT_ERR_CUDA, "the workspace of attention");
    l->workspace = gpu_new(l->gpu, l->scratch_bytes, 0);
    return l->gpu->error[0] == 0;
}

static void close_layer(layer *l)
{
    for (int i = 0; i < 2; i++) {
        kvant_cuda_codec_free(&l->codec[i]);
        kvant_cuda_codec_free(&l->open[i]);
    }
}

/* Encode */

static bool in_groups(const layer *l, int role)
{
    return l->p->info[role].block_tokens > 1;
}

/* Puts the rows of tokens first to end - 1 into l->append. Codecs with groups of tokens get fp16
 * pages. */
static void prepare_append(layer *l, void *const *rows, const int64_t *slots, uint32_t first,
                           uint32_t end)
{
    const size_t d = l->p->pair.head_dim, width = l->kv_heads * d;
    kvant_cuda_append_args *a = &l->append;
    *a = (kvant_cuda_append_args){ .size = sizeof *a, .type = KVANT_CUDA_BF16 };
    a->n_tokens = end - first, a->n_kv_heads = l->kv_heads, a->slots = slots + first;
    for (int role = 0; role < 2; role++) {
        kvant_cuda_rows *r = role ? &a->v : &a->k;
        float *const *tables = l->tables[role];
        r->codec = in_groups(l, role) ? l->open[role] : l->codec[role];
        r->pages = pages_of(l, role, in_groups(l, role));
        r->rows = (const uint16_t *)rows[role] + first * width;
        r->token_stride = width, r->head_stride = d;
        r->center = tables[CENTER], r->scale = tables[SCALE], r->key_transform = tables[WEIGHTS];
        a->centroids[role] = tables[CENTROIDS];
    }
}

static void seal(layer *l)
{
    kvant_cuda_seal_args a = { .size = sizeof a, .n_blocks = l->blocks, .n_kv_heads = l->kv_heads };
    a.from = a.to = l->table;
    for (int role = 0; role < 2; role++) {
        a.centroids[role] = l->tables[role][CENTROIDS];
        if (in_groups(l, role))
            *(role ? &a.v : &a.k) =
                (kvant_cuda_seal_pages){ l->codec[role], pages_of(l, role, true),
                                         pages_of(l, role, false) };
    }
    if ((a.k.codec != NULL || a.v.codec != NULL) && l->gpu->error[0] == 0)
        gpu_did(l->gpu, kvant_cuda_seal(&a, l->gpu->stream), "seal");
}

/* n slots in order, and as many tokens' rows, which are the problem's repeated. */
static int64_t *upload_tokens(layer *l, size_t n, void **rows)
{
    const size_t d = l->p->pair.head_dim;
    int64_t slots[ENCODED];
    for (size_t i = 0; i < n; i++)
        slots[i] = (int64_t)i;
    for (int role = 0; role < 2; role++)
        rows[role] = gpu_upload_bf16(l->gpu, l->p->rows[role], TEST_ROWS * TEST_KV_HEADS * d,
                                     n * l->kv_heads * d);
    return gpu_upload(l->gpu, slots, n * sizeof *slots);
}

/* Many tokens, 64 and one have kernels of their own. Leaves portable C's pages. */
static void check_encode(layer *l)
{
    static const uint32_t ends[] = { TEST_ROWS - 65, TEST_ROWS - 1, TEST_ROWS };
    const size_t bytes = TEST_BLOCKS * l->block_bytes;
    void *rows[2];
    const int64_t *slots = upload_tokens(l, TEST_ROWS, rows);
    uint8_t *pages = malloc(bytes);
    for (int role = 0; role < 2; role++)
        l->open_pool[role] = gpu_new(l->gpu, TEST_BLOCKS * pages_of(l, role, true).block_stride, 0);
    for (uint32_t i = 0, first = 0; l->gpu->error[0] == 0 && i < 3; first = ends[i++]) {
        prepare_append(l, rows, slots, first, ends[i]);
        gpu_did(l->gpu, kvant_cuda_append(&l->append, l->gpu->stream), "append");
    }
    seal(l);
    if (pages == NULL)
        gpu_did(l->gpu, KVANT_ERR_MEMORY, "encode");
    else if (gpu_read(l->gpu, pages, l->pool, bytes))
        test_compare_pages(l->result, l->p, pages);
    gpu_write(l->gpu, l->pool, 0, l->p->pages, bytes);
    free(pages);
}

/* Decode */

static void check_decode(layer *l)
{
    const size_t d = l->p->pair.head_dim, bytes = TEST_ROWS * TEST_KV_HEADS * d * sizeof(float);
    kvant_cuda_decode_args a = { .size = sizeof a, .blocks = l->table, .n_blocks = TEST_BLOCKS };
    float *rows = malloc(bytes);
    a.n_kv_heads = TEST_KV_HEADS, a.type = KVANT_CUDA_F32;
    a.token_stride = TEST_KV_HEADS * d, a.head_stride = d;
    for (int role = 0; role < 2; role++) {
        float *const *tables = l->tables[role];
        a.codec = l->codec[role], a.pages = pages_of(l, role, false);
        a.out = gpu_new(l->gpu, bytes, 0xff);
        a.center = tables[CENTER], a.scale = tables[SCALE];
        a.inverse_key_transform = tables[INVERSE], a.centroids = tables[CENTROIDS];
        if (rows == NULL)
            gpu_did(l->gpu, KVANT_ERR_MEMORY, "decode");
        else if (l->gpu->error[0] == 0 &&
                 gpu_did(l->gpu, kvant_cuda_decode(&a, l->gpu->stream), "decode") &&
                 gpu_read(l->gpu, rows, a.out, bytes))
            test_compare_rows(l->result, l->p, (kvant_role)role, rows);
    }
    free(rows);
}

/* Attention */

/* Queries as attention takes them: bf16, or through a matrix and binary32. */
static void upload_queries(layer *l, const float *q, size_t period, uint32_t n_queries)
{
    const uint32_t n_heads = l->kv_heads * TEST_GROUP;
    const size_t d = l->p->pair.head_dim, n = n_queries * n_heads * d;
    kvant_cuda_attention_args *to = &l->attention;
    to->type = KVANT_CUDA_BF16;
    to->q = gpu_upload_bf16(l->gpu, q, period, n);
    if (l->key_transform_size[KVANT_ROLE_K] <= d)
        return;
    kvant_cuda_query_args a = { .size = sizeof a, .k_codec = l->codec[KVANT_ROLE_K] };
    a.batch = n_queries, a.n_heads = n_heads, a.n_kv_heads = l->kv_heads;
    a.type = KVANT_CUDA_BF16, a.q = to->q, a.q_batch_stride = n_heads * d, a.q_head_stride = d;
    a.inverse_key_transform = l->tables[KVANT_ROLE_K][INVERSE];
    to->q = a.out = gpu_new(l->gpu, n * sizeof *a.out, 0xff);
    to->type = KVANT_CUDA_F32;
    if (l->gpu->error[0] == 0)
        gpu_did(l->gpu, kvant_cuda_transform_queries(&a, l->gpu->stream), "queries");
}

/* n_queries query tokens of every sequence, into l->attention. */
static void prepare_attention(layer *l, const float *q, size_t period, uint32_t n_queries)
{
    const size_t d = l->p->pair.head_dim, width = l->kv_heads * TEST_GROUP * d;
    const size_t rows = (size_t)l->sequences * n_queries * l->kv_heads * TEST_GROUP;
    float *const *k = l->tables[KVANT_ROLE_K], *const *v = l->tables[KVANT_ROLE_V];
    kvant_cuda_attention_args *a = &l->attention;
    *a = (kvant_cuda_attention_args){ .size = sizeof *a, .scale = 1 / sqrtf((float)d) };
    a->k_codec = l->codec[KVANT_ROLE_K], a->v_codec = l->codec[KVANT_ROLE_V];
    a->k = pages_of(l, KVANT_ROLE_K, false), a->v = pages_of(l, KVANT_ROLE_V, false);
    a->block_table = l->table, a->table_stride = a->blocks_per_row = l->blocks;
    a->lengths = l->lengths, a->batch = l->sequences;
    a->n_heads = l->kv_heads * TEST_GROUP, a->n_kv_heads = l->kv_heads;
    a->q_batch_stride = a->out_batch_stride = n_queries * width;
    a->q_token_stride = a->out_token_stride = width;
    a->q_head_stride = a->out_head_stride = d;
    a->v_center = v[CENTER], a->v_scale = v[SCALE];
    a->k_scale = l->key_transform_size[KVANT_ROLE_K] == d ? k[INVERSE] : k[SCALE];
    a->centroids[KVANT_ROLE_K] = k[CENTROIDS], a->centroids[KVANT_ROLE_V] = v[CENTROIDS];
    a->workspace = l->workspace, a->workspace_bytes = l->workspace_bytes;
    a->query_tokens = n_queries, a->causal = n_queries > 1;
    upload_queries(l, q, period, l->sequences * n_queries);
    a->out = gpu_new(l->gpu, rows * d * sizeof(float), 0xff);
    a->lse = gpu_new(l->gpu, rows * sizeof(float), 0xff);
}

/* Outputs, from bf16 if need be. NULL after an error. */
static float *read_outputs(layer *l, size_t n)
{
    const bool halves = l->attention.type == KVANT_CUDA_BF16;
    const size_t bytes = n * (halves ? 2 : 4);
    uint32_t *out = calloc(n, sizeof *out);
    gpu_did(l->gpu, out != NULL ? KVANT_OK : KVANT_ERR_MEMORY, "attention");
    if (!gpu_fill(l->gpu, l->attention.out, 0xff, bytes) ||
        !gpu_did(l->gpu, kvant_cuda_attention(&l->attention, l->gpu->stream), "attention") ||
        !gpu_read(l->gpu, out, l->attention.out, bytes)) {
        free(out);
        return NULL;
    }
    for (size_t i = n; halves && i-- > 0;) {
        uint16_t half;
        memcpy(&half, (const char *)out + 2 * i, sizeof half);
        out[i] = (uint32_t)half << 16;
    }
    return (float *)(void *)out;
}

/* The same bits twice: blocks of threads that wait wrongly show. */
static void check_call(layer *l, size_t which)
{
    const test_call *c = &l->p->calls[which];
    const size_t rows = (size_t)c->n_queries * TEST_HEADS, n = rows * l->p->pair.head_dim;
    prepare_attention(l, c->q, n, c->n_queries);
    if (which + 1 == TEST_CALLS)
        l->attention.workspace_bytes = l->scratch_bytes;
    float *out = read_outputs(l, n), *again = read_outputs(l, n), *lse = malloc(rows * sizeof *lse);
    gpu_did(l->gpu, lse != NULL ? KVANT_OK : KVANT_ERR_MEMORY, "attention");
    if (gpu_read(l->gpu, lse, l->attention.lse, rows * sizeof *lse)) {
        const double rounding = l->attention.type == KVANT_CUDA_BF16 ? 0x1p-8 : 0x1p-22;
        if (memcmp(out, again, n * sizeof *out) != 0)
            test_note(l->result, TEST_ATTENTION, TEST_WRONG,
                      "attention of %u query tokens: two runs, two results", c->n_queries);
        test_compare_call(l->result, l->p, which,
                          &(test_outputs){ out, lse, rounding, TEST_ON_GPU, false });
    }
    free(out);
    free(again);
    free(lse);
}

static void check_attention(layer *l)
{
    char why[TEST_WHY_BYTES] = "";
    const kvant_status status =
        kvant_cuda_attention_check(l->codec[0], l->codec[1], why, sizeof why);
    if (status != KVANT_OK)
        test_note(l->result, TEST_ATTENTION,
                  status == KVANT_ERR_UNSUPPORTED ? TEST_NO_KERNEL : TEST_FAILED, "%s", why);
    for (size_t i = 0; status == KVANT_OK && l->gpu->error[0] == 0 && i < TEST_CALLS; i++)
        check_call(l, i);
}

/* An error belongs to the step that it happened in, and to those after it. */
void test_gpu_check(test_gpu *gpu, const test_problem *p, test_result *r)
{
    static void (*const steps[])(layer *) = { check_encode, check_decode, check_attention };
    layer l = { .gpu = gpu, .p = p, .result = r };
    l.kv_heads = TEST_KV_HEADS, l.sequences = 1, l.blocks = TEST_BLOCKS, l.tokens = TEST_TOKENS;
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    const bool opened = open_layer(&l);
    for (int i = 0; i < TEST_STEPS; i++) {
        if (opened && gpu->error[0] == 0)
            steps[i](&l);
        if (gpu->error[0] != 0)
            test_note(r, (test_step)i, TEST_FAILED, "%s", gpu->error);
    }
    close_layer(&l);
}

/* Speed */

static bool run_append(void *user, int times)
{
    const layer *l = user;
    for (int i = 0; i < times && l->gpu->error[0] == 0; i++)
        gpu_did(l->gpu, kvant_cuda_append(&l->append, l->gpu->stream), "append");
    return gpu_finish(l->gpu);
}

static bool run_attention(void *user, int times)
{
    const layer *l = user;
    for (int i = 0; i < times && l->gpu->error[0] == 0; i++)
        gpu_did(l->gpu, kvant_cuda_attention(&l->attention, l->gpu->stream), "attention");
    return gpu_finish(l->gpu);
}

/* Copies the first half of the pool to its second half. */
static bool run_copy(void *user, int times)
{
    const layer *l = user;
    const size_t bytes = l->sequences * l->blocks / 2 * l->block_bytes;
    for (int i = 0; i < times; i++)
        gpu_copy(l->gpu, (char *)l->pool + bytes, l->pool, bytes);
    return gpu_finish(l->gpu);
}

/* Encodes the first blocks, which is timed, and copies them to all others. */
static void measure(layer *l, test_speed *s)
{
    const size_t n = l->p->pair.head_dim * TEST_ROWS * TEST_KV_HEADS, first = ENCODED / 64;
    void *rows[2];
    const int64_t *slots = upload_tokens(l, ENCODED, rows);
    prepare_append(l, rows, slots, 0, ENCODED);
    s->encode_rows = 2.0 * ENCODED * SPEED_KV_HEADS / test_time(run_append, l);
    for (size_t block = first; block < l->sequences * l->blocks; block += first)
        gpu_copy(l->gpu, (char *)l->pool + block * l->block_bytes, l->pool, first * l->block_bytes);
    prepare_attention(l, l->p->rows[KVANT_ROLE_K], n, 1);
    s->attention = test_time(run_attention, l);
    s->copy = 2 * test_time(run_copy, l);
}

/* As many sequences as fit into a third of the free memory, at most 16. */
void test_gpu_speed(test_gpu *gpu, const test_problem *p, test_result *r)
{
    layer l = { .gpu = gpu, .p = p, .result = r };
    test_speed s = { .sequences = 1 };
    if (in_groups(&l, KVANT_ROLE_K) || in_groups(&l, KVANT_ROLE_V))
        return; /* append takes codecs with one scale per token */
    gpu_begin(gpu);
    const double fit = (double)gpu_free_bytes(gpu) / 3 / test_speed_bytes(p);
    s.sequences = (uint32_t)fmin(fmax(fit, 1), MOST_SEQUENCES);
    s.bytes = s.sequences * test_speed_bytes(p);
    l.kv_heads = SPEED_KV_HEADS, l.sequences = s.sequences;
    l.blocks = SPEED_TOKENS / 64, l.tokens = SPEED_TOKENS;
    if (open_layer(&l))
        measure(&l, &s);
    if (gpu->error[0] != 0)
        test_note(r, TEST_ATTENTION, TEST_FAILED, "speed: %s", gpu->error);
    else
        r->speed = s;
    close_layer(&l);
}
