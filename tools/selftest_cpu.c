/* selftest_cpu.c - `kvant selftest` on CPUs: every level that this machine has encodes, decodes and
 * computes attention. The speed of the best level is measured, and the speed of a copy of as many
 * bytes. */
#define _POSIX_C_SOURCE 200809L
#include "selftest.h"

#include "os.h"
#include "progress.h"

#include <kvant/attention.h>
#include <math.h>
#include <pthread.h>
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

size_t test_find_cpus(test_device *devices, size_t n)
{
    static const kvant_cpu_level levels[] = { KVANT_CPU_C,           KVANT_CPU_AVX2,
                                              KVANT_CPU_AVX2_VNNI,   KVANT_CPU_AVX512,
                                              KVANT_CPU_AVX512_VNNI, KVANT_CPU_AVX512_VBMI,
                                              KVANT_CPU_NEON,        KVANT_CPU_NEON_DOT };
    size_t found = 0;
    for (size_t i = 0; i < sizeof levels / sizeof *levels && found < n; i++) {
        test_device *device = &devices[found];
        if (kvant_set_cpu_level(levels[i]) != KVANT_OK)
            continue;
        *device = (test_device){ .level = levels[i] };
        read_cpu_name(device->name);
        snprintf(device->label, sizeof device->label, "CPU %s", kvant_cpu_level_name(levels[i]));
        found++;
    }
    kvant_set_cpu_level(KVANT_CPU_AUTO);
    return found;
}

/* Keys and values of a layer in tensors, and attention over them */

typedef struct layer {
    kvant_tensor *tensor[2];
    void *memory[2], *workspace;
    size_t workspace_bytes;
    uint32_t threads;
    kvant_attention_problem problem;
} layer;

/* Memory for kvant, which aligns to 64 bytes, filled with a byte. */
static void *allocate(size_t bytes, int fill)
{
    void *memory = kvant_os_alloc(64, (bytes + 63) / 64 * 64);
    return memory != NULL ? memset(memory, fill, bytes) : NULL;
}

static void close_layer(layer *l)
{
    for (int role = 0; role < 2; role++) {
        kvant_tensor_free(&l->tensor[role]);
        kvant_os_free(l->memory[role]);
    }
    kvant_os_free(l->workspace);
}

/* A tensor of n_tokens tokens whose kv heads share the problem's codecs. */
static kvant_status open_tensor(layer *l, const test_problem *p, kvant_role role,
                                uint32_t n_kv_heads, uint32_t n_tokens)
{
    const kvant_codec *codecs[SPEED_KV_HEADS];
    kvant_tensor_params params = { .size = sizeof params, .codecs = codecs, .n_sequences = 1 };
    size_t bytes = 0;
    params.n_kv_heads = n_kv_heads, params.n_blocks = n_tokens / 64;
    for (uint32_t head = 0; head < n_kv_heads; head++)
        codecs[head] = p->codec[role][head % TEST_KV_HEADS];
    const kvant_status status = kvant_tensor_size(&params, &bytes);
    if (status != KVANT_OK)
        return status;
    l->memory[role] = allocate(bytes, 0);
    return l->memory[role] == NULL
               ? KVANT_ERR_MEMORY
               : kvant_tensor_create(&params, l->memory[role], &l->tensor[role]);
}

/* Opens both tensors and writes all rows, and measures that. */
static kvant_status fill_layer(layer *l, const test_problem *p, uint32_t n_kv_heads, uint32_t n,
                               const float *const *rows, double *seconds)
{
    static int64_t slots[SPEED_TOKENS];
    const size_t width = (size_t)n_kv_heads * p->pair.head_dim;
    kvant_status status = open_tensor(l, p, KVANT_ROLE_K, n_kv_heads, n);
    if (status == KVANT_OK)
        status = open_tensor(l, p, KVANT_ROLE_V, n_kv_heads, n);
    for (uint32_t i = 0; i < n; i++)
        slots[i] = i;
    const double start = monotonic_seconds();
    if (status == KVANT_OK)
        status = kvant_tensor_write_layer(l->tensor[0], l->tensor[1], slots, n, rows[0], width,
                                          rows[1], width, l->threads);
    *seconds = monotonic_seconds() - start;
    return status;
}

/* Attention of the newest query tokens. The workspace starts as NaNs: a read of
 * memory that nobody wrote shows. */
