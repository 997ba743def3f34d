/* test_block_attention.c - decoding of ggml's block formats against a decoder written here, and
 * attention on them against a plain softmax in double precision. The cases are lengths that do not
 * fill a page, strides, masks, softcap, ALiBi, sinks, threads and hostile arguments. The folder
 * tests/kernels tests kernels at every level; tests/integration compares with ggml's own bytes and
 * results. */
#include "attention_data.h"

#include <kvant/block_attention.h>

#include "../../src/blocks/format.h"
#include "../cpu_levels.h"

static const kvant_block_type types[] = { KVANT_BLOCK_F32,  KVANT_BLOCK_F16,  KVANT_BLOCK_BF16,
                                          KVANT_BLOCK_Q4_0, KVANT_BLOCK_Q4_1, KVANT_BLOCK_Q5_0,
                                          KVANT_BLOCK_Q5_1, KVANT_BLOCK_Q8_0, KVANT_BLOCK_IQ4_NL };
#define N_TYPES (sizeof types / sizeof *types)

CASE(row_sizes_are_ggmls)
{
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_F32, 80), 320);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_F16, 64), 128);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_BF16, 64), 128);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q4_0, 64), 36);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q4_1, 64), 40);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q5_0, 64), 44);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q5_1, 64), 48);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q8_0, 64), 68);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_IQ4_NL, 64), 36);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_Q8_0, 80), 0);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_F16, 40), 0);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_F16, 0), 0);
    assert_int_equal(kvant_block_row_bytes(KVANT_BLOCK_F16, 528), 0);
    assert_int_equal(kvant_block_row_bytes((kvant_block_type)9, 64), 0);
    assert_int_equal(kvant_block_row_bytes((kvant_block_type)-1, 64), 0);
}

/* Codes 0 .. 15 ascend through the low halves of a block's bytes and descend through the high
 * halves. The scale is 0.5 and the minimum is -3. The numbers 1, 16 and 31 have a fifth bit. */
CASE(blocks_decode_as_documented)
{
    const uint8_t nibbles[16] = { 0xf0, 0xe1, 0xd2, 0xc3, 0xb4, 0xa5, 0x96, 0x87,
                                  0x78, 0x69, 0x5a, 0x4b, 0x3c, 0x2d, 0x1e, 0x0f };
    static const float nl[16] = { -127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113 };
    uint8_t plain[18] = { 0x00, 0x38 }, with_min[20] = { 0x00, 0x38, 0x00, 0xc2 };
    uint8_t fifths[22] = { 0x00, 0x38, 0x02, 0x00, 0x01, 0x80 };
    uint8_t both[24] = { 0x00, 0x38, 0x00, 0xc2, 0x02, 0x00, 0x01, 0x80 },
            bytes[34] = { 0x00, 0x38, 0x80, 0x7f };
    float x[32];
    memcpy(plain + 2, nibbles, 16);
    memcpy(with_min + 4, nibbles, 16);
    memcpy(fifths + 6, nibbles, 16);
    memcpy(both + 8, nibbles, 16);
    for (int i = 0; i < 32; i++) {
        int code = i < 16 ? i : 31 - i, fifth = i == 1 || i == 16 || i == 31 ? 16 : 0;
        kvant_block_decode(KVANT_BLOCK_Q4_0, plain, 32, x);
        assert_true(x[i] == 0.5f * (float)(code - 8));
        kvant_block_decode(KVANT_BLOCK_IQ4_NL, plain, 32, x);
        assert_true(x[i] == 0.5f * nl[code]);
        kvant_block_decode(KVANT_BLOCK_Q4_1, with_min, 32, x);
        assert_true(x[i] == 0.5f * (float)code - 3);
        kvant_block_decode(KVANT_BLOCK_Q5_0, fifths, 32, x);
        assert_true(x[i] == 0.5f * (float)(code + fifth - 16));
        kvant_block_decode(KVANT_BLOCK_Q5_1, both, 32, x);
        assert_true(x[i] == 0.5f * (float)(code + fifth) - 3);
        kvant_block_decode(KVANT_BLOCK_Q8_0, bytes, 32, x);
        assert_true(x[i] == (i == 0 ? -64.0f : i == 1 ? 63.5f : 0.0f));
    }
}

typedef struct setup {
    uint32_t k_dim, v_dim, n_kv_heads, n_heads, n_tokens, n_queries;
    size_t gap; /* bytes between rows that belong to no row */
    bool mask, sinks;
    float softcap, max_bias;
} setup;

