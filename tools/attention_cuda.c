/* attention_cuda.c - decode attention of libkvant_cuda as a subject of `kvant bench cuda`.
 *
 * A run is the replay of a CUDA graph that holds the one call, after memory of four times the second-level cache was
 * overwritten: no page is still there, as in a model whose weights pass through. Pages are encoded on the CPU, whose bytes
 * are the GPU's, and lie in random order. */
#include "attention_cuda.h"

#include "command.h"

#include <kvant/cuda.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = KVANT_PAGE_TOKENS, CAPTURE_MODE_THREAD = 1, K = KVANT_ROLE_K, V = KVANT_ROLE_V };
#define ROOM_TO_SPARE ((size_t)64 << 20) /* for graphs and kernels */

typedef struct cuda_state {
    const gpu *gpu;
    const attention_inputs *in;
    kvant_codec *codecs[2];
    kvant_cuda_codec *gpu_codecs[2];
    size_t page_bytes[2], block_bytes; /* a block: the K pages of all kv heads, then the V pages */
    uint32_t pages, n_distinct;        /* of a sequence; blocks with contents of their own, the first of the pool */
    char *distinct;                    /* these blocks */
    int32_t *table;                    /* batch x pages */
    gpu_address memory, pool, q, out, workspace, table_there, lengths;
    gpu_graph graph;
    gpu_graph_exec exec;
} cuda_state;

static void *pointer(gpu_address address)
{
    return (void *)(uintptr_t)address;
}

static bool make_codec(cuda_state *s, const char *spec, kvant_role role)
{
    char err[512] = "";
    kvant_codec_info info = { .size = sizeof info };
    if (kvant_codec_create(spec, s->in->shape.head_dim, role, 1, &s->codecs[role], err, sizeof err) != KVANT_OK ||
        kvant_cuda_codec_from(s->codecs[role], &s->gpu_codecs[role], err, sizeof err) != KVANT_OK)
        return complain("%s: %s", spec, err);
    kvant_codec_get_info(s->codecs[role], &info);
    s->page_bytes[role] = info.page_bytes;
    return true;
}

static bool make_codecs(cuda_state *s, const char *k, const char *v)
{
    char err[512] = "";
    if (!make_codec(s, k, KVANT_ROLE_K) || !make_codec(s, v, KVANT_ROLE_V))
        return false;
    if (kvant_cuda_attention_check(s->gpu_codecs[K], s->gpu_codecs[V], err, sizeof err) != KVANT_OK)
        return complain("%s", err);
    s->block_bytes = s->in->shape.n_kv_heads * (s->page_bytes[K] + s->page_bytes[V]);
    s->pages = (s->in->shape.n_tokens + PAGE - 1) / PAGE;
    s->n_distinct = s->in->n_rows / PAGE;
    return true;
}

/* Where a page of the distinct blocks begins. */
static char *distinct_page(const cuda_state *s, uint32_t block, int role, uint32_t head)
{
    return s->distinct + block * s->block_bytes + (role == V ? s->in->shape.n_kv_heads * s->page_bytes[K] : 0) +
           head * s->page_bytes[role];
}

