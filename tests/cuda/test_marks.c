/* test_marks.c - refused rows: each appending kernel marks the tokens of refused rows and no
 * others. The output of query tokens that see a mark becomes NaN. */
#include "cuda_support.h"

#define HEADS 2u
#define MOST_ROWS 150u
#define BLOCKS 3u
#define NUMBERS 1024u
#define WORDS (1 + NUMBERS / 32)

typedef struct mark_case {
    const char *spec;
    uint32_t head_dim, n;
    bool open;
} mark_case;

/* Only in the second head, by i modulo 7. Large numbers fit fp16, and sealed pages take them. Exact
 * pages take them only if the codec stores no length. */
enum { WITH_NAN = 1, LARGE = 3, TOO_LARGE = 5 };

static bool is_bad(const mark_case *c, uint32_t i)
{
    return i % 7 == WITH_NAN || i % 7 == TOO_LARGE ||
           (i % 7 == LARGE && c->open && strncmp(c->spec, "int-", 4) != 0);
}

static void fill_rows(const mark_case *c, float *rows)
{
    for (uint32_t i = 0; i < c->n * HEADS * c->head_dim; i++)
        rows[i] = random_normal();
    for (uint32_t i = 0; i < c->n; i++)
        for (uint32_t j = 0; j < c->head_dim; j++) {
            float *x = rows + (i * HEADS + 1) * c->head_dim + j;
            if (i % 7 == TOO_LARGE || i % 7 == LARGE)
                *x = (j % 2 ? 1 : -1) * (i % 7 == LARGE ? 20000.0f : 1e6f);
            else if (i % 7 == WITH_NAN && j == 3)
                *x = i % 2 ? NAN : INFINITY;
        }
}

/* Slots are in no order. Exact pages have other slots than the marks. */
static void number(const mark_case *c, int64_t *slots, int64_t *numbers, uint32_t *want)
{
    memset(want, 0, WORDS * sizeof *want);
    for (uint32_t i = 0; i < c->n; i++) {
        slots[i] = i * 11 % MOST_ROWS + 3;
        numbers[i] = c->open ? 400 + (int64_t)i * 3 : slots[i];
        if (!is_bad(c, i))
            continue;
        want[0] = 1;
        want[1 + numbers[i] / 32] |= 1u << numbers[i] % 32;
    }
}

static void check_marks(const mark_case *c)
{
    static float rows[MOST_ROWS * HEADS * 256];
    int64_t slots[MOST_ROWS], numbers[MOST_ROWS];
    uint32_t want[WORDS], got[WORDS];
    test_cache cache;
    test_open_pool open;
    cache_open(&cache, c->spec, c->spec, c->head_dim, HEADS, BLOCKS, 0);
    open_pool_new(&open, &cache);
    fill_rows(c, rows);
    number(c, slots, numbers, want);
    uint32_t *marks = device_new(sizeof want, 0);
    void *gpu_rows = device_copy(rows, c->n * HEADS * c->head_dim * sizeof *rows);
    void *gpu_slots = device_copy(slots, sizeof slots),
         *gpu_numbers = device_copy(numbers, sizeof numbers);
    const kvant_cuda_rows of = { c->open ? open.gpu_codec[KVANT_ROLE_V] : cache.gpu_v,
                                 c->open ? open_pages(&open, KVANT_ROLE_V)
                                         : cache_pages(&cache, KVANT_ROLE_V),
                                 gpu_rows,
                                 HEADS * c->head_dim,
                                 c->head_dim,
                                 NULL,
                                 NULL,
                                 NULL };
    const kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                                 .v = of,
                                                 .type = KVANT_CUDA_F32,
                                                 .n_tokens = c->n,
                                                 .n_kv_heads = HEADS,
                                                 .slots = gpu_slots,
                                                 .marks = marks,
                                                 .mark_ids = c->open ? gpu_numbers : NULL };
    assert_int_equal(kvant_cuda_kernel_append(&args, NULL), KVANT_OK);
    device_read(got, marks, sizeof got);
    if (memcmp(got, want, sizeof got) != 0)
        print_message("%s of %u, %u rows%s\n", c->spec, (unsigned)c->head_dim, (unsigned)c->n,
                      c->open ? ", open" : "");
    assert_memory_equal(got, want, sizeof got);
    cudaFree(marks);
    cudaFree(gpu_rows);
    cudaFree(gpu_slots);
    cudaFree(gpu_numbers);
    open_pool_free(&open);
    cache_close(&cache);
}

/* A codec for each kernel: few and many rows, uniform codes, codebooks, wide codebooks, chunks,
 * trellises, known and unknown head_dims. */
CASE(refused_rows_get_marks)
{
    static const char *const specs[] = { "int-4",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-6:rotate=hadamard",
#if KVANT_PAPERS
                                         "octopus-4:rotate=hadamard",
                                         "hqmq-s96r4",
#endif
                                         "trellis-4:rotate=hadamard" };
    static const uint32_t dims[] = { 64, 128, 80 }, counts[] = { 6, 40, MOST_ROWS };
    for (size_t i = 0; i < sizeof specs / sizeof *specs * 3 * 3 * 2; i++)
        check_marks(&(mark_case){ specs[i / 18], dims[i / 6 % 3], counts[i / 2 % 3], i % 2 != 0 });
}

/* ---- outputs ---- */

#define BATCH 2u
#define TOKENS 96u /* tokens of a sequence */
#define STRIDE 128u
#define DIM 80u

typedef struct fill_case {
    uint32_t query_tokens;
    bool causal, masked;
    kvant_cuda_type type;
} fill_case;

static const int32_t lengths[BATCH] = { 90, 33 };
static const int32_t marked[] = { 5 + 70, 5 + 89, 5 + (int)STRIDE + 30,
                                  5 + (int)STRIDE + 50 }; /* the last slot is beyond its sequence */

