/* selftest_gpu_speed.c - speeds of `kvant selftest` on a GPU: rows that append encodes, decode
 * attention over 16 long sequences, which no cache of a GPU holds, and a copy of as many bytes. */
#include "selftest_gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { KV_HEADS = 8, HEADS = 32, ENCODED = 4096, TOKENS = 8192, MOST_SEQUENCES = 16, ROUNDS = 5 };

/* Calls of a round last about so long together: far longer than what a launch and an event cost. */
#define ROUND_SECONDS 0.01

typedef struct measuring {
    test_gpu *gpu;
    test_speed *s;
    kvant_codec *codec[2];
    kvant_cuda_codec *gpu_codec[2];
    kvant_codec_info info[2];
    kvant_cuda_append_args append;
    kvant_cuda_attention_args attention;
    void *pool, *other; /* as many bytes */
    size_t block_bytes; /* keys and values of all kv heads */
    uint32_t n_blocks;
} measuring;

static kvant_status make_codecs(measuring *m, char *why)
{
    const char *specs[] = { m->s->pair.k, m->s->pair.v };
    kvant_status status = KVANT_OK;
    for (uint32_t r = 0; status == KVANT_OK && r < 2; r++) {
        m->info[r].size = sizeof m->info[r];
        status = kvant_codec_create(specs[r], m->s->pair.head_dim, (kvant_role)r, 7, &m->codec[r],
                                    why, TEST_WHY_BYTES);
        if (status == KVANT_OK)
            status = kvant_cuda_codec_from(m->codec[r], &m->gpu_codec[r], why, TEST_WHY_BYTES);
        if (status == KVANT_OK && kvant_codec_get_info(m->codec[r], &m->info[r]) == KVANT_OK &&
            m->info[r].block_tokens > 1)
            status = KVANT_ERR_UNSUPPORTED; /* append takes codecs with one scale per token */
    }
    return status;
}

/* As many sequences as fit into a third of the free memory, at most 16. */
static bool make_pools(measuring *m)
{
    size_t available = 0, total = 0;
    m->block_bytes = KV_HEADS * (m->info[0].page_bytes + m->info[1].page_bytes);
    gpu_ok(m->gpu, m->gpu->driver->memory_info(&available, &total), "cuMemGetInfo");
    const size_t fit = available / 3 / (m->block_bytes * TOKENS / 64);
    m->s->sequences = fit > MOST_SEQUENCES ? MOST_SEQUENCES : fit > 1 ? (uint32_t)fit : 1;
    m->n_blocks = m->s->sequences * TOKENS / 64;
    m->s->bytes = (double)m->n_blocks * (double)m->block_bytes;
    m->pool = gpu_new(m->gpu, m->n_blocks * m->block_bytes, 0);
    m->other = gpu_new(m->gpu, m->n_blocks * m->block_bytes, 0);
    return m->gpu->error[0] == 0;
}

static kvant_cuda_pages pages_of(const measuring *m, uint32_t r)
{
    return (kvant_cuda_pages){ (char *)m->pool + (r ? KV_HEADS * m->info[0].page_bytes : 0),
                               m->block_bytes, m->info[r].page_bytes };
}

static void *upload_rows(test_gpu *gpu, size_t n)
{
    float *rows = malloc(n * sizeof *rows);
    uint32_t state = 1;
    for (size_t i = 0; rows != NULL && i < n; i++) {
        state = state * 1664525u + 1013904223u;
        rows[i] = (float)(state >> 8) * 0x1p-23f - 1;
    }
    if (rows == NULL)
        gpu_did(gpu, KVANT_ERR_MEMORY, "rows");
    void *device = rows != NULL ? gpu_upload_bf16(gpu, rows, n) : NULL;
    free(rows);
    return device;
}

static double time_round(measuring *m, bool (*call)(measuring *m), int times)
{
    gpu_start(m->gpu);
    for (int i = 0; i < times && call(m);)
        i++;
    return gpu_stop(m->gpu) / times;
}

/* Seconds of a call, in the shortest of some rounds. The first call only warms up; the second says
 * how many make a round, and is the result when it takes longer than ten rounds should. */
static double time_calls(measuring *m, bool (*call)(measuring *m))
{
    time_round(m, call, 1);
    double seconds = time_round(m, call, 1);
    const double times = fmin(fmax(ROUND_SECONDS / seconds, 1), 1000);
    for (int i = 0; i < ROUNDS && seconds < 10 * ROUND_SECONDS && m->gpu->error[0] == 0; i++)
        seconds = fmin(seconds, time_round(m, call, (int)times));
    return m->gpu->error[0] == 0 ? seconds : NAN;
}

static bool run_append(measuring *m)
{
    return gpu_did(m->gpu, kvant_cuda_append(&m->append, m->gpu->stream), "append");
}

static bool run_attention(measuring *m)
{
    return gpu_did(m->gpu, kvant_cuda_attention(&m->attention, m->gpu->stream), "attention");
}

