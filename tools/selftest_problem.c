/* selftest_problem.c - the problems of `kvant selftest`: which codecs, random rows, a calibration,
 * and the pages and rows of portable C. selftest_reference.c has attention over them. */
#define _POSIX_C_SOURCE 200809L
#include "selftest.h"

#include "choices.h"
#include "os.h"

#include <kvant/cuda.h>
#include <kvant/settings.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PI 3.14159265358979323846

/* Which codecs */

/* kvant selftest measures six codecs, or the only one that it checks. */
static bool is_measured(const char *spec, const char *only)
{
    static const char *const codecs[] = { "f16",       "int-8",     "turboquant-6",
                                          "trellis-2", "trellis-3", "trellis-4" };
    bool measured = only != NULL;
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++)
        measured = measured || strcmp(spec, codecs[i]) == 0;
    return measured;
}

static void add_pair(test_pair *pairs, size_t *n, const char *k, const char *v, uint32_t head_dim)
{
    test_pair *p = &pairs[(*n)++];
    snprintf(p->k, sizeof p->k, "%.*s", TEST_SPEC_BYTES - 1, k);
    snprintf(p->v, sizeof p->v, "%.*s", TEST_SPEC_BYTES - 1, v);
    p->head_dim = head_dim;
}

/* Adds a preset's codecs with a calibration. transform=first learns from the rows of a cache, and
 * its kernels are the kernels of transform=file, which values do not have. */
static void add_preset(test_pair *pairs, size_t *n, const char *name, uint32_t head_dim)
{
    static const char first[] = ":transform=first";
    kvant_preset preset = { .size = sizeof preset };
    char k[TEST_SPEC_BYTES], v[TEST_SPEC_BYTES];
    if (kvant_preset_get(name, 1, &preset) != KVANT_OK)
        return;
    const char *learnt = strstr(preset.k, first), *of_values = strstr(preset.v, first);
    snprintf(k, sizeof k, "%.*s%s", (int)(learnt ? learnt - preset.k : (long)strlen(preset.k)),
             preset.k, learnt ? ":transform=file" : "");
    snprintf(v, sizeof v, "%.*s", (int)(of_values ? of_values - preset.v : (long)strlen(preset.v)),
             preset.v);
    add_pair(pairs, n, k, v, head_dim);
}

test_pair *test_pairs(const char *only, size_t *n)
{
    static const char *const presets[] = { "quality", "balanced", "small", "tiny" };
    static const char *const at_96[] = { "int-4", "int-8", "turboquant-4:rotate=hadamard",
                                         "trellis-4:rotate=hadamard" };
    static const char *const at_256[] = { "int-4", "int-8", "turboquant-4", "trellis-4" };
    static const uint32_t dims[] = { 64, 128 };
    static codec_name names[MAX_CODEC_NAMES];
    const size_t n_names = only ? 0 : codec_names(names);
    test_pair *pairs = calloc(2 * n_names + 32, sizeof *pairs);
    *n = 0;
    for (size_t d = 0; pairs != NULL && d < 2; d++) {
        for (size_t i = 0; i < (only ? 1 : n_names); i++) {
            const char *spec = only ? only : names[i].text;
            add_pair(pairs, n, spec, spec, dims[d]);
            pairs[*n - 1].measured = dims[d] == 128 && is_measured(spec, only);
        }
        for (size_t i = 0; only == NULL && i < 4; i++)
            add_preset(pairs, n, presets[i], dims[d]);
    }
    for (size_t i = 0; pairs != NULL && only == NULL && i < 4; i++) {
        add_pair(pairs, n, at_96[i], at_96[i], 96);
        add_pair(pairs, n, at_256[i], at_256[i], 256);
    }
    return pairs;
}

/* Random numbers */

static double uniform(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return ((double)(*state >> 11) + 0.5) * 0x1p-53;
}

float test_cut(double x)
{
    float number = (float)x;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits &= 0xffff0000u;
    memcpy(&number, &bits, sizeof bits);
    return number;
}

/* Normal numbers, whose channels have unequal sizes and a small mean, as in models. */
static void fill_rows(float *rows, size_t n_rows, uint32_t d, uint64_t seed)
{
    uint64_t state = 88172645463325252u ^ seed << 32;
    for (size_t i = 0; i < n_rows * d; i++) {
        const double radius = sqrt(-2 * log(uniform(&state))), angle = 2 * PI * uniform(&state);
        const uint32_t channel = (uint32_t)(i % d);
        rows[i] = test_cut((1 + channel % 7 / 12.0) * radius * cos(angle) +
                           0.05 * ((double)(channel % 5) - 2));
    }
}

kvant_calibration *test_calibration(uint32_t head_dim)
{
    enum { N = 600 };
    const size_t n = (size_t)N * TEST_KV_HEADS;
    float *keys = malloc(2 * n * head_dim * sizeof *keys), *values = keys + n * head_dim;
    if (keys == NULL)
        return NULL;
    fill_rows(keys, n, head_dim, 100);
    fill_rows(values, n, head_dim, 101);
    kvant_calibration *calibration =
        calibration_of((const float *const[]){ keys, values }, N, TEST_KV_HEADS, head_dim, values);
    free(keys);
    return calibration;
}

/* Codecs */