static kvant_status prepare(layer *l, uint32_t n_queries, uint32_t n_tokens, uint32_t n_heads,
                            size_t d, const float *q, float *out)
{
    kvant_attention_problem *a = &l->problem;
    *a = (kvant_attention_problem){ .size = sizeof *a, .q = q, .out = out };
    a->n_threads = l->threads, a->n_heads = n_heads;
    a->n_queries = n_queries, a->n_tokens = n_tokens;
    a->q_token_stride = a->out_token_stride = n_heads * d;
    a->q_head_stride = a->out_head_stride = d;
    a->scale = 1 / sqrtf((float)d), a->causal = n_queries > 1;
    kvant_os_free(l->workspace);
    l->workspace = NULL;
    const kvant_status status =
        kvant_attention_workspace(l->tensor[0], l->tensor[1], a, &l->workspace_bytes);
    if (status == KVANT_OK)
        l->workspace = allocate(l->workspace_bytes, 0xff);
    return status == KVANT_OK && l->workspace == NULL ? KVANT_ERR_MEMORY : status;
}

static kvant_status attend(const layer *l)
{
    return kvant_attention(l->tensor[0], l->tensor[1], &l->problem, l->workspace,
                           l->workspace_bytes);
}

/* Checks */

static kvant_status check_pages(const test_problem *p, const layer *l, test_result *r)
{
    uint8_t *pages = calloc(TEST_BLOCKS, p->block_bytes);
    for (uint32_t i = 0; pages != NULL && i < 2 * TEST_BLOCKS * TEST_KV_HEADS; i++) {
        const kvant_role role = i % 2;
        const uint32_t block = i / 2 / TEST_KV_HEADS, head = i / 2 % TEST_KV_HEADS;
        kvant_block_info info = { .size = sizeof info };
        if (kvant_tensor_get_block(l->tensor[role], block, head, &info) == KVANT_OK &&
            info.state == KVANT_BLOCK_SEALED)
            memcpy(pages + test_page_at(p, role, block, head), info.page, p->info[role].page_bytes);
    }
    if (pages != NULL)
        test_compare_pages(r, p, pages);
    free(pages);
    return pages != NULL ? KVANT_OK : KVANT_ERR_MEMORY;
}

static kvant_status check_rows(const test_problem *p, kvant_role role, test_result *r)
{
    float *rows = malloc(TEST_ROWS * TEST_KV_HEADS * p->pair.head_dim * sizeof *rows);
    const kvant_status status =
        rows != NULL ? test_convert(p, role, false, rows) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        test_compare_rows(r, p, role, rows);
    free(rows);
    return status;
}

static kvant_status check_call(const test_problem *p, layer *l, size_t which, test_result *r)
{
    const test_call *c = &p->calls[which];
    const size_t d = p->pair.head_dim, rows = (size_t)c->n_queries * TEST_HEADS;
    float *out = allocate(rows * (d + 1) * sizeof *out, 0xff), *lse = out + rows * d;
    if (out == NULL)
        return KVANT_ERR_MEMORY;
    kvant_status status = prepare(l, c->n_queries, TEST_TOKENS, TEST_HEADS, d, c->q, out);
    l->problem.lse = lse;
    status = status == KVANT_OK ? attend(l) : status;
    if (status == KVANT_OK)
        test_compare_call(r, p, which,
                          &(test_outputs){ out, lse, .place = TEST_ON_CPU, .centered = true });
    kvant_os_free(out);
    return status;
}

/* False after noting an error. */
static bool did(test_result *r, test_step step, kvant_status status)
{
    static const char *const names[TEST_STEPS] = { "encode", "decode", "attention" };
    if (status != KVANT_OK)
        test_note(r, step, TEST_FAILED, "%s: %s", names[step], kvant_strerror(status));
    return status == KVANT_OK;
}

void test_cpu_check(const test_device *device, const test_problem *p, test_result *r)
{
    const float *const rows[] = { p->rows[0], p->rows[1] };
    layer l = { .threads = 1 };
    double seconds;
    bool ok = did(r, TEST_ENCODE, kvant_set_cpu_level(device->level)) &&
              did(r, TEST_ENCODE, fill_layer(&l, p, TEST_KV_HEADS, TEST_ROWS, rows, &seconds)) &&
              did(r, TEST_ENCODE, check_pages(p, &l, r)) &&
              did(r, TEST_DECODE, check_rows(p, KVANT_ROLE_K, r)) &&
              did(r, TEST_DECODE, check_rows(p, KVANT_ROLE_V, r));
    for (size_t i = 0; ok && i < TEST_CALLS; i++)
        ok = did(r, TEST_ATTENTION, check_call(p, &l, i, r));
    close_layer(&l);
}

