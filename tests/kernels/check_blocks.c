/* check_blocks.c - attention on rows of ggml's block formats: scores, weighted sums and tiles
 * against double precision on the numbers that kvant_block_decode returns, which
 * tests/unit/test_block_attention.c checks. */
#include "check.h"

static const kvant_block_type types[] = { KVANT_BLOCK_F32,  KVANT_BLOCK_F16,  KVANT_BLOCK_BF16,
                                          KVANT_BLOCK_Q4_0, KVANT_BLOCK_Q4_1, KVANT_BLOCK_Q5_0,
                                          KVANT_BLOCK_Q5_1, KVANT_BLOCK_Q8_0, KVANT_BLOCK_IQ4_NL };
static const char *const type_names[] = { "f32",  "f16",  "bf16", "q4_0",  "q4_1",
                                          "q5_0", "q5_1", "q8_0", "iq4_nl" };
static const uint32_t dims[] = { 16, 32, 48, 64, 80, 96, 128, 256, 512 };
static const uint32_t token_counts[] = { 1, 2, 3, 4, 5, 15, 16, 17, 33, 63, 64 };

#define MAX_QUERIES 9u

typedef struct blocks {
    kvant_block_page page;
    uint8_t *rows; /* rows of the page */
    float x[KVANT_PAGE_TOKENS][KVANT_BLOCK_MAX_HEAD_DIM];
} blocks;

static void put_half(checker *check, uint8_t *p, bool not_a_number)
{
    uint16_t half = kvant_half_from_float(check_below(check, 8) ? check_normal(check) : 1e-6f);
    if (not_a_number)
        half = 0x7e00;
    memcpy(p, &half, sizeof half);
}

/* Random codes with finite scales, or floats. A kernel must not include a row of NaNs in its
 * sums. */
static void fill_row(checker *check, kvant_block_type type, uint8_t *row, uint32_t n,
                     bool not_a_number)
{
    kvant_block_format format = kvant_block_format_of(type);
    check_bytes(check, row, kvant_block_row_bytes(type, n), -1);
    for (uint32_t i = 0; i < n / format.numbers; i++, row += format.bytes) {
        if (format.numbers == 32) {
            put_half(check, row, not_a_number);
            if (format.has_min)
                put_half(check, row + 2, not_a_number);
            continue;
        }
        for (uint32_t j = 0; j < format.numbers; j++) {
            float x = not_a_number ? NAN : check_normal(check);
            uint32_t bits = kvant_float_bits(x);
            uint16_t half =
                type == KVANT_BLOCK_F16 ? kvant_half_from_float(x) : (uint16_t)(bits >> 16);
            if (type == KVANT_BLOCK_F32)
                memcpy(row + 4 * j, &bits, sizeof bits);
            else
                memcpy(row + 2 * j, &half, sizeof half);
        }
    }
}

/* The input ends where its last row ends, so a read beyond a row faults. */
static bool make_blocks(checker *check, blocks *b, size_t type, uint32_t dim, uint32_t n_tokens,
                        bool with_nans)
{
    size_t row = kvant_block_row_bytes(types[type], dim), stride = row + (n_tokens % 2 ? 0 : 3);
    if (!row)
        return false;
    check_case(check, "%s, head_dim %u, %u tokens", type_names[type], dim, n_tokens);
    b->rows = check_input(check, "rows", (n_tokens - 1) * stride + row, 1);
    b->page = (kvant_block_page){ .type = types[type],
                                  .n_tokens = n_tokens,
                                  .head_dim = dim,
                                  .rows = b->rows,
                                  .stride = stride };
    for (uint32_t t = 0; t < n_tokens; t++) {
        fill_row(check, types[type], b->rows + t * stride, dim, with_nans && t % 5 == 3);
        kvant_block_decode(types[type], b->rows + t * stride, dim, b->x[t]);
    }
    return true;
}

static void check_scores_of(checker *check, const kvant_kernels *kernels, blocks *b, uint32_t n)
{
    uint32_t dim = b->page.head_dim;
    float *q = check_input(check, "q", n * dim * sizeof *q, 64);
    float *scores = check_output(check, "scores", n * KVANT_PAGE_TOKENS * sizeof *scores, 64);
    check_floats(check, q, n * dim, CHECK_NORMAL);
    CHECK_CALL(check, kernels->block_scores(&b->page, q, dim, scores, n));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t t = 0; t < b->page.n_tokens; t++) {
            double want = 0, magnitude = 0;
            for (uint32_t c = 0; c < dim; c++) {
                want += (double)q[i * dim + c] * b->x[t][c];
                magnitude += fabs((double)q[i * dim + c] * b->x[t][c]);
            }
            /* from kernels.h; (1 + 2^-23)^512 is below 1 + 2^-13 */
            double bound = dim * (1 + 0x1p-13) * check_rounding(magnitude);
            check_near(check, "scores", i * KVANT_PAGE_TOKENS + t,
                       scores[i * KVANT_PAGE_TOKENS + t], want, bound);
        }
}

CHECK(block_scores)
{
    static blocks b;
    uint32_t n = 0;
    for (size_t type = 0; type < COUNT(types); type++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t t = 0; t < COUNT(token_counts); t++)
                if (make_blocks(check, &b, type, dims[d], token_counts[t], false))
                    check_scores_of(check, kernels, &b, 1 + n++ % MAX_QUERIES);
}

