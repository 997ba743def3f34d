/* test_mla.c - the plug-in's rows of latents: which rows are latents, their specs and codecs, and
 * the memory that is reserved for them. */
#include "../cases.h"
#include "../../integrations/llama.cpp/mla.h"

#define ROW (9 * KVP_MLA_PART)

/* Row lengths of models. DeepSeek and Kimi: 576, Mistral Small 4: 320. An indexer: 128, DeepSeek 4:
 * 512. */
CASE(rows_of_latents_are_no_power_of_two)
{
    static const uint64_t latents[] = { 192, 320, 576, 1088 };
    static const uint64_t others[] = {
        0, 64, 96, 128, 256, 512, 544, 1024, 2048, 4160, UINT64_MAX
    };

    for (size_t i = 0; i < sizeof(latents) / sizeof(latents[0]); i++)
        assert_true(kvp_mla_has_row(latents[i]));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        assert_false(kvp_mla_has_row(others[i]));
}

CASE(specs_lose_what_is_learned)
{
    static const char *const specs[][3] = {
        { "trellis-4", "trellis-4", "int-8" },
        { "trellis-4:transform=first", "trellis-4", "int-8" },
        { "trellis-4:scale=norm,transform=file,feedback", "trellis-4:scale=norm", "int-8" },
        { "int-4:center=first,sink=4,norm=first,recent=64", "int-4:sink=4,recent=64",
          "int-8:sink=4,recent=64" },
    };
    char spec[64], few[8];

    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        assert_true(kvp_mla_spec(specs[i][0], spec, sizeof(spec)));
        assert_string_equal(spec, specs[i][1]);
        assert_true(kvp_mla_rope_spec(specs[i][0], spec, sizeof(spec)));
        assert_string_equal(spec, specs[i][2]);
    }
    assert_false(kvp_mla_spec("trellis-4", few, sizeof(few)));
    assert_false(kvp_mla_spec("int-4:sink=4", few, sizeof(few)));
    assert_false(kvp_mla_rope_spec("int-4:sink=4", few, sizeof(few)));
}

static kvant_scheme *scheme_of(const char *spec, uint32_t protect)
{
    const kvant_scheme_params params = {
        .size = sizeof(params), .k = spec, .v = spec, .protect = protect
    };
    kvant_scheme *scheme;

    assert_int_equal(kvant_scheme_create(&params, &scheme), KVANT_OK);
    return scheme;
}

static const char *name_of(const kvant_codec *codec)
{
    kvant_codec_info info = { .size = sizeof(info) };

    assert_int_equal(kvant_codec_get_info(codec, &info), KVANT_OK);
    return info.spec;
}

/* RoPE's channels never have fewer bits than the latents. Protected layers are f16. */
static void check_codecs(const char *spec, const char *rope, uint32_t layer,
                         const char *want_latents, const char *want_rope)
{
    kvp_settings settings = { .latents = scheme_of(spec, 1), .rope = scheme_of(rope, 1) };
    const kvant_scheme_location place = { .size = sizeof(place), .layer = layer, .n_layers = 3 };
    const kvant_codec *codecs[KVP_MLA_MAX_PARTS];

    assert_true(kvp_mla_codecs(&settings, &place, ROW, codecs));
    for (uint32_t part = 0; part < 8; part++)
        assert_memory_equal(name_of(codecs[part]), want_latents, strlen(want_latents));
    assert_memory_equal(name_of(codecs[8]), want_rope, strlen(want_rope));
    kvant_scheme_free(&settings.latents);
    kvant_scheme_free(&settings.rope);
}

CASE(rope_channels_have_a_codec_of_their_own)
{
    check_codecs("trellis-4", "int-8", 1, "trellis-4", "int-8");
    check_codecs("f16", "int-8", 1, "f16", "f16");
    check_codecs("trellis-4", "int-8", 0, "f16", "f16");
    check_codecs("trellis-4", "int-8", 2, "f16", "f16");
    /* a codec with a window and one without do not fit together: RoPE's channels get int-4, too */
    check_codecs("int-4:recent=64", "int-8", 1, "int-4", "int-4");
}

CASE(settings_without_latents_have_no_codecs)
{
    const kvp_settings none = { .scheme = NULL };
    kvp_settings learns = { .latents = scheme_of("trellis-4:center=first", 0),
                            .rope = scheme_of("int-8", 0) };
    const kvant_scheme_location place = { .size = sizeof(place), .layer = 1 };
    const kvant_tensor_params params = { .size = sizeof(params), .n_sequences = 1, .n_blocks = 4 };
    const kvant_codec *codecs[KVP_MLA_MAX_PARTS];

    assert_false(kvp_mla_codecs(&none, &place, ROW, codecs));
    assert_false(kvp_mla_codecs(&learns, &place, ROW, codecs));
    assert_int_equal(kvp_mla_most_bytes(&none, &place, ROW, &params), 0);
    kvant_scheme_free(&learns.latents);
    kvant_scheme_free(&learns.rope);
}

/* The reserved memory is enough even if the layer is a protected layer. */
CASE(reserves_for_protected_layers)
{
    kvp_settings settings = { .latents = scheme_of("trellis-4", 1), .rope = scheme_of("int-8", 1) };
    kvant_scheme_location place = { .size = sizeof(place), .layer = 1 };
    kvant_tensor_params params = { .size = sizeof(params), .n_sequences = 1, .n_blocks = 4 };
    const kvant_codec *codecs[KVP_MLA_MAX_PARTS];
    const size_t most = kvp_mla_most_bytes(&settings, &place, ROW, &params);
    size_t bytes[2];

    params.codecs = codecs;
    params.n_kv_heads = ROW / KVP_MLA_PART;
    for (uint32_t i = 0; i < 2; i++) {
        place.n_layers = 3 - i; /* an ordinary layer, then the last layer */
        assert_true(kvp_mla_codecs(&settings, &place, ROW, codecs));
        assert_int_equal(kvant_tensor_size(&params, &bytes[i]), KVANT_OK);
    }
    assert_true(bytes[0] < bytes[1]);
    assert_int_equal(most, bytes[1]);
    kvant_scheme_free(&settings.latents);
    kvant_scheme_free(&settings.rope);
}

RUN_CASES(NULL, NULL)
