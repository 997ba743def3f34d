/* test_canonical.c - canonical specs. Each makes the codec that printed it when the call's seed is
 * 0. A canonical spec names everything that bytes depend on, except numbers from a calibration,
 * which the fingerprint names. */
#include "testing.h"

#include "calibrated.h"

static kvant_codec *try_codec(const char *spec, uint32_t d, kvant_role role, uint64_t seed)
{
    kvant_codec *codec;
    kvant_codec_create(spec, d, role, seed, &codec, NULL, 0);
    return codec;
}

/* Encodes one block into a page. */
static uint8_t *encode(const kvant_codec *codec)
{
    kvant_codec_info info = info_of(codec);
    uint64_t state = info.head_dim;
    float *rows = aligned((size_t)info.block_tokens * info.head_dim * sizeof *rows);
    uint8_t *page = aligned(info.page_bytes);
    fill_normal(rows, (size_t)info.block_tokens * info.head_dim, &state);
    assert_ok(kvant_codec_encode(codec, NULL, rows, info.head_dim, 0, info.block_tokens, page));
    free(rows);
    return page;
}

static void expect_same_codec(const kvant_codec *a, const char *spec)
{
    kvant_codec_info info = info_of(a);
    char err[256] = "";
    kvant_codec *b;
    if (kvant_codec_create(info.spec, info.head_dim, info.role, 0, &b, err, sizeof err) != KVANT_OK)
        fail_msg("%s at head_dim %u prints %s, which is refused: %s", spec, info.head_dim,
                 info.spec, err);
    kvant_codec_info again = info_of(b);
    uint8_t *left = encode(a), *right = encode(b);
    assert_string_equal(again.spec, info.spec);
    assert_true(again.fingerprint == info.fingerprint);
    assert_int_equal(again.page_bytes, info.page_bytes);
    if (memcmp(left, right, info.page_bytes) != 0)
        fail_msg("%s at head_dim %u: other bytes than %s", info.spec, info.head_dim, spec);
    free(left);
    free(right);
    kvant_codec_free(&b);
}

/* Every small head_dim, and head_dims that models have. Seed 0 is not printed, so specs that need
 * no seed stay short. */
static uint32_t next_dim(uint32_t d)
{
    return d < 24 ? d + 1 : d < 136 ? d + 28 : d + 376;
}

CASE(canonical_specs_make_the_codec_that_printed_them)
{
    unsigned n = 0;
    for (size_t i = 0; i < COUNT(all_specs); i++)
        for (uint32_t d = 1; d <= KVANT_MAX_HEAD_DIM; d = next_dim(d))
            for (int role = 0; role < 2; role++) {
                if (d > 256 && role == (int)(i % 2))
                    continue; /* rotations of 512 channels take most of the time */
                kvant_codec *codec =
                    try_codec(all_specs[i], d, (kvant_role)role, d % 3 ? UINT64_MAX - d : 0);
                if (!codec)
                    continue;
                expect_same_codec(codec, all_specs[i]);
                kvant_codec_free(&codec);
                n++;
            }
    assert_true(n > 2000);
}

CASE(specs_differ_where_bytes_do)
{
    static const uint64_t seeds[] = { 0, 1, 7, UINT64_MAX };
    for (size_t i = 0; i < COUNT(all_specs); i++) {
        kvant_codec *zero = try_codec(all_specs[i], 64, KVANT_ROLE_K, 0);
        uint8_t *page = encode(zero);
        for (size_t k = 1; k < COUNT(seeds); k++) {
            kvant_codec *codec = try_codec(all_specs[i], 64, KVANT_ROLE_K, seeds[k]);
            uint8_t *other = encode(codec);
            bool same_bytes = memcmp(page, other, info_of(codec).page_bytes) == 0;
            bool same_spec = strcmp(info_of(codec).spec, info_of(zero).spec) == 0;
            if (same_spec && !same_bytes)
                fail_msg("%s: seeds 0 and %llu write different bytes", info_of(codec).spec,
                         (unsigned long long)seeds[k]);
            assert_int_equal(same_spec, info_of(codec).fingerprint == info_of(zero).fingerprint);
            free(other);
            kvant_codec_free(&codec);
        }
        free(page);
        kvant_codec_free(&zero);
    }
}

CASE(seeds_of_specs_come_before_those_of_calls)
{
    kvant_codec *codec = make_codec("turboquant-4", 64, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec,
                        "turboquant-4:scale=unbiased,rotate=hadamard,block=64,signs=seed,seed=7");
    kvant_codec_free(&codec);
    codec = make_codec("turboquant-4:seed=0", 64, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec,
                        "turboquant-4:scale=unbiased,rotate=hadamard,block=64,signs=seed");
    kvant_codec_free(&codec);
    codec = make_codec("int-4", 64, KVANT_ROLE_K);
    assert_null(strstr(info_of(codec).spec, "seed"));
    kvant_codec_free(&codec);
    assert_null(try_codec("turboquant-4:seed", 64, KVANT_ROLE_K, 0));
    assert_null(try_codec("turboquant-4:seed=18446744073709551616", 64, KVANT_ROLE_K, 0));
    assert_null(try_codec("turboquant-4:seed=-1", 64, KVANT_ROLE_K, 0));
    assert_null(try_codec("f16:seed=1", 64, KVANT_ROLE_K, 0));
}

static uint64_t fingerprint_at(const char *spec, const kvant_calibration *c, uint32_t layer,
                               uint32_t kv_head)
{
    kvant_codec *codec;
    assert_ok(kvant_codec_create_calibrated(spec, 32, KVANT_ROLE_K, 0, c, layer, kv_head, &codec,
                                            NULL, 0));
    uint64_t fingerprint = info_of(codec).fingerprint;
    kvant_codec_free(&codec);
    return fingerprint;
}

/* All kv heads of a model have the same spec, but their bytes differ. */
CASE(fingerprints_tell_calibrated_heads_apart)
{
    static const char *const more[] = { "int-4:center=file", "int-4:norm=file" };
    kvant_calibration *c = calibrate_fixed(32);
    assert_non_null(c);
    for (size_t i = 0; i < N_WEIGHTED_SPECS + COUNT(more); i++) {
        const char *spec = i < N_WEIGHTED_SPECS ? weighted_specs[i] : more[i - N_WEIGHTED_SPECS];
        uint64_t here = fingerprint_at(spec, c, 0, 0);
        assert_true(here == fingerprint_at(spec, c, 0, 0));
        assert_true(here != fingerprint_at(spec, c, 0, 1));
        assert_true(here != fingerprint_at(spec, c, 1, 0));
    }
    assert_true(fingerprint_at("int-4", c, 0, 0) == fingerprint_at("int-4", c, 1, 1));
    kvant_calibration_free(&c);
}

RUN_CASES(NULL, NULL)
