/* gpu_attention.c - a cache on the GPU for `kvant bench cuda`.
 *
 * All codecs take the way through open pages and sealing, because those with groups of tokens have no other. */
#include "gpu_attention.h"

#include "command.h"
#include "rows.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STAGED_BLOCKS = 32, PAGE = 64 };

static bool make_codec(gpu_attention *a, const char *spec, kvant_role role, kvant_cuda_codec **codec,
                       kvant_cuda_codec **open, size_t *page_bytes)
{
    char err[512];
    if (kvant_cuda_codec_create(spec, a->shape.head_dim, role, 1, codec, err, sizeof err) != KVANT_OK) {
        complain("%s: %s", spec, err);
        return false;
    }
    kvant_codec_info info = { .size = sizeof info };
    if (!gpu_library_ok(kvant_cuda_codec_get_info(*codec, &info), spec) ||
        !gpu_library_ok(kvant_cuda_codec_create_open(*codec, open), spec))
        return false;
    *page_bytes = info.page_bytes;
    a->bytes += (double)a->shape.batch * a->shape.n_kv_heads * ((a->shape.n_tokens + PAGE - 1) / PAGE) *
                (double)info.page_bytes;
    return true;
}

static bool make_codecs(gpu_attention *a, const char *k, const char *v)
{
    char err[512];
    if (!make_codec(a, k, KVANT_ROLE_K, &a->k, &a->k_open, &a->page_bytes[0]) ||
        !make_codec(a, v, KVANT_ROLE_V, &a->v, &a->v_open, &a->page_bytes[1]))
        return false;
    if (kvant_cuda_attention_check(a->k, a->v, err, sizeof err) != KVANT_OK) {
        complain("%s", err);
        return false;
    }
    return true;
}

/* Numbers of a query token, and of all query tokens of a sequence. */
static size_t token_numbers(const gpu_shape *s)
{
    return (size_t)s->n_heads * s->head_dim;
}

static size_t query_numbers(const gpu_shape *s)
{
    return s->query_tokens * token_numbers(s);
}

/* Space for everything, in one check against what is free, so that nothing is half done when it is not enough. */
static bool make_memory(gpu_attention *a)
{
    const gpu_shape *s = &a->shape;
    const uint32_t pages = (s->n_tokens + PAGE - 1) / PAGE;
    const size_t row = (size_t)s->n_kv_heads * s->head_dim;
    a->n_blocks = s->batch * pages;
    a->block_bytes = s->n_kv_heads * (a->page_bytes[0] + a->page_bytes[1]);
    a->open_page_bytes = (size_t)PAGE * s->head_dim * sizeof(uint16_t);
    const size_t workspace = kvant_cuda_attention_workspace(s->head_dim),
                 q = s->batch * query_numbers(s) * sizeof(uint16_t),
                 pool = a->n_blocks * a->block_bytes, open = 2 * STAGED_BLOCKS * s->n_kv_heads * a->open_page_bytes;
    const size_t rows = 2 * STAGED_BLOCKS * PAGE * row * sizeof(float);
    size_t available, total;
    if (!gpu_ok(a->gpu, a->gpu->driver.memory_info(&available, &total), "asking for free memory"))
        return false;
    if (pool + open + rows + 2 * q + workspace + ((size_t)64 << 20) > available) {
        complain("the cache takes %zu MiB, and the device has %zu MiB free", pool >> 20, available >> 20);
        hint("give fewer --tokens or a smaller --batch");
        return false;
    }
    return (a->pool = gpu_new(a->gpu, pool)) != 0 && (a->open_pool = gpu_new(a->gpu, open)) != 0 &&
           (a->rows = gpu_new(a->gpu, rows)) != 0 && (a->q = gpu_new(a->gpu, q)) != 0 &&
           (a->out = gpu_new(a->gpu, q)) != 0 && (a->workspace = gpu_new(a->gpu, workspace)) != 0 &&
           gpu_ok(a->gpu, a->gpu->driver.fill(a->workspace, 0, workspace, a->gpu->stream),
                  "clearing the workspace") &&
           gpu_ok(a->gpu, a->gpu->driver.fill(a->out, 0xff, q, a->gpu->stream), "filling the output");
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* The block table: all blocks in random order; also as what sealing writes to. */
static bool make_table(gpu_attention *a)
{
    const uint32_t n = a->n_blocks;
    int32_t *numbers = malloc(n * sizeof *numbers), lengths[4096];
    uint64_t state = 88172645463325252u;
    if (numbers == NULL) {
        complain("no memory for a table of %u blocks", (unsigned)n);
        return false;
    }
    for (uint32_t i = 0; i < n; i++)
        numbers[i] = (int32_t)i;
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t j = (uint32_t)(next_random(&state) % i);
        const int32_t swapped = numbers[i - 1];
        numbers[i - 1] = numbers[j];
        numbers[j] = swapped;
    }
    for (uint32_t b = 0; b < a->shape.batch; b++)
        lengths[b] = (int32_t)a->shape.n_tokens;
    a->table = gpu_new_copy(a->gpu, numbers, n * sizeof *numbers);
    a->lengths = gpu_new_copy(a->gpu, lengths, a->shape.batch * sizeof *lengths);
    free(numbers);
    return a->table != 0 && a->lengths != 0;
}