typedef struct fixture {
    setup s;
    uint8_t *k, *v;
    attention_data data;
    kvant_block_rows k_rows, v_rows;
    kvant_attention_problem problem;
} fixture;

/* Random codes with scales that give numbers of about 1. Gaps hold NaNs. */
static void fill_row(kvant_block_type type, uint8_t *row, uint32_t n, uint64_t *rng)
{
    kvant_block_format format = kvant_block_format_of(type);
    size_t bytes = kvant_block_row_bytes(type, n);
    for (size_t i = 0; i < bytes; i++)
        row[i] = (uint8_t)(test_random(rng) >> 40);
    for (uint32_t b = 0; b < n / format.numbers; b++, row += format.bytes) {
        float x[16];
        uint16_t half[2] = { kvant_half_from_float(
                                 type == KVANT_BLOCK_Q8_0 || type == KVANT_BLOCK_IQ4_NL ? 0.01f
                                                                                        : 0.1f),
                             kvant_half_from_float(-0.7f) };
        fill_normal(x, 16, rng);
        if (format.numbers == 32)
            memcpy(row, half, format.has_min ? 4 : 2);
        for (uint32_t i = 0; format.numbers == 16 && i < 16; i++) {
            uint32_t bits = kvant_float_bits(x[i]);
            half[0] =
                type == KVANT_BLOCK_F16 ? kvant_half_from_float(x[i]) : (uint16_t)(bits >> 16);
            if (type == KVANT_BLOCK_F32)
                memcpy(row + 4 * i, &bits, 4);
            else
                memcpy(row + 2 * i, half, 2);
        }
    }
}

static kvant_block_rows make_rows(const setup *s, kvant_block_type type, uint32_t dim,
                                  uint64_t *rng, uint8_t **memory)
{
    kvant_block_rows rows = { .size = sizeof rows,
                              .type = type,
                              .n_kv_heads = s->n_kv_heads,
                              .head_dim = dim,
                              .head_stride = kvant_block_row_bytes(type, dim) + s->gap };
    rows.token_stride = s->n_kv_heads * rows.head_stride;
    rows.bytes = s->n_tokens * rows.token_stride - s->gap;
    *memory = malloc(rows.bytes);
    memset(*memory, 0xff, rows.bytes);
    for (uint32_t i = 0; i < s->n_tokens * s->n_kv_heads; i++)
        fill_row(type, *memory + i * rows.head_stride, dim, rng);
    rows.data = *memory;
    return rows;
}

static fixture make_fixture(setup s, kvant_block_type k, kvant_block_type v)
{
    uint64_t rng = 5;
    fixture f = { .s = s };
    f.k_rows = make_rows(&s, k, s.k_dim, &rng, &f.k);
    f.v_rows = make_rows(&s, v, s.v_dim, &rng, &f.v);
    f.problem = (kvant_attention_problem){ .n_tokens = s.n_tokens,
                                           .n_queries = s.n_queries,
                                           .n_heads = s.n_heads,
                                           .logit_softcap = s.softcap,
                                           .max_bias = s.max_bias };
    f.data = make_data(&f.problem, s.k_dim, s.v_dim, s.mask, s.sinks, &rng);
    return f;
}

static void free_fixture(fixture *f)
{
    free(f->k);
    free(f->v);
    free_data(&f->data);
}

static kvant_status run(fixture *f)
{
    size_t bytes = 0;
    kvant_status said =
        kvant_block_attention_workspace(&f->k_rows, &f->v_rows, &f->problem, &bytes);
    void *workspace = aligned(bytes ? bytes : 64);
    memset(workspace, 0xff, bytes); /* NaNs show a read of memory that was not written */
    for (size_t i = 0; i < (size_t)f->s.n_queries * f->s.n_heads * f->s.v_dim; i++)
        f->data.out[i] = NAN;
    kvant_status status =
        kvant_block_attention(&f->k_rows, &f->v_rows, &f->problem, workspace, bytes);
    assert_int_equal(said, status);
    free(workspace);
    return status;
}

static float *decode_head(const fixture *f, const kvant_block_rows *rows, uint32_t kv_head)
{
    float *x = malloc((size_t)f->s.n_tokens * rows->head_dim * sizeof *x);
    for (uint32_t j = 0; j < f->s.n_tokens; j++)
        kvant_block_decode(rows->type,
                           (const uint8_t *)rows->data + j * rows->token_stride +
                               kv_head * rows->head_stride,
                           rows->head_dim, x + (size_t)j * rows->head_dim);
    return x;
}

