/* test_encode.c - the steps from rows to page bytes (src/codec/encode.h): check, transform,
 * encode. */
#include "testing.h"

#include "../../src/base/half.h"
#include "open_codec.h"

#define ROWS KVANT_PAGE_TOKENS

typedef struct subject {
    const kvant_kernels *kernels;
    kvant_codec *codec;
    uint32_t d;
    float *rows, *y;
    float center[KVANT_MAX_HEAD_DIM], scale[KVANT_MAX_HEAD_DIM];
    void *page, *other;
    size_t page_bytes;
} subject;

static bool exists(const char *spec, uint32_t d, kvant_role role)
{
    kvant_codec *codec;
    kvant_status status = kvant_codec_create(spec, d, role, TEST_SEED, &codec, NULL, 0);
    kvant_codec_free(&codec);
    return status == KVANT_OK;
}

static subject make_subject(const char *spec, uint32_t d, kvant_role role)
{
    subject s = { .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                  .codec = make_codec(spec, d, role),
                  .d = d };
    uint64_t state = d + 1;
    s.page_bytes = info_of(s.codec).page_bytes;
    s.page = aligned(s.page_bytes);
    s.other = aligned(s.page_bytes);
    s.rows = aligned((size_t)ROWS * d * sizeof *s.rows);
    s.y = aligned((size_t)ROWS * d * sizeof *s.y);
    fill_normal(s.rows, (size_t)ROWS * d, &state);
    for (uint32_t j = 0; j < d; j++) {
        s.center[j] = 3 * test_normal(&state);
        s.scale[j] = (float)(0.01 + test_uniform(&state));
    }
    return s;
}

static void free_subject(subject *s)
{
    kvant_codec_free(&s->codec);
    free(s->rows);
    free(s->y);
    free(s->page);
    free(s->other);
}

static void for_each_codec(void (*check)(subject *))
{
    static const uint32_t dims[] = { 20, 64, 128 };
    for (size_t i = 0; i < COUNT(all_specs); i++)
        for (size_t k = 0; k < COUNT(dims); k++)
            for (int role = 0; role < 2; role++) {
                if (!exists(all_specs[i], dims[k], (kvant_role)role))
                    continue;
                subject s = make_subject(all_specs[i], dims[k], (kvant_role)role);
                check(&s);
                free_subject(&s);
            }
}

/* Encoding all rows at once, block after block, and by the public function gives the same bytes. */
static void encode_all_ways(subject *s)
{
    kvant_affine affine = { s->center, s->scale };
    uint32_t block = info_of(s->codec).block_tokens;
    assert_ok(kvant_codec_check_rows(s->codec, &s->codec->transform, s->kernels, &affine, s->rows,
                                     s->d, ROWS, false));
    kvant_codec_transform_rows(&s->codec->transform, s->kernels, &affine, s->rows, s->d, ROWS,
                               s->y);
    kvant_codec_encode_transformed(s->codec, s->kernels, s->y, 0, ROWS, s->page);
    assert_ok(kvant_codec_encode(s->codec, &affine, s->rows, s->d, 0, ROWS, s->other));
    assert_memory_equal(s->page, s->other, s->page_bytes);
    memset(s->page, 0, s->page_bytes);
    for (uint32_t first = ROWS; first > 0; first -= block) {
        uint32_t at = first - block;
        kvant_codec_encode_transformed(s->codec, s->kernels, s->y + (size_t)at * s->d, at, block,
                                       s->page);
    }
    assert_memory_equal(s->page, s->other, s->page_bytes);
}

CASE(batches_and_blocks_give_the_same_bytes)
{
    for_each_codec(encode_all_ways);
}

static bool finite_row(const float *y, uint32_t d)
{
    for (uint32_t j = 0; j < d; j++)
        if (!isfinite(y[j]))
            return false;
    return true;
}

/* Rounds y to fp16 by the conversion with the standard's rounding, one number at a time. */
static void round_to_half(float *y, uint32_t d)
{
    for (uint32_t j = 0; j < d; j++)
        y[j] = kvant_half_to_float(kvant_half_from_float(y[j]));
}

/* One row of every size up to the largest number. The quick check must agree with a check of the
 * transformed row. */
