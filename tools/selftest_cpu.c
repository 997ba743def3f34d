/* selftest_cpu.c - `kvant selftest` on CPUs: every level that this machine has encodes, decodes and
 * attends, and the best level's speed is measured next to a copy of as many bytes. */
#define _POSIX_C_SOURCE 200809L
#include "selftest.h"

#include "progress.h"

#include <kvant/attention.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Devices */

/* The name that the system has for the CPU. */
static void read_cpu_name(char *name)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, TEST_NAME_BYTES, "unknown");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':') != NULL) {
            char *text = strchr(line, ':') + 1;
            text += strspn(text, " \t");
            snprintf(name, TEST_NAME_BYTES, "%.*s", (int)strcspn(text, "\n"), text);
            break;
        }
    if (file != NULL)
        fclose(file);
}

test_device *test_add_device(test_report *report)
{
    test_device *all = realloc(report->devices, (report->n_devices + 1) * sizeof *all);
    if (all == NULL)
        return NULL;
    report->devices = all;
    all[report->n_devices] = (test_device){ .gpu = false };
    return &all[report->n_devices++];
}

bool test_add_cpus(test_report *report)
{
    static const kvant_cpu_level levels[] = { KVANT_CPU_C,           KVANT_CPU_AVX2,
                                              KVANT_CPU_AVX2_VNNI,   KVANT_CPU_AVX512,
                                              KVANT_CPU_AVX512_VNNI, KVANT_CPU_AVX512_VBMI,
                                              KVANT_CPU_NEON,        KVANT_CPU_NEON_DOT };
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (kvant_set_cpu_level(levels[i]) != KVANT_OK)
            continue;
        test_device *device = test_add_device(report);
        if (device == NULL)
            return false;
        device->level = levels[i];
        read_cpu_name(device->name);
        snprintf(device->label, sizeof device->label, "CPU %s", kvant_cpu_level_name(levels[i]));
    }
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    return true;
}

/* Checks */

static void check_pages(const test_problem *p, kvant_role role, const test_tensor *t,
                        test_result *r)
{
    const size_t page_bytes = p->info[role].page_bytes;
    uint8_t *pages = calloc(TEST_BLOCKS * TEST_KV_HEADS, page_bytes);
    if (pages == NULL)
        test_note(r, &r->encode, TEST_FAILED, "encode: %s", kvant_strerror(KVANT_ERR_MEMORY));
    for (uint32_t i = 0; pages != NULL && i < TEST_BLOCKS * TEST_KV_HEADS; i++) {
        const uint8_t *page = test_tensor_page(t, i / TEST_KV_HEADS, i % TEST_KV_HEADS);
        if (page != NULL)
            memcpy(pages + i * page_bytes, page, page_bytes);
    }
    if (pages != NULL)
        test_compare_pages(r, p, role, pages);
    free(pages);
}

static void check_rows(const test_problem *p, kvant_role role, test_result *r)
{
    const size_t d = p->pair.head_dim, width = TEST_KV_HEADS * d;
    float *rows = calloc(TEST_ROWS * width, sizeof *rows);
    kvant_status status = rows != NULL ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t i = 0; status == KVANT_OK && i < TEST_BLOCKS * TEST_KV_HEADS; i++) {
        const uint32_t block = i / TEST_KV_HEADS, head = i % TEST_KV_HEADS;
        status = kvant_codec_decode(p->codec[role][head], &p->affine[role][head],
                                    p->pages[role] + test_page_at(p, role, block, head), 0, 64,
                                    rows + block * 64 * width + head * d, width);
    }
    if (status == KVANT_OK)
        test_compare_rows(r, p, role, rows);
    else
        test_note(r, &r->decode, TEST_FAILED, "decode: %s", kvant_strerror(status));
    free(rows);
}

static kvant_status attend(const kvant_tensor *k, const kvant_tensor *v,
                           const kvant_attention_problem *problem)
{
    size_t bytes = 0;
    kvant_status status = kvant_attention_workspace(k, v, problem, &bytes);
    if (status != KVANT_OK)
        return status;
    void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (workspace == NULL)
        return KVANT_ERR_MEMORY;
    memset(workspace, 0xff, bytes); /* NaNs: a read of memory that nobody wrote shows */
    status = kvant_attention(k, v, problem, workspace, bytes);
    free(workspace);
    return status;
}

