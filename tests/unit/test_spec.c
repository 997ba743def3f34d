/* test_spec.c - spec strings: which are accepted, which are refused and with which words, and
 * canonical forms. */
#include "testing.h"

/* Without a buffer, and with a buffer that is too short for the words, the status is the same. */
static void refused(const char *spec, uint32_t head_dim, kvant_status expected, const char *words)
{
    char tiny[4] = "xyz";
    kvant_codec *codec;
    expect_bad_spec(spec, head_dim, expected, words);
    assert_int_equal(kvant_codec_create(spec, head_dim, KVANT_ROLE_K, 0, &codec, NULL, 0),
                     expected);
    assert_int_equal(kvant_codec_create(spec, head_dim, KVANT_ROLE_K, 0, &codec, tiny, sizeof tiny),
                     expected);
    assert_true(strlen(tiny) < sizeof tiny);
}

CASE(bad_specs_name_the_valid_values)
{
    refused("", 64, KVANT_ERR_SPEC, "empty");
    refused("int4", 64, KVANT_ERR_SPEC, "there are f32, f16, bf16, int, bdr, ");
    refused("int", 64, KVANT_ERR_SPEC, "2 to 8 bits");
    refused("int-1", 64, KVANT_ERR_SPEC, "2 to 8 bits");
    refused("int-9", 64, KVANT_ERR_SPEC, "2 to 8 bits");
    refused("int-", 64, KVANT_ERR_SPEC, "int-");
    refused("int-4x", 64, KVANT_ERR_SPEC, "2 to 8 bits");
    refused("int-99999999999999999999", 64, KVANT_ERR_SPEC, "2 to 8 bits");
    refused("turboquant-0", 64, KVANT_ERR_SPEC, "1 to 8 bits");
    refused("f16-4", 64, KVANT_ERR_SPEC, "no number of bits");
    refused("f16:group=3", 64, KVANT_ERR_SPEC, "no option 'group'");
    refused("int-4:", 64, KVANT_ERR_SPEC, "option");
    refused("int-4:sym,", 64, KVANT_ERR_SPEC, "option");
    refused("int-4:sym,sym", 64, KVANT_ERR_SPEC, "twice");
    refused("int-4:sym,asym", 64, KVANT_ERR_SPEC, "exclude");
    refused("int-4:sym=1", 64, KVANT_ERR_SPEC, "no value");
    refused("int-4:group=12", 64, KVANT_ERR_SPEC, "a multiple of 8, or head_dim 64 or more");
    refused("int-4:group=0", 64, KVANT_ERR_SPEC, "from 1 to 512");
    refused("int-4:axis=channel,group=48", 64, KVANT_ERR_SPEC, "16, 32 or 64 tokens");
    refused("int-4:axis=both", 64, KVANT_ERR_SPEC, "token, channel");
    refused("int-4:colour=red", 64, KVANT_ERR_SPEC,
            "no option 'colour': leave it out; it has: group=N");
    refused("int-4:block=16", 64, KVANT_ERR_SPEC, "rotate=hadamard");
    refused("bdr-4:block=48", 64, KVANT_ERR_SPEC, "use at most 64");
    refused("bdr-4:block=128", 64, KVANT_ERR_SPEC, "use at most 64");
    refused("turboquant-4:scale=big", 64, KVANT_ERR_SPEC, "norm, unbiased");
    refused("turboquant-4:scale", 64, KVANT_ERR_SPEC, "norm, unbiased");
    refused("turboquant-4:rotate=givens", 64, KVANT_ERR_SPEC, "none, hadamard, dense");
    refused("int-4:order=thirds", 64, KVANT_ERR_SPEC, "stored, halves, pairs, dealt");
    refused("int-4:order", 64, KVANT_ERR_SPEC, "stored, halves, pairs, dealt");
    refused("int-4:order=pairs,order=pairs", 64, KVANT_ERR_SPEC, "twice");
    refused("int-4:order=pairs,transform=first", 64, KVANT_ERR_SPEC, "exclude each other");
    refused("int-4:order=pairs,transform=file", 64, KVANT_ERR_SPEC, "exclude each other");
    refused("turboquant-4:order=pairs", 64, KVANT_ERR_SPEC,
            "no option 'order': leave it out; it has: ");
    refused("f16:order=pairs", 64, KVANT_ERR_SPEC, "no option 'order'");
    refused("int-4:center=mean", 64, KVANT_ERR_SPEC, "none, first, file");
    refused("int-4:norm=1", 64, KVANT_ERR_SPEC, "none, first, file");
    refused("int-4:sink=x", 64, KVANT_ERR_SPEC, "from 0 to 65536");
    refused("f16:sink=4", 64, KVANT_ERR_SPEC, "no option 'sink'");
    refused("f32:center=first", 64, KVANT_ERR_SPEC, "no option 'center'");
    refused("turboquant-4", 2, KVANT_ERR_UNSUPPORTED, "head_dim 4 or more");
    refused("int-4", 0, KVANT_ERR_ARGUMENT, "from 1 to 512");
    refused("int-4", 513, KVANT_ERR_ARGUMENT, "from 1 to 512");
    refused("in\nt-4", 64, KVANT_ERR_SPEC, "not a codec");
    char longest[400];
    memset(longest, 'a', sizeof longest);
    longest[399] = 0;
    refused(longest, 64, KVANT_ERR_SPEC, "longer than");
    refused("int-4:a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q", 64, KVANT_ERR_SPEC, "more than");
}