static bool encode_blocks(cuda_state *s)
{
    const uint32_t d = s->in->shape.head_dim, heads = s->in->shape.n_kv_heads;
    if ((s->distinct = calloc(s->n_distinct, s->block_bytes)) == NULL)
        return complain("out of memory");
    for (uint32_t i = 0; i < s->n_distinct * heads * 2; i++) {
        const uint32_t role = i % 2, head = i / 2 % heads, block = i / 2 / heads;
        const float *rows = (role == K ? s->in->k : s->in->v) + ((size_t)block * PAGE * heads + head) * d;
        if (!gpu_library_ok(kvant_codec_encode(s->codecs[role], NULL, rows, (size_t)heads * d, 0, PAGE,
                                               distinct_page(s, block, (int)role, head)),
                            "encoding rows"))
            return false;
    }
    return true;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

/* All blocks in random order. */
static bool shuffle_blocks(cuda_state *s)
{
    const uint32_t n = s->in->shape.batch * s->pages;
    uint64_t state = 88172645463325252u;
    if ((s->table = malloc(n * sizeof *s->table)) == NULL)
        return complain("no memory for a table of %u blocks", (unsigned)n);
    for (uint32_t i = 0; i < n; i++) { /* inside out: block i goes to a random place up to its own */
        const uint32_t j = (uint32_t)(next_random(&state) % (i + 1));
        s->table[i] = s->table[j];
        s->table[j] = (int32_t)i;
    }
    return true;
}

/* Lays out one span for everything, checked against what is free, so that nothing is half done when it is not enough. */
static bool make_memory(cuda_state *s, size_t pool, size_t q, size_t workspace)
{
    const gpu *g = s->gpu;
    const size_t batch = s->in->shape.batch;
    const struct {
        gpu_address *address;
        size_t bytes;
    } parts[] = { { &s->pool, pool },
                  { &s->q, q },
                  { &s->out, q },
                  { &s->workspace, workspace },
                  { &s->table_there, batch * s->pages * sizeof *s->table },
                  { &s->lengths, batch * sizeof(int32_t) } };
    enum { N_PARTS = sizeof parts / sizeof *parts };
    size_t offsets[N_PARTS + 1] = { 0 }, available, total;
    for (size_t i = 0; i < N_PARTS; i++)
        offsets[i + 1] = offsets[i] + (parts[i].bytes + 255) / 256 * 256;
    if (!gpu_ok(g, g->memory_info(&available, &total), "asking for free memory"))
        return false;
    if (offsets[N_PARTS] + ROOM_TO_SPARE > available) {
        complain("the cache takes %zu MiB, and the device has %zu MiB free", pool >> 20, available >> 20);
        return hint("give fewer --tokens or a smaller --batch");
    }
    s->memory = gpu_new(g, offsets[N_PARTS]);
    for (size_t i = 0; i < N_PARTS; i++)
        *parts[i].address = s->memory + offsets[i];
    return s->memory != 0;
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static bool upload_query(cuda_state *s, size_t n)
{
    uint16_t *halves = malloc(n * sizeof *halves);
    if (halves == NULL)
        return complain("no memory for %zu numbers", n);
    for (size_t i = 0; i < n; i++)
        halves[i] = to_bf16(s->in->q[i]);
    const bool ok = gpu_ok(s->gpu, s->gpu->upload(s->q, halves, n * sizeof *halves), "copying the query");
    free(halves);
    return ok;
}

/* The distinct blocks, again and again until the pool is full. */
static bool fill_pool(cuda_state *s)
{
    const gpu *g = s->gpu;
    const size_t n = (size_t)s->in->shape.batch * s->pages;
    bool ok = true;
    for (size_t at = 0; at < n && ok; at += s->n_distinct) {
        const size_t left = n - at, bytes = (left < s->n_distinct ? left : s->n_distinct) * s->block_bytes;
        const gpu_address to = s->pool + at * s->block_bytes;
        ok = gpu_ok(g, at == 0 ? g->upload(to, s->distinct, bytes) : g->copy(to, s->pool, bytes, GPU_STREAM),
                    "filling the cache");
    }
    return ok;
}

static bool fill_memory(cuda_state *s)
{
    const gpu *g = s->gpu;
    const attention_shape *shape = &s->in->shape;
    const size_t n_q = (size_t)shape->batch * shape->n_heads * shape->head_dim, n_blocks = shape->batch * s->pages;
    const size_t workspace = kvant_cuda_attention_workspace(shape->head_dim);
    int32_t *lengths = malloc(shape->batch * sizeof *lengths);
    for (uint32_t b = 0; lengths != NULL && b < shape->batch; b++)
        lengths[b] = (int32_t)shape->n_tokens;
    const bool ok = lengths != NULL &&
                    make_memory(s, n_blocks * s->block_bytes, n_q * sizeof(uint16_t), workspace) &&
                    upload_query(s, n_q) && fill_pool(s) &&
                    gpu_ok(g, g->upload(s->table_there, s->table, n_blocks * sizeof *s->table), "copying the table") &&
                    gpu_ok(g, g->upload(s->lengths, lengths, shape->batch * sizeof *lengths), "copying lengths") &&
                    gpu_ok(g, g->fill(s->workspace, 0, workspace, GPU_STREAM), "clearing the workspace") &&
                    gpu_ok(g, g->fill(s->out, 0xff, n_q * sizeof(uint16_t), GPU_STREAM), "filling the output");
    free(lengths);
    return ok;
}

static bool enqueue_attention(const cuda_state *s)
{
    const attention_shape *shape = &s->in->shape;
    const size_t heads = (size_t)shape->n_heads * shape->head_dim;
    const gpu_address values = s->pool + shape->n_kv_heads * s->page_bytes[K];
    const kvant_cuda_attention_args args = {
        .size = sizeof args,
        .k_codec = s->gpu_codecs[K],
        .v_codec = s->gpu_codecs[V],
        .k = { pointer(s->pool), s->block_bytes, s->page_bytes[K] },
        .v = { pointer(values), s->block_bytes, s->page_bytes[V] },
        .block_table = pointer(s->table_there),
        .table_stride = s->pages,
        .blocks_per_row = s->pages,
        .lengths = pointer(s->lengths),
        .batch = shape->batch,
        .n_heads = shape->n_heads,
        .n_kv_heads = shape->n_kv_heads,
        .type = KVANT_CUDA_BF16,
        .q = pointer(s->q),
        .q_batch_stride = heads,
        .q_head_stride = shape->head_dim,
        .out = pointer(s->out),
        .out_batch_stride = heads,
        .out_head_stride = shape->head_dim,
        .scale = 1 / sqrtf((float)shape->head_dim),
        .workspace = pointer(s->workspace),
        .workspace_bytes = kvant_cuda_attention_workspace(shape->head_dim),
    };
    return gpu_library_ok(kvant_cuda_attention(&args, GPU_STREAM), "attention");
}

/* The first call is outside the graph: it loads the kernel. */
static bool record_graph(cuda_state *s)
{
    const gpu *g = s->gpu;
    if (!enqueue_attention(s) ||
        !gpu_ok(g, g->capture_begin(GPU_STREAM, CAPTURE_MODE_THREAD), "recording a graph"))
        return false;
    const bool called = enqueue_attention(s);
    return gpu_ok(g, g->capture_end(GPU_STREAM, &s->graph), "recording a graph") && called &&
           gpu_ok(g, g->graph_instantiate(&s->exec, s->graph, 0), "making a graph");
}

static gpu_result replay(const gpu *g, void *state)
{
    const cuda_state *s = state;
    return g->graph_launch(s->exec, GPU_STREAM);
}

static bool run(attention_subject *subject, double *seconds)
{
    cuda_state *s = subject->state;
    return gpu_time(s->gpu, true, replay, s, seconds);
}

/* Rows of the first kv head of the distinct blocks. */
static bool decode_rows(const cuda_state *s, int role, float *rows)
{
    const uint32_t d = s->in->shape.head_dim;
    for (uint32_t block = 0; block < s->n_distinct; block++)
        if (!gpu_library_ok(kvant_codec_decode(s->codecs[role], NULL, distinct_page(s, block, role, 0), 0, PAGE,
                                               rows + (size_t)block * PAGE * d, d),
                            "decoding rows"))
            return false;
    return true;
}

/* softmax(k q) v over the first sequence's rows, one pass: sums relative to a running maximum. */
static void attend(const cuda_state *s, const float *k, const float *v, const float *q, double *out)
{
    const uint32_t d = s->in->shape.head_dim;
    double max = -INFINITY, sum = 0;
    memset(out, 0, d * sizeof *out);
    for (uint32_t t = 0; t < s->in->shape.n_tokens; t++) {
        const size_t row = ((size_t)s->table[t / PAGE] % s->n_distinct * PAGE + t % PAGE) * d;
        double score = 0;
        for (uint32_t j = 0; j < d; j++)
            score += (double)from_bf16(to_bf16(q[j])) * k[row + j];
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
            out[j] += weight * v[row + j];
    }
    for (uint32_t j = 0; j < d; j++)
        out[j] /= sum;
}

/* ||out - want|| / ||want|| of the first head of the first sequence, want being softmax in double precision over the
 * decoded pages. */
static bool check(attention_subject *subject)
{
    const cuda_state *s = subject->state;
    const uint32_t d = s->in->shape.head_dim;
    uint16_t out[KVANT_MAX_HEAD_DIM];
    double want[KVANT_MAX_HEAD_DIM], error = 0, norm = 0;
    float *k = malloc(2 * (size_t)s->in->n_rows * d * sizeof *k), *v = k + (size_t)s->in->n_rows * d;
    const bool ok = k != NULL && decode_rows(s, K, k) && decode_rows(s, V, v) &&
                    gpu_ok(s->gpu, s->gpu->download(out, s->out, d * sizeof *out), "reading back");
    if (ok)
        attend(s, k, v, s->in->q, want);
    free(k);
    for (uint32_t j = 0; j < d && ok; j++) {
        const double x = from_bf16(out[j]);
        error += (x - want[j]) * (x - want[j]);
        norm += want[j] * want[j];
    }
    subject->error = sqrt(error / norm);
    return ok;
}

static void release(void *state)
{
    cuda_state *s = state;
    if (s->exec != NULL)
        s->gpu->graph_exec_destroy(s->exec);
    if (s->graph != NULL)
        s->gpu->graph_destroy(s->graph);
    if (s->memory != 0)
        s->gpu->release(s->memory);
    for (int role = 0; role < 2; role++) {
        kvant_cuda_codec_free(&s->gpu_codecs[role]);
        kvant_codec_free(&s->codecs[role]);
    }
    free(s->distinct);
    free(s->table);
    free(s);
}

bool attention_cuda(attention_subject *subject, const attention_inputs *in, const gpu *g, const char *k, const char *v)
{
    cuda_state *s = calloc(1, sizeof *s);
    *subject = (attention_subject){ .n_layers = 1, .state = s, .run = run, .check = check, .free = release };
    if (s == NULL)
        return complain("out of memory");
    s->gpu = g;
    s->in = in;
    if (!make_codecs(s, k, v) || !encode_blocks(s) || !shuffle_blocks(s) || !fill_memory(s) || !record_graph(s))
        return false;
    subject->bytes = (double)in->shape.batch * s->pages * (double)s->block_bytes;
    return true;
}
