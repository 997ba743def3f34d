/* test_order.c - order=: a codec with an order, on stored rows, is the codec without the order on
 * rows whose channels the test has put into that order. Everything is equal to the bit: products
 * with a permutation have one term that is not zero. */
#include "testing.h"

#include <kvant/cuda.h>

enum { TOKENS = KVANT_PAGE_TOKENS, N_ORDERS = 3 };

static const char *const names[N_ORDERS] = { "halves", "pairs", "dealt" };

static const char *const codecs[] = {
    "int-4:group=16",
#if KVANT_PAPERS
    "hqmq-s96r4",     "innerq-base:norm=none", "naive-4", "spherical-r4jl4", "addvq-k24r3",
#endif
};

/* Computes the stored channels of an order from the definition of the order. */
static void stored_channels(int order, uint32_t d, uint32_t *from)
{
    const uint32_t quarter = d / 4, second = d - d / 2; /* where the second half begins */
    for (uint32_t i = 0; i < d; i++)
        from[i] = i;
    for (uint32_t i = 0; order == 0 && i < d; i++)
        from[i % 2 ? second + i / 2 : i / 2] = i;
    for (uint32_t i = 0; order == 1 && i < d; i++)
        from[i] = i % 2 ? second + i / 2 : i / 2;
    for (uint32_t i = 0; order == 2 && i < quarter; i++) {
        from[4 * i] = i;
        from[4 * i + 1] = 2 * quarter - 1 - i;
        from[4 * i + 2] = 3 * quarter - 1 - i;
        from[4 * i + 3] = 3 * quarter + i;
    }
}

static void put_in_order(const uint32_t *from, uint32_t d, size_t n, const float *x, float *out)
{
    for (size_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < d; i++)
            out[t * d + i] = x[t * d + from[i]];
}

/* Rows, a centre, a scale and a query, in the stored order and in the order that the codec
 * names. */
typedef struct numbers {
    float rows[TOKENS * KVANT_MAX_HEAD_DIM], center[KVANT_MAX_HEAD_DIM], scale[KVANT_MAX_HEAD_DIM],
        query[KVANT_MAX_HEAD_DIM];
} numbers;

static void make_numbers(const uint32_t *from, uint32_t d, numbers *stored, numbers *ordered)
{
    uint64_t state = d + 1;
    fill_normal(stored->rows, (size_t)TOKENS * d, &state);
    fill_normal(stored->center, d, &state);
    fill_normal(stored->query, d, &state);
    for (uint32_t i = 0; i < d; i++)
        stored->scale[i] = (float)(0.5 + test_uniform(&state));
    put_in_order(from, d, TOKENS, stored->rows, ordered->rows);
    put_in_order(from, d, 1, stored->center, ordered->center);
    put_in_order(from, d, 1, stored->scale, ordered->scale);
    put_in_order(from, d, 1, stored->query, ordered->query);
}

/* The page, the rows and the scores that a codec makes from the numbers. */
typedef struct outcome {
    uint8_t *page;
    size_t bytes;
    float decoded[TOKENS * KVANT_MAX_HEAD_DIM], scores[TOKENS];
} outcome;

static void use(const char *spec, uint32_t d, const numbers *x, outcome *out)
{
    const kvant_affine affine = { x->center, x->scale };
    float query[KVANT_MAX_HEAD_DIM];
    kvant_codec *codec = make_codec(spec, d, KVANT_ROLE_K);
    uint8_t *page;
    out->bytes = info_of(codec).page_bytes;
    page = out->page = aligned(out->bytes);
    assert_int_equal(kvant_codec_encode(codec, &affine, x->rows, d, 0, TOKENS, page), KVANT_OK);
    assert_ok(kvant_codec_decode(codec, &affine, page, 0, TOKENS, out->decoded, d));
    assert_int_equal(kvant_codec_transform_query(codec, &affine, x->query, query), KVANT_OK);
    assert_int_equal(kvant_codec_score(codec, page, query, d, 1, out->scores), KVANT_OK);
    kvant_codec_free(&codec);
}

