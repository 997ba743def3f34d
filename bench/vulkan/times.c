/* times.c - times the shaders, and the library on the CPU with the same rows. */
#include <kvant/attention.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vulkan.h"

enum { CHUNK = 2048, MAX_ROUNDS = 1000 };
/* Four times the largest cache of a GPU (the H200's second level has 50 MB). */
static const size_t flush_bytes = (size_t)256 << 20;

static double now(void)
{
    struct timespec t;

    timespec_get(&t, TIME_UTC);
    return 1e6 * (double)t.tv_sec + 1e-3 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *times, uint32_t n)
{
    qsort(times, n, sizeof *times, compare);
    return times[n / 2];
}

static void print(const times_options *o, const char *device, const char *what, double us,
                  double bytes)
{
    static bool any;
    const shape *s = &o->shape;

    printf("%s{\"device\": \"%s\", \"sequences\": %u, \"heads\": %u, \"kv_heads\": %u, "
           "\"head_dim\": %u, \"tokens\": %u, \"what\": \"%s\", \"us\": %.1f, \"GB/s\": ",
           any ? ",\n " : "[", device, (unsigned)s->sequences, (unsigned)s->heads,
           (unsigned)s->kv_heads, (unsigned)s->head_dim, (unsigned)s->tokens, what, us);
    if (bytes > 0)
        printf("%.1f}", bytes / us / 1000);
    else
        printf("\"\"}");
    any = true;
}

static void make_rows(float *rows, size_t n)
{
    for (size_t i = 0; i < n; i++)
        rows[i] = random_normal();
}

/* The GPU */

/* Blocks of a sequence lie in random order. All chunks have the same rows. */
static void fill(pages *p)
{
    const shape *s = &p->of;
    uint32_t *table = p->table.at, *slots = p->slots.at;

    random_order(table, s->sequences * p->blocks);
    for (int role = 0; role < 2; role++)
        make_rows(p->rows[role].at, p->rows[role].bytes / sizeof(float));
    make_rows(p->q.at, p->q.bytes / sizeof(float));
    for (uint32_t sequence = 0; sequence < s->sequences; sequence++)
        for (uint32_t begin = 0, n; begin < s->tokens; begin += n) {
            n = s->tokens - begin < CHUNK ? s->tokens - begin : CHUNK;
            for (uint32_t t = begin; t < begin + n; t++)
                slots[t - begin] = 64 * table[sequence * p->blocks + t / 64] + t % 64;
            pages_set_rows(p, n);
        }
    for (uint32_t i = 0; i < s->sequences; i++) /* the last token of every sequence */
        slots[i] = 64 * table[(i + 1) * p->blocks - 1] + (s->tokens - 1) % 64;
}

/* Time of one token's SET_ROWS, time of its attention, and time from the call to the return of a
 * submission with both. */
static void time_gpu(const char *shaders, const times_options *o)
{
    pages p = pages_new(shaders, &o->shape, CHUNK, o->workgroups);
    gpu_buffer flush = gpu_new_buffer(gpu_is_cpu() ? 4 : flush_bytes, false);
    double rows[MAX_ROUNDS], attention[MAX_ROUNDS], step[MAX_ROUNDS];
    const double bytes = (double)(pages_bytes(&p, 0) + pages_bytes(&p, 1));

    p.push.scale = 1 / sqrtf((float)o->shape.head_dim);
    fill(&p);
    gpu_begin();
    gpu_fill(&flush, 1);
    gpu_stamp();
    pages_record_rows(&p, o->shape.sequences);
    gpu_stamp();
    pages_record_attention(&p);
    gpu_stamp();
    gpu_end();
    for (uint32_t i = 0; i < o->rounds; i++) {
        gpu_run();
        rows[i] = gpu_time(0);
        attention[i] = gpu_time(1);
    }
    gpu_begin();
    pages_record_rows(&p, o->shape.sequences);
    pages_record_attention(&p);
    gpu_end();
    for (uint32_t i = 0; i < o->rounds; i++) {
        const double begin = now();
        gpu_run();
        step[i] = now() - begin;
    }
    print(o, gpu_name(), "SET_ROWS of one token", median(rows, o->rounds), 0);
    print(o, gpu_name(), "attention of one token", median(attention, o->rounds), bytes);
    print(o, gpu_name(), "both, from submission to the CPU's return, cache warm",
          median(step, o->rounds), 0);
    gpu_free_buffer(&flush);
    pages_free(&p);
}

/* The library on the CPU */

typedef struct cpu {
    kvant_codec *codec[2];
    kvant_tensor *tensor[2];
    void *memory[2], *workspace;
    float *rows, *q, *out;
    int64_t slots[CHUNK];
    uint32_t threads;
} cpu;

static void need(kvant_status status)
{
    if (status == KVANT_OK)
        return;
    fprintf(stderr, "vulkan: the library failed: %s\n", kvant_error_message());
    exit(1);
}

