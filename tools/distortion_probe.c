/* distortion_probe.c - encodes synthetic rows with a codec, through the public interface alone, and
 * compares.
 *
 * Inner products are what attention would use: kvant_codec_score on the page's bytes, not products with
 * decoded rows. Everything that is compared is accumulated in double precision.
 */
#include "distortion.h"

#include "interrupt.h"
#include "stats.h"

#include <kvant/codec.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = DISTORTION_HEAD_DIM, TOKENS = KVANT_PAGE_TOKENS, MAX_QUERIES = 64, MAX_LEVELS = 256 };

typedef struct setup {
    uint32_t n_keys, n_queries, n_seeds;
} setup;

/* As in the papers; the quick ones draw less, but keep enough seeds for a standard error to mean
 * something. */
static setup setup_of(setup_id id, bool quick)
{
    static const setup full[] = {
        [SETUP_INFO] = { 0, 0, 1 },          [SETUP_FIDELITY] = { 1024, 16, 64 }, [SETUP_SPLIT] = { 8192, 16, 4 },
        [SETUP_ROUNDING] = { 4096, 64, 5 },  [SETUP_NEEDLE] = { 2048, 1, 128 },   [SETUP_CODEBOOK] = { 1024, 0, 8 },
        [SETUP_COVERING] = { 65536, 0, 16 },
    };
    static const setup small[] = {
        [SETUP_INFO] = { 0, 0, 1 },        [SETUP_FIDELITY] = { 128, 16, 16 }, [SETUP_SPLIT] = { 128, 16, 8 },
        [SETUP_ROUNDING] = { 128, 64, 8 }, [SETUP_NEEDLE] = { 2048, 1, 16 },   [SETUP_CODEBOOK] = { 256, 0, 8 },
        [SETUP_COVERING] = { 8192, 0, 8 },
    };
    return quick ? small[id] : full[id];
}