/* Mutations of good specs are accepted or refused, and never do harm (this also runs under the
 * sanitisers). */
CASE(mutated_specs_do_no_harm)
{
    uint64_t rng = 3;
    for (int i = 0; i < 20000; i++) {
        char spec[80], err[64];
        snprintf(spec, sizeof spec, "%s", all_specs[test_random(&rng) % COUNT(all_specs)]);
        for (uint64_t n = test_random(&rng) % 4; n > 0; n--)
            spec[test_random(&rng) % (strlen(spec) + 1)] = (char)(test_random(&rng) % 255 + 1);
        spec[sizeof spec - 1] = 0;
        kvant_codec *codec;
        kvant_codec_create(spec, 1 + (uint32_t)(test_random(&rng) % 80),
                           (kvant_role)(test_random(&rng) % 2), 1, &codec, err, sizeof err);
        kvant_codec_free(&codec);
    }
}

CASE(canonical_specs_describe_the_same_codec)
{
    for (size_t s = 0; s < COUNT(all_specs); s++) {
        kvant_codec *first = make_codec(all_specs[s], 64, KVANT_ROLE_K);
        kvant_codec *second = make_codec(info_of(first).spec, 64, KVANT_ROLE_K);
        assert_string_equal(info_of(first).spec, info_of(second).spec);
        assert_int_equal(info_of(first).page_bytes, info_of(second).page_bytes);
        kvant_codec_free(&first);
        kvant_codec_free(&second);
        assert_null(first);
    }
    kvant_codec *codec = make_codec("turboquant-4:seed=0", 64, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec,
                        "turboquant-4:scale=unbiased,rotate=hadamard,block=64,signs=seed");
    kvant_codec_free(&codec);
    codec = make_codec("turboquant-4", 80, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec, "turboquant-4:scale=unbiased,rotate=dense,seed=7");
    kvant_codec_free(&codec);
    codec = make_codec("bdr-4", 96, KVANT_ROLE_K);
    assert_string_equal(info_of(codec).spec,
                        "bdr-4:group=96,asym,axis=token,rotate=hadamard,block=32,signs=none");
    kvant_codec_free(&codec);
}