static void compare_checks(subject *s, const kvant_affine *affine)
{
    for (float size = 0x1p-130f; size < 0x1p126f; size *= size > 1 && size < 0x1p20f ? 1.3f : 256) {
        float x[KVANT_MAX_HEAD_DIM], half[KVANT_MAX_HEAD_DIM];
        for (uint32_t j = 0; j < s->d; j++)
            x[j] = s->rows[j] * size;
        kvant_codec_transform_rows(&s->codec->transform, s->kernels, affine, x, s->d, 1, s->y);
        memcpy(half, s->y, s->d * sizeof *half);
        round_to_half(half, s->d);
        kvant_status exact = finite_row(s->y, s->d)
                                 ? s->codec->quantizer->check(s->codec, s->kernels, s->y)
                                 : KVANT_ERR_RANGE;
        kvant_status open = finite_row(half, s->d)
                                ? s->codec->quantizer->check(s->codec, s->kernels, half)
                                : KVANT_ERR_RANGE;
        assert_int_equal(kvant_codec_check_rows(s->codec, &s->codec->transform, s->kernels, affine,
                                                x, s->d, 1, false),
                         exact);
        kvant_status status = kvant_codec_check_rows(s->codec, &s->codec->transform, s->kernels,
                                                     affine, x, s->d, 1, true);
        float largest = 0;
        for (uint32_t j = 0; j < s->d; j++)
            largest = fmaxf(largest, isfinite(s->y[j]) ? fabsf(s->y[j]) : INFINITY);
        assert_int_equal(status,
                         largest <= kvant_codec_exact_limit(s->codec) ? KVANT_OK : KVANT_ERR_RANGE);
        if (open != KVANT_OK)
            assert_int_equal(status, open);
        if (status == KVANT_OK)
            assert_int_equal(seal_rows(s->codec, half, 0, 1, s->page), KVANT_OK);
    }
}

static void compare_checks_with_and_without_affine(subject *s)
{
    kvant_affine centred = { s->center, NULL }, both = { s->center, s->scale },
                 tiny = { NULL, s->scale };
    if (info_of(s->codec).block_tokens > 1)
        return; /* an exact page checks a row in the same way, and sealing needs whole blocks */
    compare_checks(s, NULL);
    compare_checks(s, &centred);
    compare_checks(s, &both);
    for (uint32_t j = 0; j < s->d; j++)
        s->scale[j] *= 0x1p-20f;
    compare_checks(s, &tiny);
}

CASE(checks_agree_with_the_transformed_row)
{
    for_each_codec(compare_checks_with_and_without_affine);
}

static void refuse_bad_rows(subject *s)
{
    static const float bad[] = { INFINITY, -INFINITY, NAN };
    kvant_affine affine = { s->center, s->scale };
    for (size_t i = 0; i < COUNT(bad); i++)
        for (size_t at = 0; at < (size_t)3 * s->d; at += s->d + 5) {
            float kept = s->rows[at];
            s->rows[at] = bad[i];
            assert_int_equal(kvant_codec_check_rows(s->codec, &s->codec->transform, s->kernels,
                                                    &affine, s->rows, s->d, 3, false),
                             KVANT_ERR_NONFINITE);
            assert_int_equal(kvant_codec_check_rows(s->codec, &s->codec->transform, s->kernels,
                                                    NULL, s->rows, s->d, 3, true),
                             KVANT_ERR_NONFINITE);
            s->rows[at] = kept;
        }
}

CASE(rows_that_are_no_numbers_are_refused)
{
    for_each_codec(refuse_bad_rows);
}

/* Exact pages hold fp16 of y. Their tiles have the channel order of sealed tiles. */
static void read_open_page(subject *s)
{
    uint32_t padded = s->codec->layout.padded_dim;
    void *page = aligned((size_t)KVANT_PAGE_TOKENS * s->d * sizeof(uint16_t));
    float *tile = aligned((size_t)padded * KVANT_PAGE_TOKENS * sizeof *tile),
          *back = aligned(ROWS * s->d * 4u);
    kvant_codec_transform_rows(&s->codec->transform, s->kernels, NULL, s->rows, s->d, ROWS, s->y);
    kvant_codec_encode_open(s->codec, s->kernels, s->y, 0, 7, page);
    kvant_codec_encode_open(s->codec, s->kernels, s->y + (size_t)7 * s->d, 7, ROWS - 7, page);
    kvant_codec_decode_open(s->codec, s->kernels, page, 0, ROWS, back);
    round_to_half(s->y, ROWS * s->d);
    assert_memory_equal(back, s->y, (size_t)ROWS * s->d * sizeof *back);
    kvant_codec_unpack_open(s->codec, s->kernels, page, tile);
    for (uint32_t t = 0; t < ROWS; t++)
        for (uint32_t j = 0; j < s->d; j++) {
            uint32_t at = s->codec->info.role == KVANT_ROLE_K
                              ? j * KVANT_PAGE_TOKENS + kvant_token_position(t)
                              : kvant_token_position(t) * padded +
                                    kvant_layout_row_position(&s->codec->layout, j);
            assert_true(tile[at] == s->y[(size_t)t * s->d + j]);
        }
    free(page);
    free(tile);
    free(back);
}

CASE(open_pages_hold_transformed_rows)
{
    for_each_codec(read_open_page);
}

RUN_CASES(NULL, NULL)