/* Speed */

/* Calls of a round last about so long together: far longer than what starting them costs. */
#define ROUND_SECONDS 0.01

static double time_round(bool (*run)(void *user, int times), void *user, int times)
{
    const double start = monotonic_seconds();
    return run(user, times) ? (monotonic_seconds() - start) / times : NAN;
}

/* The first call only warms up; the second says how many make a round, and is the result when it
 * takes longer than ten rounds should. */
double test_time(bool (*run)(void *user, int times), void *user)
{
    time_round(run, user, 1);
    double seconds = time_round(run, user, 1);
    const int times = (int)fmin(fmax(ROUND_SECONDS / seconds, 1), 1000);
    for (int i = 0; i < 5 && seconds < 10 * ROUND_SECONDS; i++)
        seconds = fmin(seconds, time_round(run, user, times));
    return seconds;
}

static bool run_attention(void *user, int times)
{
    kvant_status status = KVANT_OK;
    for (int i = 0; status == KVANT_OK && i < times; i++)
        status = attend(user);
    return status == KVANT_OK;
}

/* A thread's part of a copy. */
typedef struct copying {
    pthread_t thread;
    char *to;
    const char *from;
    size_t bytes;
    int times;
    bool started;
} copying;

/* Sixteen times the bytes, so that starting threads does not count and no cache holds them. */
enum { MOST_THREADS = 256, COPIES = 16 };

static void *copy_part(void *user)
{
    const copying *c = user;
    for (int i = 0; i < c->times; i++)
        memcpy(c->to, c->from, c->bytes);
    return NULL;
}

/* Parts end with one of no bytes. */
static bool run_copy(void *user, int times)
{
    copying *parts = user;
    for (copying *c = parts; c->bytes > 0; c++) {
        c->times = times;
        c->started = pthread_create(&c->thread, NULL, copy_part, c) == 0;
        if (!c->started)
            copy_part(c);
    }
    for (copying *c = parts; c->bytes > 0; c++)
        if (c->started)
            pthread_join(c->thread, NULL);
    return true;
}

static kvant_status measure_copy(test_speed *s)
{
    const uint32_t n = s->threads < MOST_THREADS ? s->threads : MOST_THREADS;
    const size_t part = COPIES * (size_t)s->bytes / n;
    copying parts[MOST_THREADS + 1] = { { .bytes = 0 } };
    char *memory = allocate(2 * part * n, 1);
    for (uint32_t i = 0; memory != NULL && i < n; i++)
        parts[i] =
            (copying){ .to = memory + part * i, .from = memory + part * (n + i), .bytes = part };
    s->copy = memory != NULL ? test_time(run_copy, parts) / COPIES : NAN;
    kvant_os_free(memory);
    return memory != NULL ? KVANT_OK : KVANT_ERR_MEMORY;
}

void test_cpu_speed(const test_device *device, const test_problem *p, test_result *r)
{
    const size_t d = p->pair.head_dim, n = (size_t)SPEED_TOKENS * SPEED_KV_HEADS * d;
    layer l = { .threads = kvant_available_cpus() };
    test_speed s = { .sequences = 1, .threads = l.threads, .bytes = test_speed_bytes(p) };
    double seconds = NAN;
    float *rows = malloc(n * sizeof *rows);
    for (size_t i = 0; rows != NULL && i < n; i++)
        rows[i] = p->rows[KVANT_ROLE_K][i % (TEST_ROWS * TEST_KV_HEADS * d)];
    kvant_status status = rows != NULL ? kvant_set_cpu_level(device->level) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        status = fill_layer(&l, p, SPEED_KV_HEADS, SPEED_TOKENS,
                            (const float *const[]){ rows, rows }, &seconds);
    s.encode_rows = 2.0 * SPEED_TOKENS * SPEED_KV_HEADS / seconds;
    if (status == KVANT_OK)
        status = prepare(&l, 1, SPEED_TOKENS, SPEED_HEADS, d, rows, rows + SPEED_HEADS * d);
    status = status == KVANT_OK ? measure_copy(&s) : status;
    if (status == KVANT_OK) {
        s.attention = test_time(run_attention, &l);
        r->speed = s;
    } else {
        test_note(r, TEST_ATTENTION, TEST_FAILED, "speed: %s", kvant_strerror(status));
    }
    close_layer(&l);
    free(rows);
}