/* Computes one output row in double precision and returns the largest error that binary32 may
 * cause.
 *
 * A score has k_dim roundings of products whose magnitudes sum to m. The exponential makes relative
 * errors of weights from them. Sums round once for each token. 2^-18 is the error of the
 * exponential. */
static double exact_row(const fixture *f, uint32_t token, uint32_t head, double *out)
{
    const setup *s = &f->s;
    uint32_t kv_head = head / (s->n_heads / s->n_kv_heads);
    float *keys = decode_head(f, &f->k_rows, kv_head),
          *values = decode_head(f, &f->v_rows, kv_head);
    double *weights = malloc(s->n_tokens * sizeof *weights);
    const reference_row cells = {
        .keys = keys, .values = values, .key_stride = s->k_dim, .value_stride = s->v_dim
    };
    const float *q = f->data.q + ((size_t)token * s->n_heads + head) * s->k_dim;
    data_row(&f->data, &f->problem, token, head, cells, weights, out);
    double magnitude = 0, largest = 0;
    for (uint32_t j = 0; j < s->n_tokens; j++) {
        double m = 0;
        for (uint32_t i = 0; i < s->k_dim; i++)
            m += fabs((double)q[i] * keys[(size_t)j * s->k_dim + i]);
        magnitude = fmax(magnitude, m * f->problem.scale);
        for (uint32_t i = 0; weights[j] > 0 && i < s->v_dim; i++)
            largest = fmax(largest, fabsf(values[(size_t)j * s->v_dim + i]));
    }
    free(keys);
    free(values);
    free(weights);
    /* A factor of 2 for numerator and denominator. 40: the largest magnitude of a mask, whose sum
     * with a score is rounded. */
    return 2 * largest *
           ((s->k_dim + 4) * (magnitude + 40) * 0x1p-24 + s->n_tokens * 0x1p-24 + 0x1p-18);
}

static void check(setup s, kvant_block_type k, kvant_block_type v)
{
    fixture f = make_fixture(s, k, v);
    double want[512];
    assert_int_equal(run(&f), KVANT_OK);
    for (uint32_t t = 0; t < s.n_queries; t++)
        for (uint32_t h = 0; h < s.n_heads; h++) {
            double bound = exact_row(&f, t, h, want);
            for (uint32_t i = 0; i < s.v_dim; i++) {
                double got = f.data.out[((size_t)t * s.n_heads + h) * s.v_dim + i];
                if (!(fabs(got - want[i]) <= bound))
                    fail_msg("type %d, token %u, head %u, channel %u: %g, exact %g, bound %g",
                             (int)k, t, h, i, got, want[i], bound);
            }
        }
    free_fixture(&f);
}

CASE(outputs_are_exact_to_binary32)
{
    for (size_t i = 0; i < N_TYPES; i++) {
        kvant_block_type t = types[i], other = types[(i + 5) % N_TYPES];
        check((setup){ 64, 64, 3, 9, 130, 1, .mask = true }, t, t);
        check((setup){ 64, 32, 2, 14, 63, 3, .gap = 5, .mask = true, .sinks = true }, t, other);
        check((setup){ 128, 128, 1, 4, 200, 37, .mask = true, .softcap = 10 }, t, t);
        check((setup){ 96, 256, 2, 6, 129, 9, .gap = 1, .mask = true, .max_bias = 8 }, t, other);
        check((setup){ 32, 64, 2, 2, 1, 1, .gap = 0 }, t, t);
        check((setup){ 64, 64, 1, 1, 2500, 1, .gap = 0 }, t, t);
    }
    check((setup){ 80, 112, 2, 4, 100, 20, .mask = true }, KVANT_BLOCK_F16, KVANT_BLOCK_F32);
}

/* Compares bits, for decode (whose context is split) and prefill. */
CASE(threads_change_nothing)
{
    for (uint32_t n_queries = 1; n_queries <= 41; n_queries += 40) {
        fixture f = make_fixture((setup){ 64, 64, 3, 9, 2300, n_queries, .mask = true },
                                 KVANT_BLOCK_Q8_0, KVANT_BLOCK_Q4_0);
        size_t bytes = (size_t)n_queries * 9 * 64 * sizeof(float);
        float *first = malloc(bytes);
        for (uint32_t n = 1; n <= 4; n++) {
            f.problem.n_threads = n;
            assert_int_equal(run(&f), KVANT_OK);
            if (n == 1)
                memcpy(first, f.data.out, bytes);
            assert_memory_equal(first, f.data.out, bytes);
        }
        free(first);
        free_fixture(&f);
    }
}