static void check_call(const test_problem *p, const test_tensor *tensors, size_t which,
                       test_result *r)
{
    const test_call *c = &p->calls[which];
    const size_t d = p->pair.head_dim, rows = (size_t)c->n_queries * TEST_HEADS;
    float *out = malloc(rows * (d + 1) * sizeof *out), *lse = out + rows * d;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = c->n_queries,
                                              .n_tokens = TEST_TOKENS,
                                              .n_heads = TEST_HEADS,
                                              .n_threads = 1,
                                              .q = c->q,
                                              .q_token_stride = TEST_HEADS * d,
                                              .q_head_stride = d,
                                              .out = out,
                                              .out_token_stride = TEST_HEADS * d,
                                              .out_head_stride = d,
                                              .lse = lse,
                                              .scale = 1 / sqrtf((float)d),
                                              .causal = c->n_queries > 1 };
    if (out != NULL)
        memset(out, 0xff, rows * (d + 1) * sizeof *out);
    const kvant_status status =
        out != NULL ? attend(tensors[0].tensor, tensors[1].tensor, &problem) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        test_compare_call(
            r, p, which,
            &(test_outputs){ .out = out, .lse = lse, .place = TEST_ON_CPU, .centered = true });
    else
        test_note(r, &r->attention, TEST_FAILED, "attention: %s", kvant_strerror(status));
    free(out);
}

void test_cpu_check(const test_device *device, const test_problem *p, test_result *r)
{
    test_tensor tensors[2] = { { NULL, NULL }, { NULL, NULL } };
    kvant_status status = kvant_set_cpu_level(device->level);
    for (uint32_t role = 0; status == KVANT_OK && role < 2; role++)
        status = test_tensor_open(&tensors[role], p, (kvant_role)role, 1);
    for (uint32_t role = 0; status == KVANT_OK && role < 2; role++) {
        check_pages(p, (kvant_role)role, &tensors[role], r);
        check_rows(p, (kvant_role)role, r);
    }
    for (size_t i = 0; status == KVANT_OK && i < TEST_CALLS; i++)
        check_call(p, tensors, i, r);
    if (status != KVANT_OK)
        test_note(r, &r->encode, TEST_FAILED, "encode: %s", kvant_strerror(status));
    test_tensor_close(&tensors[0]);
    test_tensor_close(&tensors[1]);
}

/* Speed */

enum { ENCODED = 512, KV_HEADS = 8, HEADS = 32, ROUNDS = 5 };

typedef struct layer {
    const kvant_codec *codecs[KV_HEADS];
    kvant_codec *codec;
    kvant_codec_info info;
    kvant_tensor *tensor;
    void *memory;
} layer;

static kvant_status open_layer(layer *l, const test_speed *s, kvant_role role, char *why)
{
    const char *spec = role == KVANT_ROLE_K ? s->pair.k : s->pair.v;
    size_t bytes = 0;
    kvant_status status =
        kvant_codec_create(spec, s->pair.head_dim, role, 7, &l->codec, why, TEST_WHY_BYTES);
    if (status != KVANT_OK)
        return status;
    l->info.size = sizeof l->info;
    kvant_codec_get_info(l->codec, &l->info);
    for (uint32_t h = 0; h < KV_HEADS; h++)
        l->codecs[h] = l->codec;
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = l->codecs,
                                         .n_kv_heads = KV_HEADS,
                                         .n_sequences = 1,
                                         .n_blocks = s->tokens / 64 };
    status = kvant_tensor_size(&params, &bytes);
    l->memory = status == KVANT_OK ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    if (l->memory == NULL)
        return KVANT_ERR_MEMORY;
    memset(l->memory, 0, bytes);
    return kvant_tensor_create(&params, l->memory, &l->tensor);
}

static void close_layer(layer *l)
{
    kvant_tensor_free(&l->tensor);
    kvant_codec_free(&l->codec);
    free(l->memory);
}

/* Writes the first tokens, which is timed, and copies their blocks to all others. */
static kvant_status fill_layers(layer *layers, const test_speed *s, const float *rows,
                                double *seconds)
{
    int64_t slots[ENCODED];
    const size_t width = (size_t)KV_HEADS * s->pair.head_dim;
    for (uint32_t i = 0; i < ENCODED; i++)
        slots[i] = i;
    const double start = monotonic_seconds();
    kvant_status status = kvant_tensor_write_layer(layers[0].tensor, layers[1].tensor, slots,
                                                   ENCODED, rows, width, rows, width, s->threads);
    *seconds = monotonic_seconds() - start;
    for (uint32_t block = ENCODED / 64; status == KVANT_OK && block < s->tokens / 64; block++)
        for (int role = 0; status == KVANT_OK && role < 2; role++)
            status = kvant_tensor_copy(layers[role].tensor, block % (ENCODED / 64),
                                       layers[role].tensor, block, 1);
    return status;
}