static bool upload_query(gpu_attention *a)
{
    const size_t n = a->shape.batch * query_numbers(&a->shape);
    float *numbers = malloc(n * sizeof *numbers);
    bool ok = numbers != NULL;
    if (ok) {
        rows_fill(numbers, n, 3);
        uint16_t *halves = (uint16_t *)numbers; /* in place: a half never lies behind the float it comes from */
        for (size_t i = 0; i < n; i++) {
            uint32_t bits;
            memcpy(&bits, numbers + i, sizeof bits);
            const uint16_t half = (uint16_t)(bits >> 16);
            memcpy(halves + i, &half, sizeof half);
        }
        ok = gpu_ok(a->gpu, a->gpu->driver.upload(a->q, halves, n * sizeof *halves), "copying the query");
    } else
        complain("no memory for %zu numbers", n);
    free(numbers);
    return ok;
}

static kvant_cuda_pages pages_of(const gpu_attention *a, kvant_role role)
{
    return (kvant_cuda_pages){ gpu_pointer(a->pool +
                                           (role == KVANT_ROLE_V ? a->shape.n_kv_heads * a->page_bytes[0] : 0)),
                               a->block_bytes, a->page_bytes[role == KVANT_ROLE_V] };
}

static kvant_cuda_pages open_pages_of(const gpu_attention *a, kvant_role role)
{
    const size_t half = a->shape.n_kv_heads * a->open_page_bytes;
    return (kvant_cuda_pages){ gpu_pointer(a->open_pool + (role == KVANT_ROLE_V ? half : 0)), 2 * half,
                               a->open_page_bytes };
}

/* Random rows into the staged open blocks. */
static bool stage_rows(gpu_attention *a)
{
    enum { TOKENS = STAGED_BLOCKS * PAGE };
    const size_t row = (size_t)a->shape.n_kv_heads * a->shape.head_dim, n = 2 * TOKENS * row;
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    float *rows = malloc(n * sizeof *rows);
    if (rows == NULL) {
        complain("no memory for %zu numbers", n);
        return false;
    }
    rows_fill(rows, n, 1);
    const bool there = gpu_ok(a->gpu, a->gpu->driver.upload(a->rows, rows, n * sizeof *rows), "copying rows") &&
                       (a->slots = gpu_new_copy(a->gpu, slots, sizeof slots)) != 0;
    free(rows);
    const kvant_cuda_append_args args = {
        .size = sizeof args,
        .k = { a->k_open, open_pages_of(a, KVANT_ROLE_K), gpu_pointer(a->rows), row, a->shape.head_dim, NULL,
               NULL },
        .v = { a->v_open, open_pages_of(a, KVANT_ROLE_V), gpu_pointer(a->rows + TOKENS * row * sizeof *rows), row,
               a->shape.head_dim, NULL, NULL },
        .type = KVANT_CUDA_F32,
        .n_tokens = TOKENS,
        .n_kv_heads = a->shape.n_kv_heads,
        .slots = gpu_pointer(a->slots),
    };
    return there && gpu_library_ok(kvant_cuda_append(&args, a->gpu->stream), "append");
}