static void compare(const char *spec, int order, uint32_t d)
{
    static numbers stored, ordered;
    static outcome with, without;
    static float expected[TOKENS * KVANT_MAX_HEAD_DIM];
    uint32_t from[KVANT_MAX_HEAD_DIM];
    char named[96];
    snprintf(named, sizeof named, "%s%corder=%s", spec, strchr(spec, ':') ? ',' : ':',
             names[order]);
    stored_channels(order, d, from);
    make_numbers(from, d, &stored, &ordered);
    use(named, d, &stored, &with);
    use(spec, d, &ordered, &without);
    put_in_order(from, d, TOKENS, with.decoded, expected);
    assert_int_equal(with.bytes, without.bytes);
    if (memcmp(with.page, without.page, with.bytes) != 0)
        fail_msg("%s at head_dim %u: other bytes than %s of ordered rows", named, (unsigned)d,
                 spec);
    for (size_t i = 0; i < (size_t)TOKENS * d; i++)
        if (expected[i] != without.decoded[i])
            fail_msg("%s at head_dim %u: decodes to other numbers", named, (unsigned)d);
    assert_memory_equal(with.scores, without.scores, sizeof with.scores);
    free(with.page);
    free(without.page);
}

CASE(an_order_is_a_permutation_of_rows_and_queries)
{
    static const uint32_t dims[] = { 4, 8, 62, 64, 80, 96, 128, 256, 512 };
    for (size_t s = 0; s < COUNT(codecs); s++)
        for (size_t k = 0; k < COUNT(dims); k++)
            for (int order = 0; order < N_ORDERS; order++)
                compare(codecs[s], order, dims[k]);
    for (uint32_t d = 1; d < 20; d++) /* also odd ones */
        for (int order = 0; order < N_ORDERS; order++)
            compare("int-4:group=8", order, d);
}

/* Pairs of channels that RoPE rotates lie side by side or half a row apart. */
CASE(dealt_chunks_have_no_pair_and_equal_sums)
{
    for (uint32_t d = 8; d <= KVANT_MAX_HEAD_DIM; d += 8) {
        uint32_t from[KVANT_MAX_HEAD_DIM];
        stored_channels(2, d, from);
        for (uint32_t c = 0; c < d; c += 4) {
            assert_int_equal(from[c] + from[c + 1] + from[c + 2] + from[c + 3], 2 * (d - 1));
            for (uint32_t i = c; i < c + 4; i++)
                for (uint32_t j = c; j < i; j++) {
                    assert_int_not_equal(from[i] / 2, from[j] / 2);
                    assert_int_not_equal(from[i] % (d / 2), from[j] % (d / 2));
                }
        }
    }
}

static void expect_spec(const char *spec, kvant_role role, const char *canonical)
{
    kvant_codec *codec = make_codec(spec, 64, role);
    kvant_codec *plain = make_codec("int-4:group=16", 64, role);
    const bool same = strcmp(info_of(plain).spec, canonical) == 0;
    assert_string_equal(info_of(codec).spec, canonical);
    assert_true((info_of(codec).fingerprint == info_of(plain).fingerprint) == same);
    kvant_codec_free(&codec);
    kvant_codec_free(&plain);
}

/* The specs of older blocks name no order: they stay the specs of the stored order. */
CASE(the_order_of_keys_is_part_of_their_spec)
{
    static const char plain[] = "int-4:group=16,asym,axis=token,rotate=none",
                      pairs[] = "int-4:group=16,asym,axis=token,rotate=none,order=pairs";
    expect_spec("int-4:group=16,order=pairs", KVANT_ROLE_K, pairs);
    expect_spec("int-4:group=16,order=stored", KVANT_ROLE_K, plain);
    expect_spec("int-4:group=16,order=pairs", KVANT_ROLE_V, plain);
}

/* With or without a GPU: kernels would scale queries in the stored order. */
CASE(gpus_refuse_an_order_with_a_norm)
{
    static const char *const specs[] = { "int-4:order=halves,norm=first",
                                         "int-4:order=dealt,center=first,norm=first" };
    for (size_t i = 0; i < COUNT(specs); i++) {
        kvant_cuda_codec *codec;
        char err[256] = "";
        assert_int_equal(
            kvant_cuda_codec_create(specs[i], 64, KVANT_ROLE_K, 0, &codec, err, sizeof err),
            KVANT_ERR_UNSUPPORTED);
        assert_null(codec);
        assert_non_null(strstr(err, "order= with norm="));
    }
}

RUN_CASES(NULL, NULL)