/* Centres and factors of the first rows, and windows of fp16, belong to caches. */
static void leave_out(char *spec, const kvant_codec_info *info)
{
    const struct {
        bool there;
        const char *word;
    } parts[] = { { info->center == KVANT_CENTER_FIRST, "center=none" },
                  { info->norm == KVANT_NORM_FIRST, "norm=none" },
                  { info->sink_tokens != 0, "sink=0" },
                  { info->recent_tokens != 0, "recent=0" } };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const size_t n = strlen(spec);
        if (parts[i].there)
            snprintf(spec + n, TEST_SPEC_BYTES - n, "%c%s", strchr(spec, ':') ? ',' : ':',
                     parts[i].word);
    }
}

static kvant_status make_codec(test_problem *p, kvant_role role, uint32_t head,
                               const kvant_calibration *calibration, char *why)
{
    char *spec = role == KVANT_ROLE_K ? p->pair.k : p->pair.v;
    kvant_codec **codec = &p->codec[role][head];
    p->info[role].size = sizeof p->info[role];
    for (int again = 0; again < 2; again++) {
        kvant_codec_free(codec);
        const kvant_status status = kvant_codec_create_calibrated(
            spec, p->pair.head_dim, role, 7, calibration, 0, head, codec, why, TEST_WHY_BYTES);
        if (status != KVANT_OK)
            return status;
        kvant_codec_get_info(*codec, &p->info[role]);
        leave_out(spec, &p->info[role]);
    }
    kvant_cuda_tables tables = { .size = sizeof tables };
    kvant_cuda_codec_tables(*codec, &tables);
    p->affine[role][head] = (kvant_affine){ tables.center, tables.scale };
    return KVANT_OK;
}

/* Pages of portable C, and the rows that it reads in them */

size_t test_page_at(const test_problem *p, kvant_role role, uint32_t block, uint32_t head)
{
    return block * p->block_bytes + head * p->info[role].page_bytes +
           (role == KVANT_ROLE_V ? TEST_KV_HEADS * p->info[KVANT_ROLE_K].page_bytes : 0);
}

kvant_status test_convert(const test_problem *p, kvant_role role, bool encode, float *rows)
{
    const size_t d = p->pair.head_dim, width = TEST_KV_HEADS * d;
    kvant_status status = KVANT_OK;
    for (uint32_t i = 0; status == KVANT_OK && i < TEST_BLOCKS * TEST_KV_HEADS; i++) {
        const uint32_t block = i / TEST_KV_HEADS, head = i % TEST_KV_HEADS;
        const kvant_codec *codec = p->codec[role][head];
        const kvant_affine *affine = &p->affine[role][head];
        uint8_t *page = p->pages + test_page_at(p, role, block, head);
        float *at = rows + block * 64 * width + head * d;
        status = encode ? kvant_codec_encode(codec, affine, at, width, 0, 64, page)
                        : kvant_codec_decode(codec, affine, page, 0, 64, at, width);
    }
    return status;
}

static bool allocate(test_problem *p)
{
    const size_t n = (size_t)TEST_ROWS * TEST_KV_HEADS * p->pair.head_dim;
    bool ok = true;
    for (int role = 0; role < 2; role++) {
        p->rows[role] = malloc(n * sizeof(float));
        p->decoded[role] = malloc(n * sizeof(float));
        ok = ok && p->rows[role] != NULL && p->decoded[role] != NULL;
    }
    p->block_bytes = TEST_KV_HEADS * (p->info[0].page_bytes + p->info[1].page_bytes);
    const size_t bytes = (TEST_BLOCKS * p->block_bytes + 63) / 64 * 64;
    p->pages = kvant_os_alloc(64, bytes);
    if (p->pages != NULL)
        memset(p->pages, 0, bytes);
    return ok && p->pages != NULL;
}

kvant_status test_problem_open(test_problem *p, const test_pair *pair,
                               const kvant_calibration *calibration, char *why)
{
    *p = (test_problem){ .pair = *pair };
    kvant_status status = kvant_set_cpu_level(KVANT_CPU_C);
    for (uint32_t i = 0; status == KVANT_OK && i < 2 * TEST_KV_HEADS; i++)
        status =
            make_codec(p, (kvant_role)(i / TEST_KV_HEADS), i % TEST_KV_HEADS, calibration, why);
    if (status != KVANT_OK)
        return status;
    status = allocate(p) ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t role = 0; status == KVANT_OK && role < 2; role++) {
        fill_rows(p->rows[role], (size_t)TEST_ROWS * TEST_KV_HEADS, pair->head_dim, role);
        status = test_convert(p, (kvant_role)role, true, p->rows[role]);
        if (status == KVANT_OK)
            status = test_convert(p, (kvant_role)role, false, p->decoded[role]);
    }
    if (status == KVANT_OK && !test_calls_make(p))
        status = KVANT_ERR_MEMORY;
    snprintf(why, TEST_WHY_BYTES, "%s", kvant_strerror(status));
    return status;
}

void test_problem_close(test_problem *p)
{
    for (uint32_t role = 0; role < 2; role++) {
        for (uint32_t head = 0; head < TEST_KV_HEADS; head++)
            kvant_codec_free(&p->codec[role][head]);
        free(p->rows[role]);
        free(p->decoded[role]);
    }
    kvant_os_free(p->pages);
    for (size_t i = 0; i < TEST_CALLS; i++) {
        free(p->calls[i].q);
        free(p->calls[i].out);
        free(p->calls[i].outputs);
    }
}