static void make_tensor(cpu *c, const shape *s, int role)
{
    const uint32_t blocks = s->sequences * ((s->tokens + 63) / 64);
    const kvant_codec **codecs = calloc(s->kv_heads, sizeof *codecs);
    kvant_tensor_params params = { .size = sizeof params,
                                   .codecs = codecs,
                                   .n_kv_heads = s->kv_heads,
                                   .n_sequences = 1,
                                   .n_blocks = blocks };
    size_t bytes;

    need(kvant_codec_create("int-4", s->head_dim, (kvant_role)role, 1, &c->codec[role], NULL, 0));
    for (uint32_t i = 0; i < s->kv_heads; i++)
        codecs[i] = c->codec[role];
    need(kvant_tensor_size(&params, &bytes));
    bytes = (bytes + 63) / 64 * 64;
    c->memory[role] = aligned_alloc(64, bytes);
    memset(c->memory[role], 0, bytes);
    need(kvant_tensor_create(&params, c->memory[role], &c->tensor[role]));
    free(codecs);
}

static void write_rows(cpu *c, const shape *s, size_t first, size_t n)
{
    const size_t stride = (size_t)s->kv_heads * s->head_dim;

    for (size_t i = 0; i < n; i++)
        c->slots[i] = (int64_t)(first + i);
    need(kvant_tensor_write_layer(c->tensor[0], c->tensor[1], c->slots, n, c->rows, stride, c->rows,
                                  stride, c->threads));
}

static void attend(cpu *c, const shape *s)
{
    for (uint32_t i = 0; i < s->sequences; i++) {
        const size_t n = (size_t)s->heads * s->head_dim;
        kvant_attention_problem problem = { .size = sizeof problem,
                                            .n_queries = 1,
                                            .n_tokens = s->tokens,
                                            .n_heads = s->heads,
                                            .first_block = i * ((s->tokens + 63) / 64),
                                            .n_threads = c->threads,
                                            .q = c->q + i * n,
                                            .q_token_stride = n,
                                            .q_head_stride = s->head_dim,
                                            .out = c->out + i * n,
                                            .out_token_stride = n,
                                            .out_head_stride = s->head_dim,
                                            .scale = 1 / sqrtf((float)s->head_dim) };
        size_t bytes;
        need(kvant_attention_workspace(c->tensor[0], c->tensor[1], &problem, &bytes));
        if (c->workspace == NULL)
            c->workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
        need(kvant_attention(c->tensor[0], c->tensor[1], &problem, c->workspace, bytes));
    }
}

static void time_cpu(const times_options *o)
{
    const shape *s = &o->shape;
    const size_t n = (size_t)s->sequences * s->heads * s->head_dim,
                 per_row = (size_t)s->kv_heads * s->head_dim;
    const size_t tokens = (size_t)s->sequences * ((s->tokens + 63) / 64 * 64);
    cpu c = { .threads = o->threads };
    double rows[MAX_ROUNDS], attention[MAX_ROUNDS];
    kvant_codec_info info[2] = { { .size = sizeof *info }, { .size = sizeof *info } };
    char name[32];

    c.rows = malloc(sizeof(float) * CHUNK * per_row);
    c.q = malloc(sizeof(float) * n);
    c.out = malloc(sizeof(float) * n);
    make_rows(c.rows, CHUNK * per_row);
    make_rows(c.q, n);
    for (int role = 0; role < 2; role++) {
        make_tensor(&c, s, role);
        need(kvant_codec_get_info(c.codec[role], &info[role]));
    }
    for (size_t i = 0; i < tokens; i += CHUNK)
        write_rows(&c, s, i, tokens - i < CHUNK ? tokens - i : CHUNK);
    for (uint32_t i = 0; i < o->rounds; i++) {
        double begin = now();
        write_rows(&c, s, tokens - s->sequences, s->sequences);
        rows[i] = now() - begin;
        begin = now();
        attend(&c, s);
        attention[i] = now() - begin;
    }
    snprintf(name, sizeof name, "libkvant, %u threads", (unsigned)o->threads);
    print(o, name, "SET_ROWS of one token", median(rows, o->rounds), 0);
    print(o, name, "attention of one token", median(attention, o->rounds),
          (double)(info[0].page_bytes + info[1].page_bytes) * s->kv_heads * (double)(tokens / 64));
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&c.tensor[role]);
        kvant_codec_free(&c.codec[role]);
        free(c.memory[role]);
    }
    free(c.workspace);
    free(c.rows);
    free(c.q);
    free(c.out);
}

void time_shaders(const char *shaders, const times_options *options)
{
    times_options o = *options;

    o.rounds = o.rounds < 1 ? 1 : o.rounds > MAX_ROUNDS ? MAX_ROUNDS : o.rounds;
    time_gpu(shaders, &o);
    if (o.threads > 0)
        time_cpu(&o);
    printf("]\n");
}