/* The staged blocks, sealed again and again into all blocks of the table. */
static bool fill_pages(gpu_attention *a)
{
    int32_t from[STAGED_BLOCKS];
    for (int i = 0; i < STAGED_BLOCKS; i++)
        from[i] = i;
    if ((a->from = gpu_new_copy(a->gpu, from, sizeof from)) == 0)
        return false;
    for (uint32_t at = 0; at < a->n_blocks; at += STAGED_BLOCKS) {
        const kvant_cuda_seal_args args = {
            .size = sizeof args,
            .k = { a->k, open_pages_of(a, KVANT_ROLE_K), pages_of(a, KVANT_ROLE_K) },
            .v = { a->v, open_pages_of(a, KVANT_ROLE_V), pages_of(a, KVANT_ROLE_V) },
            .n_blocks = a->n_blocks - at < STAGED_BLOCKS ? a->n_blocks - at : STAGED_BLOCKS,
            .n_kv_heads = a->shape.n_kv_heads,
            .from = gpu_pointer(a->from),
            .to = gpu_pointer(a->table + at * sizeof(int32_t)),
        };
        if (!gpu_library_ok(kvant_cuda_seal(&args, a->gpu->stream), "seal"))
            return false;
    }
    return gpu_ok(a->gpu, a->gpu->driver.stream_wait(a->gpu->stream), "filling the cache");
}

bool gpu_attention_create(gpu_attention *a, const gpu *g, const gpu_shape *shape, const char *k, const char *v)
{
    *a = (gpu_attention){ .gpu = g, .shape = *shape };
    return make_codecs(a, k, v) && make_memory(a) && make_table(a) && upload_query(a) && stage_rows(a) &&
           fill_pages(a);
}

void gpu_attention_free(gpu_attention *a)
{
    if (a->gpu == NULL)
        return;
    gpu_address *const memory[] = { &a->pool,    &a->open_pool, &a->rows, &a->slots, &a->table,
                                    &a->lengths, &a->from,      &a->q,    &a->out,   &a->workspace };
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        if (*memory[i] != 0)
            a->gpu->driver.release(*memory[i]);
    kvant_cuda_codec **const codecs[] = { &a->k, &a->v, &a->k_open, &a->v_open };
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++)
        if (*codecs[i] != NULL)
            kvant_cuda_codec_free(codecs[i]);
    *a = (gpu_attention){ 0 };
}

bool gpu_attention_run(const gpu_attention *a)
{
    const gpu_shape *s = &a->shape;
    const uint32_t pages = (s->n_tokens + PAGE - 1) / PAGE;
    const kvant_cuda_attention_args args = {
        .size = sizeof args,
        .k_codec = a->k,
        .v_codec = a->v,
        .k = pages_of(a, KVANT_ROLE_K),
        .v = pages_of(a, KVANT_ROLE_V),
        .block_table = gpu_pointer(a->table),
        .table_stride = pages,
        .blocks_per_row = pages,
        .lengths = gpu_pointer(a->lengths),
        .batch = s->batch,
        .n_heads = s->n_heads,
        .n_kv_heads = s->n_kv_heads,
        .type = KVANT_CUDA_BF16,
        .q = gpu_pointer(a->q),
        .q_batch_stride = query_numbers(s),
        .q_head_stride = s->head_dim,
        .out = gpu_pointer(a->out),
        .out_batch_stride = query_numbers(s),
        .out_head_stride = s->head_dim,
        .scale = 1 / sqrtf((float)s->head_dim),
        .workspace = gpu_pointer(a->workspace),
        .workspace_bytes = kvant_cuda_attention_workspace(s->head_dim),
        .query_tokens = s->query_tokens,
        .q_token_stride = token_numbers(s),
        .out_token_stride = token_numbers(s),
        .causal = s->query_tokens > 1,
    };
    return gpu_library_ok(kvant_cuda_attention(&args, a->gpu->stream), "attention");
}

/* ---- the check ---- */