/* The shortest of some rounds, the first of which only warms up. */
static kvant_status time_attention(const layer *layers, const kvant_attention_problem *problem,
                                   double *seconds)
{
    size_t bytes = 0;
    kvant_status status =
        kvant_attention_workspace(layers[0].tensor, layers[1].tensor, problem, &bytes);
    void *workspace = status == KVANT_OK ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    *seconds = INFINITY;
    for (int i = 0; workspace != NULL && status == KVANT_OK && i <= ROUNDS; i++) {
        const double start = monotonic_seconds();
        status = kvant_attention(layers[0].tensor, layers[1].tensor, problem, workspace, bytes);
        *seconds = i > 0 ? fmin(*seconds, monotonic_seconds() - start) : *seconds;
    }
    free(workspace);
    return status == KVANT_OK && workspace == NULL ? KVANT_ERR_MEMORY : status;
}

typedef struct copying {
    char *to;
    const char *from;
    size_t bytes;
} copying;

static void *copy_part(void *user)
{
    const copying *c = user;
    memcpy(c->to, c->from, c->bytes);
    return NULL;
}

static void copy_in_threads(char *to, const char *from, size_t bytes, uint32_t threads)
{
    enum { MOST = 256 };
    pthread_t started[MOST];
    copying parts[MOST];
    uint32_t n = threads < MOST ? threads : MOST, running = 0;
    const size_t part = bytes / n;
    for (uint32_t i = 0; i < n; i++)
        parts[i] = (copying){ to + i * part, from + i * part, i + 1 < n ? part : bytes - i * part };
    while (running + 1 < n &&
           pthread_create(&started[running], NULL, copy_part, &parts[running + 1]) == 0)
        running++;
    for (uint32_t i = running + 1; i < n; i++)
        copy_part(&parts[i]);
    copy_part(&parts[0]);
    for (uint32_t i = 0; i < running; i++)
        pthread_join(started[i], NULL);
}

/* Copies 16 times as many bytes, so that starting threads does not count. */
static double time_copy(double bytes, uint32_t threads)
{
    const size_t n = (size_t)bytes * 16;
    char *memory = malloc(2 * n);
    double seconds = INFINITY;
    if (memory == NULL)
        return NAN;
    memset(memory, 1, 2 * n);
    for (int i = 0; i < ROUNDS; i++) {
        const double start = monotonic_seconds();
        copy_in_threads(memory + n, memory, n, threads);
        seconds = fmin(seconds, monotonic_seconds() - start);
    }
    seconds += memory[n + n / 2] == 1 ? 0 : NAN;
    free(memory);
    return seconds / 16;
}

static kvant_status measure(test_speed *s, layer *layers, float *rows)
{
    const size_t d = s->pair.head_dim;
    double seconds = NAN;
    uint32_t state = 1;
    for (size_t i = 0; i < (size_t)ENCODED * KV_HEADS * d; i++) {
        state = state * 1664525u + 1013904223u;
        rows[i] = (float)(state >> 8) * 0x1p-23f - 1;
    }
    const kvant_status status = fill_layers(layers, s, rows, &seconds);
    if (status != KVANT_OK)
        return status;
    s->encode_rows = 2.0 * ENCODED * KV_HEADS / seconds;
    s->bytes = (double)s->tokens / 64 * KV_HEADS *
               (double)(layers[0].info.page_bytes + layers[1].info.page_bytes);
    s->copy = time_copy(s->bytes, s->threads);
    float *out = rows + HEADS * d;
    const kvant_attention_problem problem = { .size = sizeof problem,
                                              .n_queries = 1,
                                              .n_tokens = s->tokens,
                                              .n_heads = HEADS,
                                              .n_threads = s->threads,
                                              .q = rows,
                                              .q_token_stride = HEADS * d,
                                              .q_head_stride = d,
                                              .out = out,
                                              .out_token_stride = HEADS * d,
                                              .out_head_stride = d,
                                              .scale = 1 / sqrtf((float)d) };
    return time_attention(layers, &problem, &s->attention);
}

kvant_status test_cpu_speed(const test_device *device, test_speed *s, char *why)
{
    layer layers[2] = { { .codec = NULL }, { .codec = NULL } };
    s->sequences = 1, s->tokens = 8192, s->heads = HEADS, s->kv_heads = KV_HEADS;
    s->threads = kvant_available_cpus();
    float *rows = malloc((size_t)ENCODED * KV_HEADS * s->pair.head_dim * sizeof *rows);
    kvant_status status = rows != NULL ? kvant_set_cpu_level(device->level) : KVANT_ERR_MEMORY;
    why[0] = 0;
    for (uint32_t role = 0; status == KVANT_OK && role < 2; role++)
        status = open_layer(&layers[role], s, (kvant_role)role, why);
    if (status == KVANT_OK)
        status = measure(s, layers, rows);
    if (status != KVANT_OK && why[0] == 0)
        snprintf(why, TEST_WHY_BYTES, "%s", kvant_strerror(status));
    close_layer(&layers[0]);
    close_layer(&layers[1]);
    free(rows);
    return status;
}