/* Makes numbers of a row infinite or NaN: all of them, through scales and minima where the format
 * has them. */
static void damage_row(kvant_block_type type, uint8_t *row, uint32_t n, bool infinite)
{
    const kvant_block_format format = kvant_block_format_of(type);
    const float x = infinite ? INFINITY : NAN;
    const uint32_t bits = kvant_float_bits(x);
    const uint16_t half =
        type == KVANT_BLOCK_BF16 ? (uint16_t)(bits >> 16) : kvant_half_from_float(x);
    for (uint32_t b = 0; b < n / format.numbers; b++, row += format.bytes) {
        for (uint32_t i = 0; format.numbers == 16 && i < 16; i++)
            memcpy(row + i * format.bytes / 16,
                   type == KVANT_BLOCK_F32 ? (const void *)&bits : &half, format.bytes / 16);
        if (format.numbers == 32)
            memcpy(row, &half, 2);
        if (format.has_min)
            memcpy(row + 2, &half, 2);
    }
}

static void damage(const kvant_block_rows *rows, uint8_t *memory, uint32_t token, bool infinite)
{
    for (uint32_t h = 0; h < rows->n_kv_heads; h++)
        damage_row(rows->type, memory + token * rows->token_stride + h * rows->head_stride,
                   rows->head_dim, infinite);
}

/* Every second query token sees the damaged tokens; a single query token sees them if single_sees
 * is set. */
static bool sees_damage(uint32_t query, uint32_t n_queries, bool single_sees)
{
    return n_queries == 1 ? single_sees : query % 2 == 1;
}

/* Tokens whose rows are damaged: the first, the last and some within pages. */
static const uint32_t damaged[] = { 0, 3, 4, 63, 64, 128, UINT32_MAX };
#define N_DAMAGED (sizeof damaged / sizeof *damaged)

static void hide_damage(fixture *f, bool single_sees)
{
    const uint32_t n = f->s.n_tokens;
    for (uint32_t t = 0; t < f->s.n_queries; t++)
        for (size_t i = 0; i < N_DAMAGED; i++) {
            const uint32_t token = damaged[i] < n ? damaged[i] : n - 1;
            f->data.mask[(size_t)t * n + token] =
                sees_damage(t, f->s.n_queries, single_sees) ? 0 : 0xfc00;
        }
}

/* Outputs of query tokens that see no damaged token keep their bits. All other outputs are not
 * finite. */
static void check_damage(setup s, kvant_block_type type, uint32_t kind)
{
    const bool keys = kind & 1, infinite = kind & 2, single_sees = kind & 4;
    fixture f = make_fixture(s, type, type);
    const size_t token = (size_t)s.n_heads * s.v_dim, n = s.n_queries * token;
    float *before = malloc(n * sizeof *before);
    hide_damage(&f, single_sees);
    assert_int_equal(run(&f), KVANT_OK);
    memcpy(before, f.data.out, n * sizeof *before);
    for (size_t i = 0; i < N_DAMAGED; i++)
        damage(keys ? &f.k_rows : &f.v_rows, keys ? f.k : f.v,
               damaged[i] < s.n_tokens ? damaged[i] : s.n_tokens - 1, infinite);
    assert_int_equal(run(&f), KVANT_OK);
    for (uint32_t t = 0; t < s.n_queries; t++)
        for (size_t i = 0; i < token; i++) {
            const float got = f.data.out[t * token + i];
            const bool right = sees_damage(t, s.n_queries, single_sees)
                                   ? !isfinite(got)
                                   : memcmp(&got, &before[t * token + i], sizeof got) == 0;
            if (!right)
                fail_msg("type %d, %u query tokens, %s %s, token %u, number %zu: %g, before %g",
                         (int)type, s.n_queries, infinite ? "infinite" : "NaN",
                         keys ? "keys" : "values", t, i, (double)got,
                         (double)before[t * token + i]);
        }
    free(before);
    free_fixture(&f);
}

/* With a single query token, kind & 4 says whether it sees the damage, so 1 comes first. Two heads
 * share a kv head, so V is decoded into a tile for more than 4 query tokens. */
static const uint32_t query_counts[] = { 1, 2, 4, 5, 37 };
#define N_QUERY_COUNTS (sizeof query_counts / sizeof *query_counts)