static uint32_t is_hidden(uint32_t row, uint32_t token)
{
    return (row + token) % 3 == 0;
}

static bool sees_mark(const fill_case *c, uint32_t b, uint32_t query)
{
    const int32_t seen =
        c->causal ? lengths[b] - (int32_t)c->query_tokens + (int32_t)query + 1 : lengths[b];
    bool any = false;
    for (size_t i = 0; i < sizeof marked / sizeof *marked; i++) {
        const int32_t token = marked[i] - 5 - (int32_t)(b * STRIDE);
        any = any || (token >= 0 && token < seen &&
                      !(c->masked && is_hidden(b * c->query_tokens + query, (uint32_t)token)));
    }
    return any;
}

static void check_fill(const fill_case *c, bool any)
{
    enum { MOST = BATCH * 30 * HEADS * DIM };
    static float out[MOST];
    static uint16_t mask[BATCH * 30 * TOKENS];
    uint32_t words[WORDS] = { any };
    const size_t n = BATCH * c->query_tokens * HEADS * DIM;
    size_t bytes;
    for (size_t i = 0; i < n; i++)
        out[i] = (float)(i % 61);
    for (size_t i = 0; i < sizeof mask / sizeof *mask; i++)
        mask[i] = is_hidden((uint32_t)(i / TOKENS), (uint32_t)(i % TOKENS)) ? 0xfc00 : 0;
    for (size_t i = 0; any && i < sizeof marked / sizeof *marked; i++)
        words[1 + marked[i] / 32] |= 1u << marked[i] % 32;
    void *typed = to_type(out, n, c->type, &bytes), *gpu_out = device_copy(typed, bytes);
    void *gpu_mask = device_copy(mask, sizeof mask), *gpu_words = device_copy(words, sizeof words);
    void *gpu_lengths = device_copy(lengths, sizeof lengths);
    int64_t numbers[2][BATCH * 30];
    uint32_t spread[2][WORDS] = { { 0 } }, want[2][WORDS] = { { 0 } };
    for (uint32_t i = 0; i < 2 * BATCH * 30; i++)
        numbers[i % 2][i / 2] = i * 7 % NUMBERS;
    void *gpu_numbers = device_copy(numbers, sizeof numbers),
         *gpu_spread = device_copy(spread, sizeof spread);
    const int64_t *numbers_at = gpu_numbers;
    uint32_t *spread_at = gpu_spread;
    const kvant_cuda_marked_args args = {
        .size = sizeof args,
        .marks = gpu_words,
        .first = 5,
        .stride = STRIDE,
        .lengths = gpu_lengths,
        .batch = BATCH,
        .query_tokens = c->query_tokens,
        .n_heads = HEADS,
        .head_dim = DIM,
        .causal = c->causal,
        .type = c->type,
        .mask = c->masked ? gpu_mask : NULL,
        .mask_token_stride = TOKENS,
        .out = gpu_out,
        .out_batch_stride = c->query_tokens * HEADS * DIM,
        .out_token_stride = HEADS * DIM,
        .out_head_stride = DIM,
        .n_spread = 2,
        .spread = { { spread_at, numbers_at }, { spread_at + WORDS, numbers_at + BATCH * 30 } }
    };
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_OK);
    device_read(typed, gpu_out, bytes);
    device_read(spread, gpu_spread, sizeof spread);
    for (uint32_t i = 0; any && i < 2 * BATCH * c->query_tokens; i++) {
        const uint32_t row = i / 2;
        if (!sees_mark(c, row / c->query_tokens, row % c->query_tokens))
            continue;
        want[i % 2][0] = 1;
        want[i % 2][1 + numbers[i % 2][row] / 32] |= 1u << numbers[i % 2][row] % 32;
    }
    assert_memory_equal(spread, want, sizeof spread);
    for (size_t i = 0; i < n; i++) {
        const size_t row = i / (HEADS * DIM);
        if (any &&
            sees_mark(c, (uint32_t)(row / c->query_tokens), (uint32_t)(row % c->query_tokens)))
            assert_true(isnan(from_type(typed, i, c->type)));
        else
            assert_true(from_type(typed, i, c->type) == (float)(i % 61));
    }
    free(typed);
    cudaFree(gpu_numbers);
    cudaFree(gpu_spread);
    cudaFree(gpu_out);
    cudaFree(gpu_mask);
    cudaFree(gpu_words);
    cudaFree(gpu_lengths);
}

CASE(whoever_sees_a_mark_gets_nan)
{
    for (uint32_t i = 0; i < 3 * 2 * 2 * 2; i++) {
        const fill_case c = { i & 1 ? 30 : 1, i & 2, i & 4, (kvant_cuda_type)(i / 8) };
        check_fill(&c, true);
        check_fill(&c, false);
    }
}

CASE(wrong_arguments_are_refused)
{
    void *memory = device_new(4096, 0);
    const kvant_cuda_marked_args good = { .size = sizeof good,
                                          .marks = memory,
                                          .lengths = memory,
                                          .batch = 1,
                                          .query_tokens = 1,
                                          .n_heads = 1,
                                          .head_dim = 64,
                                          .out = memory };
    kvant_cuda_marked_args args = good;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_OK);
    args.marks = NULL;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.lengths = NULL;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.query_tokens = 0;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.out = NULL;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.n_spread = KVANT_CUDA_MOST_SPREAD + 1;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    args = good, args.size = 8;
    assert_int_equal(kvant_cuda_fill_marked(&args, NULL), KVANT_ERR_ARGUMENT);
    cudaFree(memory);
}

RUN_CASES_ON_GPU(NULL, NULL)