/* block_sums finds the bits that matmul finds on decoded rows. `c` holds the sums of before. */
static void check_against_matmul(checker *check, const kvant_kernels *kernels, const blocks *b,
                                 const float *w, const float *sums, float *c, uint32_t n)
{
    static _Alignas(64) float tile[KVANT_PAGE_TOKENS * KVANT_BLOCK_MAX_HEAD_DIM];
    const uint32_t dim = b->page.head_dim;
    memset(tile, 0, sizeof tile);
    for (uint32_t t = 0; t < b->page.n_tokens; t++)
        if (t % 5 != 3)
            memcpy(tile + t * dim, b->x[t], dim * sizeof *tile);
    kernels->matmul(w, KVANT_PAGE_TOKENS, tile, dim, c, dim, n, KVANT_PAGE_TOKENS, dim);
    check_same(check, "sums", sums, c, n * dim, sizeof *sums);
}

static void check_sums_of(checker *check, const kvant_kernels *kernels, blocks *b, uint32_t n)
{
    uint32_t dim = b->page.head_dim, tokens = b->page.n_tokens;
    float *w = check_input(check, "w", n * KVANT_PAGE_TOKENS * sizeof *w, 64);
    _Alignas(64) float before[MAX_QUERIES * KVANT_BLOCK_MAX_HEAD_DIM];
    float *sums = check_output(check, "sums", n * dim * sizeof *sums, 64);
    for (uint32_t i = 0; i < n * KVANT_PAGE_TOKENS; i++)
        w[i] =
            i % KVANT_PAGE_TOKENS % 5 == 3 || check_below(check, 4) == 0 ? 0 : check_uniform(check);
    check_floats(check, sums, n * dim, CHECK_NORMAL);
    memcpy(before, sums, n * dim * sizeof *sums);
    CHECK_CALL(check, kernels->block_sums(&b->page, w, sums, dim, n));
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t ch = 0; ch < dim; ch++) {
            double want = before[i * dim + ch], magnitude = fabs(want);
            for (uint32_t t = 0; t < tokens; t++) {
                double product =
                    t % 5 == 3 ? 0 : (double)w[i * KVANT_PAGE_TOKENS + t] * b->x[t][ch];
                want += product;
                magnitude += fabs(product);
            }
            double bound = (tokens + 1) * (1 + 0x1p-13) * check_rounding(magnitude);
            check_near(check, "sums", i * dim + ch, sums[i * dim + ch], want, bound);
        }
    check_against_matmul(check, kernels, b, w, sums, before, n);
}

CHECK(block_sums)
{
    static blocks b;
    uint32_t n = 0;
    for (size_t type = 0; type < COUNT(types); type++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t t = 0; t < COUNT(token_counts); t++)
                if (make_blocks(check, &b, type, dims[d], token_counts[t], true))
                    check_sums_of(check, kernels, &b, 1 + n++ % MAX_QUERIES);
}

static void check_tile(checker *check, kvant_block_rows_tile_fn *kernel, bool columns)
{
    static blocks b;
    static float want[KVANT_PAGE_TOKENS * KVANT_BLOCK_MAX_HEAD_DIM];
    for (size_t type = 0; type < COUNT(types); type++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t t = 0; t < COUNT(token_counts); t++) {
                uint32_t dim = dims[d], n = token_counts[t];
                if (!make_blocks(check, &b, type, dim, n, false))
                    continue;
                float *tile =
                    check_output(check, "tile", KVANT_PAGE_TOKENS * dim * sizeof *tile, 64);
                for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i++)
                    for (uint32_t ch = 0; ch < dim; ch++)
                        want[columns ? ch * KVANT_PAGE_TOKENS + i : i * dim + ch] =
                            i < n ? b.x[i][ch] : 0;
                CHECK_CALL(check, kernel(&b.page, tile));
                check_same(check, "tile", tile, want, KVANT_PAGE_TOKENS * dim, sizeof *tile);
            }
}

CHECK(block_rows_tile)
{
    check_tile(check, kernels->block_rows_tile, false);
}

CHECK(block_columns_tile)
{
    check_tile(check, kernels->block_columns_tile, true);
}

/* head_dim 64 and 3 query heads per kv head, as in the models that the project measures. */
BENCH(block_scores)
{
    static blocks b;
    for (size_t type = 0; type < COUNT(types); type++) {
        make_blocks(check, &b, type, 64, 64, false);
        float *q = check_input(check, "q", 3 * 64 * sizeof *q, 64);
        float *scores = check_output(check, "scores", 3 * 64 * sizeof *scores, 64);
        check_floats(check, q, 3 * 64, CHECK_NORMAL);
        CHECK_BENCH(check, kernels->block_scores(&b.page, q, 64, scores, 3), "%s, 64, 3 rows",
                    type_names[type]);
    }
}

BENCH(block_sums)
{
    static blocks b;
    for (size_t type = 0; type < COUNT(types); type++) {
        make_blocks(check, &b, type, 64, 64, false);
        float *w = check_input(check, "w", 3 * 64 * sizeof *w, 64);
        float *sums = check_output(check, "sums", 3 * 64 * sizeof *sums, 64);
        for (uint32_t i = 0; i < 3 * 64; i++)
            w[i] = check_uniform(check);
        check_floats(check, sums, 3 * 64, CHECK_ZEROS);
        CHECK_BENCH(check, kernels->block_sums(&b.page, w, sums, 64, 3), "%s, 64, 3 rows",
                    type_names[type]);
    }
}

static void bench_tile(checker *check, kvant_block_rows_tile_fn *kernel)
{
    static blocks b;
    for (size_t type = 0; type < COUNT(types); type++) {
        make_blocks(check, &b, type, 64, 64, false);
        float *tile = check_output(check, "tile", 64 * 64 * sizeof *tile, 64);
        CHECK_BENCH(check, kernel(&b.page, tile), "%s, 64", type_names[type]);
    }
}

BENCH(block_rows_tile)
{
    bench_tile(check, kernels->block_rows_tile);
}

BENCH(block_columns_tile)
{
    bench_tile(check, kernels->block_columns_tile);
}