double probe_work(const probe *p)
{
    const setup s = setup_of(p->setup, p->quick);
    return (double)s.n_keys * s.n_seeds;
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

noise noise_start(setup_id setup, uint32_t seed)
{
    return (noise){ .state = (uint64_t)setup << 32 | seed };
}

/* Marsaglia's polar method. */
float noise_normal(noise *n)
{
    if (n->has_spare) {
        n->has_spare = false;
        return (float)n->spare;
    }
    for (;;) {
        const double u = (double)(next_random(&n->state) >> 11) * 0x1p-52 - 1;
        const double v = (double)(next_random(&n->state) >> 11) * 0x1p-52 - 1;
        const double s = u * u + v * v;
        if (s >= 1 || s == 0)
            continue;
        const double factor = sqrt(-2 * log(s) / s);
        n->spare = v * factor;
        n->has_spare = true;
        return (float)(u * factor);
    }
}

static void fill(noise *n, float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        x[i] = noise_normal(n);
}

static double dot(const float *a, const float *b)
{
    double sum = 0;
    for (size_t i = 0; i < DIM; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

/* What one codec needs to see one page at a time. */
typedef struct bench {
    kvant_codec *codec;
    void *page;
    size_t page_bytes;
    float rows[TOKENS * DIM], decoded[TOKENS * DIM];
    float queries[MAX_QUERIES * DIM], transformed[MAX_QUERIES * DIM], scores[MAX_QUERIES * TOKENS];
    double *errors; /* one per key, for the percentile */
} bench;

static void bench_close(bench *b)
{
    if (b == NULL)
        return;
    kvant_codec_free(&b->codec);
    free(b->page);
    free(b->errors);
    free(b);
}

static bool fail(probe *p, const char *text)
{
    snprintf(p->problem, sizeof p->problem, "%s", text);
    return false;
}

static bool bench_codec(bench *b, probe *p, uint32_t seed)
{
    kvant_codec_free(&b->codec);
    free(b->page);
    b->page = NULL;
    if (kvant_codec_create(p->spec, DIM, KVANT_ROLE_K, seed, &b->codec, p->problem, sizeof p->problem) != KVANT_OK)
        return false;
    kvant_codec_info info = { .size = sizeof info };
    kvant_codec_get_info(b->codec, &info);
    p->nominal_bits = info.nominal_bits;
    p->true_bits = info.true_bits;
    b->page_bytes = info.page_bytes;
    b->page = aligned_alloc(KVANT_PAGE_ALIGN, info.page_bytes);
    return b->page != NULL || fail(p, "out of memory");
}

static bool bench_encode(bench *b, probe *p, uint32_t n)
{
    memset(b->page, 0, b->page_bytes);
    const kvant_status status = kvant_codec_encode(b->codec, NULL, b->rows, DIM, 0, n, b->page);
    if (status != KVANT_OK)
        return fail(p, kvant_strerror(status));
    kvant_codec_decode(b->codec, NULL, b->page, 0, n, b->decoded, DIM);
    return true;
}

static void bench_score(bench *b, uint32_t n_queries)
{
    if (n_queries > 0)
        kvant_codec_score(b->codec, b->page, b->transformed, DIM, n_queries, b->scores);
}

static void draw_queries(bench *b, noise *n, uint32_t n_queries)
{
    fill(n, b->queries, (size_t)n_queries * DIM);
    for (uint32_t i = 0; i < n_queries; i++)
        kvant_codec_transform_query(b->codec, NULL, b->queries + i * DIM, b->transformed + i * DIM);
}

static void add_row(bench *b, uint32_t t, uint32_t n_queries, double *sum, double *error)
{
    const float *k = b->rows + t * DIM, *d = b->decoded + t * DIM;
    const double kk = dot(k, k), kd = dot(k, d), dd = dot(d, d);
    double squared = 0;
    for (size_t i = 0; i < DIM; i++)
        squared += ((double)k[i] - d[i]) * ((double)k[i] - d[i]);
    *error = squared / DIM;
    sum[SERIES_COS] += kd / sqrt(kk * dd);
    sum[SERIES_MSE] += *error;
    sum[SERIES_RELATIVE] += squared / kk;
    sum[SERIES_SLOPE] += kd / kk;
    for (uint32_t i = 0; i < n_queries; i++) {
        const float *q = b->queries + i * DIM;
        const double missed = dot(q, k) - b->scores[i * TOKENS + t];
        sum[SERIES_IP_ABS] += fabs(missed) / n_queries;
        sum[SERIES_IP_SQUARE] += missed * missed * DIM / (dot(q, q) * kk * n_queries);
    }
}

static bool measure_fidelity(bench *b, probe *p, const setup *s, uint32_t seed)
{
    noise n = noise_start(p->setup, seed);
    double sum[N_SERIES] = { 0 };
    draw_queries(b, &n, s->n_queries);
    for (uint32_t first = 0; first < s->n_keys; first += TOKENS) {
        fill(&n, b->rows, (size_t)TOKENS * DIM);
        if (!bench_encode(b, p, TOKENS))
            return false;
        bench_score(b, s->n_queries);
        for (uint32_t t = 0; t < TOKENS; t++)
            add_row(b, t, s->n_queries, sum, &b->errors[first + t]);
    }
    for (size_t i = 0; i < N_SERIES; i++)
        p->series[i][seed] = sum[i] / s->n_keys;
    p->series[SERIES_TAIL95][seed] = stats_percentile(b->errors, s->n_keys, 0.95);
    return true;
}

/* The needle has the length that keys have on average, sqrt(head_dim). With a length drawn like the
 * others the f32 weight averages to 0.92, not to the paper's 0.960: softmax is steep, and the score
 * grows with the square. */
static void draw_needle(bench *b, noise *n)
{
    fill(n, b->rows, DIM);
    const double scale = sqrt(DIM / dot(b->rows, b->rows));
    for (size_t i = 0; i < DIM; i++) {
        b->rows[i] = (float)(b->rows[i] * scale);
        b->queries[i] = b->rows[i] + 0.1f * noise_normal(n);
    }
    kvant_codec_transform_query(b->codec, NULL, b->queries, b->transformed);
}

static bool measure_needle(bench *b, probe *p, const setup *s, uint32_t seed)
{
    noise n = noise_start(p->setup, seed);
    draw_needle(b, &n);
    if (!bench_encode(b, p, 1))
        return false;
    bench_score(b, 1);
    const double needle = b->scores[0] / sqrt(DIM);
    double others = 0; /* relative to the needle, which keeps the exponentials small */
    for (uint32_t first = 0; first < s->n_keys; first += TOKENS) {
        fill(&n, b->rows, (size_t)TOKENS * DIM);
        if (!bench_encode(b, p, TOKENS))
            return false;
        bench_score(b, 1);
        for (uint32_t t = 0; t < TOKENS; t++)
            others += exp(b->scores[t] / sqrt(DIM) - needle);
    }
    p->series[SERIES_NEEDLE][seed] = 1 / (1 + others);
    return true;
}

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void count_levels(const float *sorted, size_t n, uint32_t seed, probe *p)
{
    double low = NAN, entropy = 0;
    for (size_t i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && sorted[i + run] == sorted[i]; run++)
            continue;
        const double share = (double)run / (double)n;
        entropy -= share * log2(share);
        if (isnan(low) && sorted[i] > 0)
            low = sorted[i];
    }
    p->series[SERIES_LEVEL_LOW][seed] = low;
    p->series[SERIES_LEVEL_HIGH][seed] = sorted[n - 1];
    p->series[SERIES_ENTROPY][seed] = entropy;
}

/* Rows of length sqrt(head_dim) have the scale 1 in 16 bits too, so what they decode to are the levels
 * themselves. */
static bool measure_codebook(bench *b, probe *p, const setup *s, uint32_t seed)
{
    noise n = noise_start(p->setup, seed);
    float *all = malloc((size_t)s->n_keys * DIM * sizeof *all);
    bool ok = all != NULL || fail(p, "out of memory");
    for (uint32_t first = 0; first < s->n_keys && ok; first += TOKENS) {
        fill(&n, b->rows, (size_t)TOKENS * DIM);
        for (uint32_t t = 0; t < TOKENS; t++) {
            const double scale = sqrt(DIM / dot(b->rows + t * DIM, b->rows + t * DIM));
            for (size_t i = 0; i < DIM; i++)
                b->rows[t * DIM + i] = (float)(b->rows[t * DIM + i] * scale);
        }
        ok = bench_encode(b, p, TOKENS);
        memcpy(all + (size_t)first * DIM, b->decoded, sizeof b->decoded);
    }
    if (ok) {
        qsort(all, (size_t)s->n_keys * DIM, sizeof *all, ascending);
        count_levels(all, (size_t)s->n_keys * DIM, seed, p);
    }
    free(all);
    return ok;
}

/* Keys and values may cost differently: a paper's figure is their mean. */
static bool measure_sizes(bench *b, probe *p)
{
    kvant_codec *values;
    kvant_codec_info info = { .size = sizeof info };
    if (kvant_codec_create(p->spec, DIM, KVANT_ROLE_V, 0, &values, p->problem, sizeof p->problem) != KVANT_OK)
        return false;
    kvant_codec_get_info(values, &info);
    kvant_codec_free(&values);
    p->nominal_bits = (p->nominal_bits + info.nominal_bits) / 2;
    p->true_bits = (p->true_bits + info.true_bits) / 2;
    return b->codec != NULL;
}

static bool measure(bench *b, probe *p, const setup *s, uint32_t seed)
{
    switch (p->setup) {
    case SETUP_INFO: return measure_sizes(b, p);
    case SETUP_FIDELITY:
    case SETUP_SPLIT:
    case SETUP_ROUNDING: return measure_fidelity(b, p, s, seed);
    case SETUP_NEEDLE: return measure_needle(b, p, s, seed);
    case SETUP_CODEBOOK: return measure_codebook(b, p, s, seed);
    case SETUP_COVERING: return quaternion_measure(b->codec, seed, s->n_keys, p);
    }
    return false;
}

bool probe_run(probe *p, progress *progress)
{
    const setup s = setup_of(p->setup, p->quick);
    bench *b = calloc(1, sizeof *b);
    double *errors = malloc(((size_t)s.n_keys + 1) * sizeof *errors);
    bool ok = b != NULL && errors != NULL;
    if (b != NULL)
        b->errors = errors;
    else
        free(errors);
    if (!ok)
        fail(p, "out of memory");
    for (uint32_t seed = 0; seed < s.n_seeds && ok && !interrupted(); seed++) {
        ok = bench_codec(b, p, seed) && measure(b, p, &s, seed);
        p->n_seeds += ok;
        progress_add(progress, s.n_keys, p->spec);
    }
    p->done = ok && p->n_seeds == s.n_seeds;
    bench_close(b);
    return !interrupted();
}