/* A unified cache holds rows of many sequences. Hidden rows must not matter, whatever they hold. */
CASE(hidden_rows_have_no_influence)
{
    for (size_t level = 0; level < sizeof cpu_levels / sizeof *cpu_levels; level++)
        for (size_t t = 0; t < N_TYPES && use_level(cpu_levels[level]); t++)
            for (uint32_t kind = 0; kind < 8; kind++)
                for (size_t q = 0; q < (kind < 4 ? N_QUERY_COUNTS : 1); q++) {
                    const uint32_t n_tokens = query_counts[q] % 2 ? 200 : 1100;
                    check_damage((setup){ 64, 32, 2, 4, n_tokens, query_counts[q], .mask = true,
                                          .sinks = kind % 3 == 0 },
                                 types[t], kind);
                }
    kvant_set_cpu_level(KVANT_CPU_AUTO);
}

CASE(no_tokens_give_zeros)
{
    fixture f =
        make_fixture((setup){ 64, 64, 1, 2, 1, 1, .gap = 0 }, KVANT_BLOCK_Q8_0, KVANT_BLOCK_Q8_0);
    f.problem.n_tokens = 0;
    f.k_rows.data = f.v_rows.data = NULL;
    assert_int_equal(run(&f), KVANT_OK);
    for (int i = 0; i < 128; i++)
        assert_true(f.data.out[i] == 0);
    free_fixture(&f);
}

static void refuse(fixture *f)
{
    assert_int_equal(run(f), KVANT_ERR_ARGUMENT);
    assert_true(isnan(f->data.out[0])); /* nothing was written */
}

#define REFUSE(change)                                                                             \
    do {                                                                                           \
        const fixture kept = f;                                                                    \
        change;                                                                                    \
        refuse(&f);                                                                                \
        f = kept;                                                                                  \
    } while (0)

CASE(arguments_are_checked)
{
    fixture f =
        make_fixture((setup){ 64, 64, 3, 9, 70, 2, .gap = 0 }, KVANT_BLOCK_Q8_0, KVANT_BLOCK_Q4_0);
    int32_t table = 0;
    REFUSE(f.problem.size = 8);
    REFUSE(f.problem.q = NULL);
    REFUSE(f.problem.out = NULL);
    REFUSE(f.k_rows.data = NULL);
    REFUSE(f.problem.n_queries = 0);
    REFUSE(f.problem.n_threads = 0);
    REFUSE(f.problem.n_heads = 0);
    REFUSE(f.problem.n_heads = 10);
    REFUSE(f.k_rows.n_kv_heads = 0);
    REFUSE(f.k_rows.n_kv_heads = f.v_rows.n_kv_heads = 0);
    REFUSE(f.v_rows.n_kv_heads = 2);
    REFUSE(f.k_rows.size--);
    REFUSE(f.v_rows.size = 0);
    REFUSE(f.problem.first_block = 1);
    REFUSE(f.problem.block_table = &table);
    REFUSE(f.problem.causal = true; f.problem.n_tokens = 1);
    REFUSE(f.k_rows.type = (kvant_block_type)39);
    REFUSE(f.v_rows.head_dim = 48);
    REFUSE(f.k_rows.head_dim = 544);
    REFUSE(f.k_rows.bytes--);
    REFUSE(f.v_rows.bytes = 0);
    REFUSE(f.problem.n_tokens++);
    REFUSE(f.problem.n_tokens = UINT32_MAX);
    REFUSE(f.v_rows.token_stride = SIZE_MAX / 2);
    REFUSE(f.k_rows.head_stride = SIZE_MAX);
    REFUSE(f.problem.n_queries = UINT32_MAX; f.problem.n_heads = UINT32_MAX / 3 * 3);
    size_t bytes;
    assert_int_equal(kvant_block_attention_workspace(&f.k_rows, &f.v_rows, &f.problem, NULL),
                     KVANT_ERR_ARGUMENT);
    assert_ok(kvant_block_attention_workspace(&f.k_rows, &f.v_rows, &f.problem, &bytes));
    uint8_t *workspace = aligned(bytes + 64);
    assert_int_equal(kvant_block_attention(&f.k_rows, &f.v_rows, &f.problem, workspace, bytes - 64),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_block_attention(&f.k_rows, &f.v_rows, &f.problem, workspace + 32, bytes),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_block_attention(&f.k_rows, &f.v_rows, &f.problem, NULL, bytes),
                     KVANT_ERR_ARGUMENT);
    assert_ok(kvant_block_attention(&f.k_rows, &f.v_rows, &f.problem, workspace, bytes));
    free(workspace);
    free_fixture(&f);
}

RUN_CASES(NULL, NULL)
