/* check.c - compares the shaders with the library: SET_ROWS byte by byte with kvant_codec_encode,
 * attention with a computation in double precision over rows that kvant_codec_decode gives. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vulkan.h"

/* Bytes of SET_ROWS */

enum { SOME_ROWS = 500, SCALES = 27700 }; /* fp16 numbers from 2^-24 to nearly 65504 / 15 */

static float from_bits(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Fp16 number `h` (positive), from its definition. */
static float half_value(uint32_t h)
{
    const uint32_t exponent = h >> 10;

    return exponent == 0 ? ldexpf((float)h, -24)
                         : ldexpf((float)(1024 + h % 1024), (int)exponent - 25);
}

/* A row that is difficult to round: ties, numbers of every size, zeros of both signs. */
static void make_row(uint32_t kind, float *row, uint32_t d)
{
    const float size = ldexpf(1, (int)(random_bits() % 27) - 14), mean = random_normal();

    for (uint32_t j = 0; j < d; j++)
        switch (kind % 8) {
        case 0: row[j] = random_normal(); break;
        case 1: row[j] = size * random_normal() / 8; break;
        case 2: row[j] = 20 * mean + random_normal(); break;
        case 3: row[j] = (float)(random_bits() % 31) / 2 * size; break; /* ties */
        case 4: row[j] = from_bits(random_bits() & 0x807fffffu); break; /* subnormal */
        case 5: row[j] = random_bits() % 2 ? 0.0f : -0.0f; break;
        case 6: row[j] = mean; break;
        default: /* any number that fits fp16 */
            do
                row[j] = from_bits(random_bits());
            while (!(fabsf(row[j]) <= 65504));
        }
    if (kind % 8 == 3) { /* the smallest number is 0, and the scale a power of 2 */
        row[0] = 0;
        row[d - 1] = 15 * size;
    }
}

/* A row near the places where the scale, its reciprocal or a code may round either way. `i` chooses
 * the scale among all that fp16 has. */
static void make_scale_row(uint32_t i, float *row, uint32_t d)
{
    const float scale = half_value(i + 1), next = half_value(i + 2);
    const float zero = random_bits() % 2 ? 0 : -half_value(i + 2 + random_bits() % 4096);
    const bool tie = random_bits() % 2; /* largest / 15 lies between two fp16 numbers */
    float largest = tie ? 15 * (scale / 2 + next / 2) : 15 * scale;

    for (uint32_t n = random_bits() % 3; tie && n > 0; n--)
        largest = nextafterf(largest, n % 2 ? 0 : HUGE_VALF);
    for (uint32_t j = 0; j < d; j++)
        row[j] = zero + (random_bits() % 2 ? largest * random_unit()
                                           : (float)(random_bits() % 15) * scale + scale / 2);
    row[random_bits() % (d - 1)] = zero;
    row[d - 1] = zero + largest;
}

static bool same_pages(const pages *p, unsigned char *const *expected)
{
    bool same = true;

    for (int role = 0; role < 2; role++) {
        gpu_buffer copy = gpu_new_buffer(pages_bytes(p, role), true);
        gpu_begin();
        gpu_copy(&copy, &p->store[role]);
        gpu_end();
        gpu_run();
        same = same && memcmp(copy.at, expected[role], copy.bytes) == 0;
        gpu_free_buffer(&copy);
    }
    return same;
}

static void encode(const pages *p, uint32_t n, unsigned char *const *expected)
{
    const uint32_t d = p->of.head_dim, kv_heads = p->of.kv_heads;
    const uint32_t *slots = p->slots.at;

    for (uint32_t i = 0; i < 2 * n * kv_heads; i++) {
        const uint32_t role = i % 2, head = i / 2 % kv_heads, row = i / 2 / kv_heads;
        const float *from = (const float *)p->rows[role].at + (row * kv_heads + head) * d;
        unsigned char *page =
            expected[role] + (slots[row] / 64 * kv_heads + head) * p->page_bytes[role];
        if (kvant_codec_encode(p->codec[role], NULL, from, d, slots[row] % 64, 1, page) !=
            KVANT_OK) {
            fprintf(stderr, "vulkan: the library refuses a row of the test\n");
            exit(1);
        }
    }
}

/* Fills `rounds` times all slots in random order, in calls of different sizes. So most rows replace
 * an older one. */
static bool check_rows(const char *shaders, uint32_t head_dim, uint32_t n_rows, uint32_t rounds,
                       void (*make)(uint32_t kind, float *row, uint32_t d))
{
    const shape of = { 1, 2, 2, head_dim, n_rows };
    pages p = pages_new(shaders, &of, n_rows, 1);
    unsigned char *expected[2] = { calloc(1, pages_bytes(&p, 0)), calloc(1, pages_bytes(&p, 1)) };
    uint32_t *order = calloc(n_rows, sizeof *order);
    bool good = true;

    for (uint32_t round = 0; round < rounds; round++) {
        random_order(order, n_rows);
        for (uint32_t begin = 0, n; begin < n_rows; begin += n) {
            n = round == 0 || n_rows - begin < 8 ? n_rows - begin : 1 + random_bits() % 90;
            n = n < n_rows - begin ? n : n_rows - begin;
            memcpy(p.slots.at, order + begin, n * sizeof *order);
            for (uint32_t i = 0; i < 2 * n * of.kv_heads; i++)
                make(begin + i / 2 / of.kv_heads, (float *)p.rows[i % 2].at + i / 2 * head_dim,
                     head_dim);
            encode(&p, n, expected);
            good = pages_set_rows(&p, n) && good;
        }
    }
    good = same_pages(&p, expected) && good;
    printf("SET_ROWS, head_dim %u, %u rows, %u times: %s\n", (unsigned)head_dim, (unsigned)n_rows,
           (unsigned)rounds, good ? "equal bytes" : "DIFFERS");
    free(order);
    free(expected[0]);
    free(expected[1]);
    pages_free(&p);
    return good;
}

/* A call with one bad number stores nothing. */
static bool check_refused(const char *shaders)
{
    static const uint32_t bad[] = { 0x7fc00000u, 0xffc00001u, 0x7f800000u,
                                    0xff800000u, 0x477fe001u, 0xc77fe001u };
    const shape of = { 1, 2, 2, 64, 64 };
    pages p = pages_new(shaders, &of, 64, 1);
    unsigned char *expected[2] = { calloc(1, pages_bytes(&p, 0)), calloc(1, pages_bytes(&p, 1)) };
    bool good = true;

    for (uint32_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        for (uint32_t j = 0; j < 64; j++)
            ((uint32_t *)p.slots.at)[j] = j;
        for (int role = 0; role < 2; role++)
            for (uint32_t j = 0; j < 64 * 2 * 64; j++)
                ((float *)p.rows[role].at)[j] = random_normal();
        ((float *)p.rows[i % 2].at)[random_bits() % (64 * 2 * 64)] = from_bits(bad[i]);
        good = !pages_set_rows(&p, 64) && good;
    }
    good = same_pages(&p, expected) && good;
    printf("SET_ROWS with a number that no page holds: %s\n", good ? "refused" : "STORED");
    free(expected[0]);
    free(expected[1]);
    pages_free(&p);
    return good;
}

/* Attention */

typedef struct head {
    const pages *p;
    uint32_t sequence, head;
    float *k, *v; /* the decoded rows of the kv head */
    const float *q;
} head;

static void decode(const head *h, unsigned char *const *encoded)
{
    const pages *p = h->p;
    const uint32_t d = p->of.head_dim;
    const uint32_t *table = p->table.at;

    for (uint32_t i = 0; i < 2 * p->blocks; i++) {
        const uint32_t role = i % 2, block = table[h->sequence * p->blocks + i / 2];
        const uint32_t kv_head = h->head / (p->of.heads / p->of.kv_heads);
        const unsigned char *page =
            encoded[role] + (block * p->of.kv_heads + kv_head) * p->page_bytes[role];
        if (kvant_codec_decode(p->codec[role], NULL, page, 0, 64,
                               (role ? h->v : h->k) + i / 2 * 64 * d, d) != KVANT_OK)
            exit(1);
    }
}

/* Computes attention of a head, and how far each number of the shader's output may be from it.
 *
 * u = 2^-23 bounds the relative error of one operation, whichever way it rounds. A score is scale x
 * <q, codes> + zero x sum of q. A thread adds d / 4 products, and 16 operations more follow. So its
 * error is at most (d / 4 + 16) u times the sum of the magnitudes |q| (scale code + |zero|). The
 * zero point is the smallest number of a decoded row. Vulkan allows exp2(x) an error of (3 + 2 |x|)
 * u. A weight is one exp2, and is multiplied by one for each page of its part and by one for the
 * part. Their arguments add up to at most the range of the scores. So each weight has a relative
 * error of at most e = the score's error + (4 pages + 16 + 4 range) u. A mean of v with such
 * weights moves by at most the mean of 2 e |v - mean|, where 2 covers terms of higher order. The
 * sums over tokens have (tokens + 16) u of the mean of scale code + |zero|. */
static void reference(const head *h, double *out, double *bound)
{
    const uint32_t d = h->p->of.head_dim, n = h->p->of.tokens;
    const double u = ldexp(1, -23), scale = (double)h->p->push.scale;
    double *weights = malloc(2 * n * sizeof *weights), *errors = weights + n;
    double total = 0, most = -DBL_MAX, least = DBL_MAX;

    for (uint32_t t = 0; t < n; t++) {
        const float *k = h->k + t * d;
        double zero = (double)k[0], score = 0, size = 0;
        for (uint32_t j = 1; j < d; j++)
            zero = fmin(zero, (double)k[j]);
        for (uint32_t j = 0; j < d; j++) {
            score += scale * (double)h->q[j] * (double)k[j];
            size += scale * fabs((double)h->q[j]) * ((double)k[j] - zero + fabs(zero));
        }
        weights[t] = score;
        errors[t] = (d / 4 + 16) * u * size;
        most = fmax(most, score);
        least = fmin(least, score);
    }
    for (uint32_t t = 0; t < n; t++) {
        errors[t] += (4 * h->p->push.part_pages + 16 + 4 * (most - least) / log(2)) * u;
        weights[t] = exp(weights[t] - most);
        total += weights[t];
    }
    for (uint32_t j = 0; j < d; j++) {
        out[j] = bound[j] = 0;
        for (uint32_t t = 0; t < n; t++)
            out[j] += weights[t] / total * (double)h->v[t * d + j];
    }
    for (uint32_t t = 0; t < n; t++) {
        const float *v = h->v + t * d;
        double zero = (double)v[0];
        for (uint32_t j = 1; j < d; j++)
            zero = fmin(zero, (double)v[j]);
        for (uint32_t j = 0; j < d; j++)
            bound[j] += weights[t] / total *
                        (2 * errors[t] * fabs((double)v[j] - out[j]) +
                         (n + 16) * u * ((double)v[j] - zero + fabs(zero)));
    }
    free(weights);
}

/* The largest error of the shader's output in relation to its bound. */
static double compare_head(const head *h)
{
    const uint32_t d = h->p->of.head_dim;
    const float *got = (const float *)h->p->out.at + (h->sequence * h->p->of.heads + h->head) * d;
    double *out = malloc(2 * d * sizeof *out), *bound = out + d, worst = 0;

    reference(h, out, bound);
    for (uint32_t j = 0; j < d; j++) {
        const double error = fabs((double)got[j] - out[j]) / bound[j];
        worst = fmax(worst, isnan(error) ? INFINITY : error);
    }
    free(out);
    return worst;
}

/* Random rows around a mean; the last block of a sequence is not full. */
static void fill(pages *p, unsigned char *const *encoded)
{
    const uint32_t n = p->of.tokens, d = p->of.head_dim;
    uint32_t *table = p->table.at;

    random_order(table, p->of.sequences * p->blocks);
    for (uint32_t sequence = 0; sequence < p->of.sequences; sequence++) {
        for (uint32_t t = 0; t < n; t++)
            ((uint32_t *)p->slots.at)[t] = 64 * table[sequence * p->blocks + t / 64] + t % 64;
        for (int role = 0; role < 2; role++)
            for (uint32_t i = 0; i < n * p->of.kv_heads * d; i++)
                ((float *)p->rows[role].at)[i] = random_normal() + (float)(i % d % 5) - 2;
        encode(p, n, encoded);
        pages_set_rows(p, n);
    }
    for (uint32_t i = 0; i < p->of.sequences * p->of.heads * d; i++)
        ((float *)p->q.at)[i] = random_normal();
}

static bool check_attention(const char *shaders, const shape *of, uint32_t workgroups)
{
    pages p = pages_new(shaders, of, of->tokens, workgroups);
    unsigned char *encoded[2] = { calloc(1, pages_bytes(&p, 0)), calloc(1, pages_bytes(&p, 1)) };
    const size_t rows = (size_t)p.blocks * 64 * of->head_dim;
    head h = { .p = &p, .k = malloc(rows * sizeof(float)), .v = malloc(rows * sizeof(float)) };
    double worst = 0;

    p.push.scale = 1 / sqrtf((float)of->head_dim);
    fill(&p, encoded);
    gpu_begin();
    pages_record_attention(&p);
    gpu_end();
    gpu_run();
    for (h.sequence = 0; h.sequence < of->sequences; h.sequence++)
        for (h.head = 0; h.head < of->heads; h.head++) {
            h.q = (const float *)p.q.at + (h.sequence * of->heads + h.head) * of->head_dim;
            decode(&h, encoded);
            worst = fmax(worst, compare_head(&h));
        }
    printf("attention, %u sequences, %u of %u heads, head_dim %u, %u tokens, %u parts: "
           "%.5f of the bound%s\n",
           (unsigned)of->sequences, (unsigned)of->heads, (unsigned)of->kv_heads,
           (unsigned)of->head_dim, (unsigned)of->tokens, (unsigned)p.push.parts, worst,
           worst <= 1 ? "" : ", WRONG");
    free(h.k);
    free(h.v);
    free(encoded[0]);
    free(encoded[1]);
    pages_free(&p);
    return worst <= 1;
}

bool check_all_rows(const char *shaders)
{
    static const uint32_t head_dims[] = { 20, 64, 80, 128, 256 };
    bool good = check_refused(shaders);

    for (size_t i = 0; i < sizeof head_dims / sizeof *head_dims; i++)
        good = good && check_rows(shaders, head_dims[i], SOME_ROWS, 3, make_row);
    return good && check_rows(shaders, 32, SCALES, 1, make_scale_row);
}

bool check_all_attention(const char *shaders)
{
    /* the driver compiles the first of them in the shortest time */
    static const shape shapes[] = { { 2, 3, 3, 64, 1000 }, { 1, 8, 2, 128, 1 },
                                    { 2, 8, 2, 128, 700 }, { 1, 8, 2, 128, 64 },
                                    { 1, 8, 1, 64, 300 },  { 1, 2, 2, 256, 200 } };
    bool good = true;

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        good = good && check_attention(shaders, &shapes[i], i % 2 ? 1 : 20);
    return good;
}