/* Rows of the first sequence and kv head, decoded by the GPU, which gives the CPU's numbers; free() them. */
static float *decode_rows(const gpu_attention *a, kvant_role role)
{
    const uint32_t pages = (a->shape.n_tokens + PAGE - 1) / PAGE;
    const size_t bytes = (size_t)pages * PAGE * a->shape.head_dim * sizeof(float);
    const gpu_address out = gpu_new(a->gpu, bytes);
    float *rows = malloc(bytes);
    const kvant_cuda_decode_args args = {
        .size = sizeof args,
        .codec = role == KVANT_ROLE_K ? a->k : a->v,
        .pages = pages_of(a, role),
        .blocks = gpu_pointer(a->table),
        .n_blocks = pages,
        .n_kv_heads = 1,
        .type = KVANT_CUDA_F32,
        .out = gpu_pointer(out),
        .token_stride = a->shape.head_dim,
        .head_stride = a->shape.head_dim,
    };
    const bool ok = out != 0 && rows != NULL &&
                    gpu_library_ok(kvant_cuda_decode(&args, a->gpu->stream), "decode") &&
                    gpu_ok(a->gpu, a->gpu->driver.stream_wait(a->gpu->stream), "decode") &&
                    gpu_ok(a->gpu, a->gpu->driver.download(rows, out, bytes), "copying rows");
    if (out != 0)
        a->gpu->driver.release(out);
    if (ok)
        return rows;
    free(rows);
    return NULL;
}

static bool read_halves(const gpu_attention *a, gpu_address from, double *to)
{
    uint16_t halves[KVANT_MAX_HEAD_DIM];
    if (!gpu_ok(a->gpu, a->gpu->driver.download(halves, from, a->shape.head_dim * sizeof *halves), "reading back"))
        return false;
    for (uint32_t j = 0; j < a->shape.head_dim; j++) {
        const uint32_t bits = (uint32_t)halves[j] << 16;
        float x;
        memcpy(&x, &bits, sizeof x);
        to[j] = x;
    }
    return true;
}

/* softmax(k q) v over n rows, one pass: sums relative to a running maximum. */
static void attend(const float *k, const float *v, const double *q, uint32_t n, uint32_t d, double *out)
{
    double max = -INFINITY, sum = 0;
    memset(out, 0, d * sizeof *out);
    for (uint32_t t = 0; t < n; t++) {
        double score = 0;
        for (uint32_t j = 0; j < d; j++)
            score += q[j] * k[(size_t)t * d + j];
        score /= sqrt(d);
        if (score > max) {
            const double shrink = exp(max - score);
            sum *= shrink;
            for (uint32_t j = 0; j < d; j++)
                out[j] *= shrink;
            max = score;
        }
        const double weight = exp(score - max);
        sum += weight;
        for (uint32_t j = 0; j < d; j++)
            out[j] += weight * v[(size_t)t * d + j];
    }
    for (uint32_t j = 0; j < d; j++)
        out[j] /= sum;
}

double gpu_attention_error(const gpu_attention *a)
{
    double q[KVANT_MAX_HEAD_DIM], out[KVANT_MAX_HEAD_DIM], want[KVANT_MAX_HEAD_DIM], error = 0, norm = 0;
    const uint32_t d = a->shape.head_dim;
    const size_t last = (a->shape.query_tokens - 1) * token_numbers(&a->shape) * sizeof(uint16_t);
    float *k = decode_rows(a, KVANT_ROLE_K), *v = k != NULL ? decode_rows(a, KVANT_ROLE_V) : NULL;
    const bool ok = v != NULL && gpu_ok(a->gpu, a->gpu->driver.stream_wait(a->gpu->stream), "attention") &&
                    read_halves(a, a->q + last, q) && read_halves(a, a->out + last, out);
    if (ok)
        attend(k, v, q, a->shape.n_tokens, d, want);
    free(k);
    free(v);
    if (!ok)
        return NAN;
    for (uint32_t j = 0; j < d; j++) {
        error += (out[j] - want[j]) * (out[j] - want[j]);
        norm += want[j] * want[j];
    }
    return sqrt(error / norm);
}