CASE(specs_are_checked_without_a_model)
{
    char err[256];
    for (size_t s = 0; s < COUNT(all_specs); s++)
        assert_ok(kvant_codec_check(all_specs[s], KVANT_ROLE_V, NULL, err, sizeof err));
    assert_ok(kvant_codec_check("bdr-4:block=512", KVANT_ROLE_K, NULL, err,
                                sizeof err)); /* only for 512 */
    assert_int_equal(kvant_codec_check("bdr-4:block=48", KVANT_ROLE_K, NULL, err, sizeof err),
                     KVANT_ERR_SPEC);
    assert_non_null(strstr(err, "head_dim 128"));
    assert_int_equal(kvant_codec_check("int-9", KVANT_ROLE_K, NULL, NULL, 0), KVANT_ERR_SPEC);
    assert_int_equal(kvant_codec_check(NULL, KVANT_ROLE_K, NULL, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
}

static void expect_need(const char *spec, kvant_role role, int expected)
{
    int needed = -1;
    char err[256];
    if (kvant_codec_needs_calibration(spec, role, &needed, err, sizeof err) != KVANT_OK ||
        needed != expected)
        fail_msg("%s: %d, expected %d (%s)", spec, needed, expected, err);
}

CASE(specs_say_whether_they_need_a_calibration)
{
    int needed;
    for (size_t s = 0; s < COUNT(all_specs); s++)
        expect_need(all_specs[s], KVANT_ROLE_K, 0);
    expect_need("turboquant-4:transform=file", KVANT_ROLE_K, 1);
    expect_need("trellis-4:transform=diagonal", KVANT_ROLE_V, 1);
    expect_need("int-4:center=file", KVANT_ROLE_V, 1);
    expect_need("int-4:norm=file", KVANT_ROLE_K, 1);
    expect_need("int-4:center=first,norm=first", KVANT_ROLE_K, 0);
    expect_need("bdr-4:block=512,center=file", KVANT_ROLE_K, 1); /* only for one head_dim */
    assert_int_equal(kvant_codec_needs_calibration("int-9", KVANT_ROLE_K, &needed, NULL, 0),
                     KVANT_ERR_SPEC);
    assert_int_equal(kvant_codec_needs_calibration("int-4", KVANT_ROLE_K, NULL, NULL, 0),
                     KVANT_ERR_ARGUMENT);
}

/* A caller of the first release knows fewer fields. The library writes no more bytes than these. */
CASE(shorter_and_longer_structs_are_filled)
{
    struct {
        kvant_codec_info info;
        char behind[16];
    } longer, shorter;
    kvant_codec *codec = make_codec("int-4", 64, KVANT_ROLE_K);
    memset(&shorter, 0x5a, sizeof shorter);
    shorter.info.size = offsetof(kvant_codec_info, fingerprint);
    assert_int_equal(kvant_codec_get_info(codec, &shorter.info), KVANT_OK);
    assert_true(shorter.info.nominal_bits == 4 && shorter.info.fingerprint == 0x5a5a5a5a5a5a5a5au);
    assert_int_equal(shorter.info.size, offsetof(kvant_codec_info, fingerprint));
    memset(&longer, 0x5a, sizeof longer);
    longer.info.size = sizeof longer;
    assert_int_equal(kvant_codec_get_info(codec, &longer.info), KVANT_OK);
    assert_true(longer.info.fingerprint == info_of(codec).fingerprint && longer.behind[0] == 0);
    shorter.info.size = 8;
    assert_int_equal(kvant_codec_get_info(codec, &shorter.info), KVANT_ERR_ARGUMENT);
    kvant_codec_free(&codec);
}

CASE(families_are_listed)
{
    kvant_codec_family family = { .size = sizeof family };
    assert_true(kvant_codec_family_count() >= 6);
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        assert_int_equal(kvant_codec_family_get(i, &family), KVANT_OK);
        assert_true(family.name[0] && family.summary[0] && family.source[0]);
    }
    assert_int_equal(kvant_codec_family_get(1000, &family), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_codec_family_get(0, NULL), KVANT_ERR_ARGUMENT);
}

CASE(status_words)
{
    assert_string_equal(kvant_strerror(KVANT_OK), "success");
    assert_non_null(kvant_strerror((kvant_status)12345));
    assert_string_equal(kvant_version(), KVANT_VERSION_STRING);
    assert_int_equal(kvant_set_cpu_level((kvant_cpu_level)12345), KVANT_ERR_UNSUPPORTED);
    assert_null(kvant_cpu_level_name((kvant_cpu_level)12345));
}

RUN_CASES(NULL, NULL)