static bool run_copy(measuring *m)
{
    return gpu_ok(m->gpu,
                  m->gpu->driver->copy_within(gpu_at(m->other), gpu_at(m->pool),
                                              m->n_blocks * m->block_bytes, m->gpu->stream),
                  "cuMemcpyDtoD");
}

/* Encodes the first blocks, which is timed, and copies them to all others. */
static void encode(measuring *m)
{
    const size_t d = m->s->pair.head_dim, width = KV_HEADS * d, first = ENCODED / 64;
    int64_t *slots = malloc(ENCODED * sizeof *slots);
    for (int i = 0; slots != NULL && i < ENCODED; i++)
        slots[i] = i;
    void *rows = upload_rows(m->gpu, ENCODED * width);
    m->append = (kvant_cuda_append_args){
        .size = sizeof m->append,
        .type = KVANT_CUDA_BF16,
        .n_tokens = ENCODED,
        .n_kv_heads = KV_HEADS,
        .slots = slots != NULL ? gpu_upload(m->gpu, slots, ENCODED * sizeof *slots) : NULL
    };
    for (uint32_t r = 0; r < 2; r++)
        *(r ? &m->append.v : &m->append.k) = (kvant_cuda_rows){ .codec = m->gpu_codec[r],
                                                                .pages = pages_of(m, r),
                                                                .rows = rows,
                                                                .token_stride = width,
                                                                .head_stride = d };
    m->s->encode_rows = 2.0 * ENCODED * KV_HEADS / time_calls(m, run_append);
    for (size_t block = first; m->gpu->error[0] == 0 && block < m->n_blocks; block += first)
        gpu_ok(m->gpu,
               m->gpu->driver->copy_within(gpu_at(m->pool) + block * m->block_bytes,
                                           gpu_at(m->pool), first * m->block_bytes, m->gpu->stream),
               "cuMemcpyDtoD");
    free(slots);
}

static void prepare_attention(measuring *m)
{
    const size_t d = m->s->pair.head_dim, n = (size_t)m->s->sequences * HEADS * d;
    int32_t *table = malloc((m->n_blocks + MOST_SEQUENCES) * sizeof *table);
    const size_t workspace = kvant_cuda_attention_workspace((uint32_t)d);
    for (uint32_t i = 0; table != NULL && i < m->n_blocks; i++)
        table[i] = (int32_t)i;
    for (uint32_t i = 0; table != NULL && i < MOST_SEQUENCES; i++)
        table[m->n_blocks + i] = TOKENS;
    if (table == NULL || workspace == 0)
        gpu_did(m->gpu, KVANT_ERR_MEMORY, "attention");
    void *device = table != NULL
                       ? gpu_upload(m->gpu, table, (m->n_blocks + MOST_SEQUENCES) * sizeof *table)
                       : NULL;
    m->attention = (kvant_cuda_attention_args){ .size = sizeof m->attention,
                                                .k_codec = m->gpu_codec[0],
                                                .v_codec = m->gpu_codec[1],
                                                .k = pages_of(m, 0),
                                                .v = pages_of(m, 1),
                                                .block_table = device,
                                                .table_stride = TOKENS / 64,
                                                .blocks_per_row = TOKENS / 64,
                                                .lengths = (const int32_t *)device + m->n_blocks,
                                                .batch = m->s->sequences,
                                                .n_heads = HEADS,
                                                .n_kv_heads = KV_HEADS,
                                                .type = KVANT_CUDA_BF16,
                                                .q = upload_rows(m->gpu, n),
                                                .q_batch_stride = HEADS * d,
                                                .q_head_stride = d,
                                                .out = gpu_new(m->gpu, n * 2, 0xff),
                                                .out_batch_stride = HEADS * d,
                                                .out_head_stride = d,
                                                .scale = 1 / sqrtf((float)d),
                                                .workspace = gpu_new(m->gpu, workspace, 0),
                                                .workspace_bytes = workspace };
    free(table);
}

static void measure(measuring *m)
{
    if (!make_pools(m))
        return;
    encode(m);
    prepare_attention(m);
    m->s->attention = time_calls(m, run_attention);
    m->s->copy = time_calls(m, run_copy);
}

kvant_status test_gpu_speed(test_gpu *gpu, test_speed *s, char *why)
{
    measuring m = { .gpu = gpu, .s = s };
    s->tokens = TOKENS, s->heads = HEADS, s->kv_heads = KV_HEADS;
    why[0] = 0;
    if (!gpu->lost)
        gpu_begin(gpu);
    const kvant_status status = make_codecs(&m, why);
    if (status == KVANT_OK && gpu->error[0] == 0)
        measure(&m);
    if (gpu->error[0] != 0)
        snprintf(why, TEST_WHY_BYTES, "%s", gpu->error);
    for (int i = 0; i < 2; i++) {
        kvant_cuda_codec_free(&m.gpu_codec[i]);
        kvant_codec_free(&m.codec[i]);
    }
    return status != KVANT_OK ? status : gpu->error[0] != 0 ? KVANT_ERR_CUDA : KVANT_OK;
}
