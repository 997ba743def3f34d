/* test_scheme.c - which codec a layer has, how much memory it needs at most, and why a scheme is
 * refused. */
#define _POSIX_C_SOURCE 200809L
#include "testing.h"

#include <kvant/calibration.h>
#include <kvant/scheme.h>
#include <unistd.h>

static kvant_scheme *make(const kvant_scheme_params *params)
{
    kvant_scheme *scheme;
    if (kvant_scheme_create(params, &scheme) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    return scheme;
}

static const char *spec_of(kvant_scheme *scheme, kvant_role role, uint32_t layer, uint32_t n_layers)
{
    kvant_scheme_location place = { .size = sizeof place,
                                    .role = role,
                                    .layer = layer,
                                    .n_layers = n_layers,
                                    .n_kv_heads = 2,
                                    .head_dim = 64 };
    const kvant_codec *const *codecs;
    if (kvant_scheme_codecs(scheme, &place, &codecs) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    /* codecs that do not depend on the head are one object */
    assert_ptr_equal(codecs[0], codecs[1]);
    return info_of(codecs[0]).spec;
}

static const char *spec_of_one(kvant_scheme *scheme)
{
    kvant_scheme_location place = {
        .size = sizeof place, .n_layers = 1, .n_kv_heads = 1, .head_dim = 32
    };
    const kvant_codec *const *codecs;
    if (kvant_scheme_codecs(scheme, &place, &codecs) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    return info_of(codecs[0]).spec;
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

CASE(choices)
{
    kvant_scheme_params params = { .size = sizeof params };
    kvant_scheme *scheme = make(&params);
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 0, 4), "trellis-4"));
    kvant_scheme_info info = { .size = sizeof info };
    assert_int_equal(kvant_scheme_get_info(scheme, &info), KVANT_OK);
    assert_string_equal(info.preset, KVANT_PRESET_DEFAULT);
    assert_false(info.needs_calibration);
    kvant_scheme_free(&scheme);
    assert_null(scheme);

    params.v = "int-8";
    scheme = make(&params); /* a single spec is for both roles */
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 0, 4), "int-8"));
    assert_true(begins(spec_of(scheme, KVANT_ROLE_V, 0, 4), "int-8"));
    kvant_scheme_free(&scheme);

    params.k = "int-4";
    params.protect = 1;
    params.protect_codec = "int-8";
    scheme = make(&params);
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 0, 4), "int-8"));
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 1, 4), "int-4"));
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 3, 4), "int-8"));
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 3, 0),
                       "int-4")); /* the number of layers is not known */
    kvant_scheme_free(&scheme);
}

/* Only the layers 3, 7 and 11 have a cache. */
CASE(protected_layers_are_those_with_a_cache)
{
    const kvant_scheme_params params = {
        .size = sizeof params, .k = "int-4", .protect = 1, .protect_codec = "int-8"
    };
    kvant_scheme *scheme = make(&params);
    for (uint32_t rank = 0; rank < 3; rank++) {
        const kvant_scheme_location place = { .size = sizeof place,
                                              .layer = 4 * rank + 3,
                                              .n_layers = 12,
                                              .n_kv_heads = 1,
                                              .head_dim = 64,
                                              .rank = rank,
                                              .n_cached = 3 };
        const kvant_codec *const *codecs;
        assert_int_equal(kvant_scheme_codecs(scheme, &place, &codecs), KVANT_OK);
        assert_true(begins(info_of(codecs[0]).spec, rank == 1 ? "int-4" : "int-8"));
    }
    kvant_scheme_free(&scheme);
}

/* Sizes before head_dim is known: the sizes for every head_dim that divides the row fit. */
CASE(sizes)
{
    kvant_scheme_params params = { .size = sizeof params, .k = "int-4", .protect = 1 };
    kvant_scheme *scheme = make(&params);
    kvant_tensor_params tensor = { .size = sizeof tensor, .n_sequences = 1, .n_blocks = 10 };
    kvant_scheme_location place = { .size = sizeof place, .role = KVANT_ROLE_K };
    size_t most, bytes;
    assert_int_equal(kvant_scheme_most_bytes(scheme, &place, 192, &tensor, &most), KVANT_OK);
    for (uint32_t head_dim = 32; head_dim <= 192; head_dim += 8)
        for (uint32_t n_layers = 1; n_layers <= 3 && 192 % head_dim == 0; n_layers += 2) {
            kvant_scheme_location at = { .size = sizeof at,
                                         .layer = 1 % n_layers,
                                         .n_layers = n_layers,
                                         .n_kv_heads = 192 / head_dim,
                                         .head_dim = head_dim };
            tensor.n_kv_heads = at.n_kv_heads;
            assert_int_equal(kvant_scheme_codecs(scheme, &at, &tensor.codecs), KVANT_OK);
            assert_int_equal(kvant_tensor_size(&tensor, &bytes), KVANT_OK);
            assert_true(bytes <= most);
        }
    assert_true(most >= 10 * 64 * 192 * 2); /* the protected codec is f16 */
    assert_int_equal(kvant_scheme_most_bytes(scheme, &place, 31, &tensor, &most),
                     KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(kvant_error_message(), "31"));
    kvant_scheme_free(&scheme);
}

/* Bits of a whole model. Protected layers, and the layers of a settings file, count as often as
 * there are layers of their kind. */
CASE(bits_of_a_model)
{
    const kvant_scheme_model model = {
        .size = sizeof model, .n_layers = 4, .n_kv_heads = 2, .head_dim = { 64, 128 }
    };
    kvant_scheme_params params = {
        .size = sizeof params, .k = "f16", .v = "int-8", .protect = 1, .protect_codec = "f16"
    };
    kvant_scheme *scheme = make(&params);
    double bits;
    assert_int_equal(kvant_scheme_true_bits(scheme, &model, &bits), KVANT_OK);
    const double int8 = 8 + 32.0 / 128; /* a scale and a zero point of 16 bits per row */
    assert_float_equal(bits, (4 * 64 * 16 + 2 * 128 * 16 + 2 * 128 * int8) / (4 * 192), 1e-9);
    const kvant_scheme_model odd = {
        .size = sizeof odd, .n_layers = 4, .n_kv_heads = 2, .head_dim = { 64, 0 }
    };
    bits = 7;
    assert_int_not_equal(kvant_scheme_true_bits(scheme, &odd, &bits), KVANT_OK);
    const kvant_scheme_model empty = { .size = sizeof empty };
    assert_int_equal(kvant_scheme_true_bits(scheme, &empty, &bits), KVANT_ERR_ARGUMENT);
    assert_true(bits == 7); /* an error changes nothing */
    kvant_scheme_free(&scheme);
}

static kvant_exact_part exact_of(const kvant_scheme *scheme, uint64_t max_tokens,
                                 uint32_t n_sequences)
{
    kvant_exact_part part = { .size = sizeof part };
    assert_int_equal(kvant_scheme_exact(scheme, max_tokens, n_sequences, &part), KVANT_OK);
    return part;
}

static void save_settings(const char *path)
{
    const kvant_settings_layer layers[] = { { "f16", 1, 32, NULL }, { "f16", 1, 32, NULL } };
    const kvant_settings_config config = {
        .size = sizeof config, .model = "tiny", .n_layers = 1, .layers = layers
    };
    kvant_settings *settings;
    assert_int_equal(kvant_settings_create(&config, &settings, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_settings_save(settings, path, NULL, 0), KVANT_OK);
    kvant_settings_free(&settings);
}

/* Presets and settings files have a bounded exact part; specs name it themselves. */
CASE(exact_part)
{
    static const struct {
        uint64_t max_tokens;
        uint32_t n_sequences, newest, total, step;
    } cases[] = { { 0, 1, 64, 128, 64 },
                  { 64, 9, 64, 128, 64 },
                  { 2048, 1, 64, 128, 256 },
                  { 2049 + 15, 1, 65, 129, 256 },
                  { 3071, 1, 127, 191, 320 },
                  { 3072, 1, 128, 192, 384 },
                  { 1 << 20, 1, 128, 192, 512 },
                  { 3072, 4, 128, 192, 384 },
                  { 8192, 4, 128, 512, 512 },
                  { 1 << 20, 4, 128, 768, 512 },
                  { 4095, 1, 128, 192, 448 },
                  { 4096, 1, 128, 192, 512 },
                  { UINT64_MAX, UINT32_MAX, 128, INT32_MAX, 512 } };
    char folder[] = "/tmp/kvant-scheme-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/model.kvant", folder);
    save_settings(path);
    const kvant_scheme_params with[] = { { .size = sizeof *with },
                                         { .size = sizeof *with, .preset = "tiny" },
                                         { .size = sizeof *with, .settings = path } },
                              without[] = { { .size = sizeof *with, .k = "trellis-4" },
                                            { .size = sizeof *with,
                                              .k = "int-4:sink=4,recent=64" } };
    for (size_t i = 0; i < COUNT(with); i++) {
        kvant_scheme *scheme = make(&with[i]);
        for (size_t c = 0; c < COUNT(cases); c++) {
            const kvant_exact_part part =
                exact_of(scheme, cases[c].max_tokens, cases[c].n_sequences);
            assert_int_equal(part.first, 64);
            assert_int_equal(part.newest, cases[c].newest);
            assert_int_equal(part.total, cases[c].total);
            assert_int_equal(part.step, cases[c].step);
        }
        kvant_exact_part none = { .size = sizeof none };
        assert_int_equal(kvant_scheme_exact(scheme, 1, 0, &none), KVANT_ERR_ARGUMENT);
        kvant_scheme_free(&scheme);
    }
    for (size_t i = 0; i < COUNT(without); i++) {
        kvant_scheme *scheme = make(&without[i]);
        const kvant_exact_part part = exact_of(scheme, 4096, 1);
        assert_int_equal(part.first + part.newest + part.total + part.step, 0);
        kvant_scheme_free(&scheme);
    }
    unlink(path);
    rmdir(folder);
}

/* Six of 18 layers have keys of 3 bits. That makes 2 + 16/256 bits and a sixth of a bit on average
 * over keys and values. */
CASE(bits_of_tiny)
{
    const kvant_scheme_model model = {
        .size = sizeof model, .n_layers = 18, .n_kv_heads = 1, .head_dim = { 256, 256 }
    };
    const kvant_scheme_params params = { .size = sizeof params, .preset = "tiny" };
    kvant_scheme *scheme = make(&params);
    kvant_scheme_location place = { .size = sizeof place, .n_kv_heads = 1, .head_dim = 256 };
    const kvant_codec *const *codecs;
    double bits;
    assert_int_equal(kvant_scheme_true_bits(scheme, &model, &bits), KVANT_OK);
    assert_true(fabs(bits - (2 + 16.0 / 256 + 6.0 / 36)) < 1e-9);
    for (place.layer = 0; place.layer < 3;
         place.layer++) { /* whether the number of layers is known or not */
        place.n_layers = place.layer % 2 * 18;
        assert_int_equal(kvant_scheme_codecs(scheme, &place, &codecs), KVANT_OK);
        assert_true(begins(info_of(codecs[0]).spec, place.layer == 2 ? "trellis-3" : "trellis-2"));
    }
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 2, 18), "trellis-2")); /* head_dim 64 */
    kvant_scheme_free(&scheme);
}

CASE(bits_of_a_settings_file)
{
    const kvant_settings_layer layers[] = { { "f16", 1, 32, NULL },
                                            { "f16", 1, 32, NULL },
                                            { "int-8", 1, 64, NULL },
                                            { "f16", 1, 64, NULL } };
    const kvant_settings_config config = {
        .size = sizeof config, .model = "tiny", .n_layers = 2, .layers = layers
    };
    kvant_settings *settings;
    char folder[] = "/tmp/kvant-scheme-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/model.kvant", folder);
    assert_int_equal(kvant_settings_create(&config, &settings, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_settings_save(settings, path, NULL, 0), KVANT_OK);
    kvant_settings_free(&settings);
    const kvant_scheme_params params = { .size = sizeof params, .settings = path };
    kvant_scheme *scheme = make(&params);
    kvant_scheme_model model = {
        .size = sizeof model, .n_layers = 2, .n_kv_heads = 1, .head_dim = { 64, 32 }
    };
    double bits;
    assert_ok(kvant_scheme_true_bits(scheme, &model, &bits)); /* every spec is in some layer */
    assert_float_equal(bits, (2 * 32 * 16 + 64 * 8.5 + 64 * 16) / 192, 1e-9);
    model.head_dim[KVANT_ROLE_V] = 128;
    bits = 7;
    assert_int_equal(kvant_scheme_true_bits(scheme, &model, &bits), KVANT_ERR_ARGUMENT);
    assert_true(bits == 7);
    assert_non_null(strstr(kvant_error_message(), "another model"));
    assert_non_null(strstr(kvant_error_message(), "tiny"));
    kvant_scheme_free(&scheme);
    unlink(path);
    rmdir(folder);
}

static void save_calibration(const char *path, uint64_t fingerprint)
{
    const kvant_calibrator_config config = { .size = sizeof config,
                                             .model_fingerprint = fingerprint };
    float rows[64 * 32];
    uint64_t rng = 1;
    kvant_calibrator *calibrator;
    kvant_calibration *calibration;
    fill_normal(rows, COUNT(rows), &rng);
    assert_int_equal(kvant_calibrator_create(&config, &calibrator, NULL, 0), KVANT_OK);
    for (int role = 0; role < 2; role++)
        assert_ok(kvant_calibrator_add_rows(calibrator, 0, (kvant_role)role, 1, 32, rows, 32, 64));
    assert_int_equal(kvant_calibrator_finish(calibrator, &calibration), KVANT_OK);
    assert_int_equal(kvant_calibration_save(calibration, path, NULL, 0), KVANT_OK);
    kvant_calibration_free(&calibration);
    kvant_calibrator_free(&calibrator);
}

/* A codec that needs a calibration uses the file next to the model, if the file was made for this
 * model. Otherwise the scheme says why not. */
CASE(calibration_beside_the_model)
{
    char folder[] = "/tmp/kvant-scheme-XXXXXX", model[64], path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(model, sizeof model, "%s/a.gguf", folder);
    snprintf(path, sizeof path, "%s/a.kvcal", folder);
    FILE *file = fopen(model, "wb");
    assert_true(file && fputs("weights", file) >= 0 && fclose(file) == 0);
    const uint64_t fingerprint = kvant_model_fingerprint(model);
    assert_int_equal(kvant_model_fingerprint(path), 0); /* the file does not exist yet */
    for (int ours = 0; ours < 3; ours++) {
        kvant_scheme_info info = { .size = sizeof info };
        const kvant_scheme_params plain = { .size = sizeof plain, .k = "int-8", .model = model };
        const kvant_scheme_params params = { .size = sizeof params,
                                             .k = "int-8:center=file",
                                             .model = model };
        kvant_scheme *scheme = NULL;
        if (ours)
            save_calibration(path, ours == 1 ? fingerprint : fingerprint + 1);
        assert_int_equal(kvant_scheme_create(&params, &scheme),
                         ours == 1 ? KVANT_OK : KVANT_ERR_UNSUPPORTED);
        if (ours == 2)
            assert_non_null(strstr(kvant_error_message(), "another file than a.gguf"));
        if (ours == 1) {
            assert_int_equal(kvant_scheme_get_info(scheme, &info), KVANT_OK);
            assert_string_equal(info.calibration_path, path);
            assert_null(info.not_used);
            uint32_t head_dim = 0;
            assert_int_equal(kvant_scheme_head_dim(scheme, 0, KVANT_ROLE_K, &head_dim), KVANT_OK);
            assert_int_equal(head_dim, 32); /* from the calibration */
            assert_int_equal(kvant_scheme_head_dim(scheme, 7, KVANT_ROLE_K, &head_dim), KVANT_OK);
            assert_int_equal(head_dim, 0); /* a layer that the calibration does not have */
            kvant_scheme_params more = params;
            more.like = scheme;
            kvant_scheme *other = make(&more); /* the same calibration, not an equal one */
            kvant_scheme_info shared = { .size = sizeof shared };
            assert_int_equal(kvant_scheme_get_info(other, &shared), KVANT_OK);
            assert_ptr_equal(shared.calibration, info.calibration);
            kvant_scheme_free(&other);
            /* the scheme keeps its calibration */
            assert_non_null(strstr(spec_of_one(scheme), "center=file"));
        }
        kvant_scheme_free(&scheme);
        scheme = make(&plain);
        assert_int_equal(kvant_scheme_get_info(scheme, &info), KVANT_OK);
        assert_null(info.calibration);
        assert_null(info.not_used); /* no codec asked for it */
        kvant_scheme_free(&scheme);
    }
    const kvant_scheme_params preset = { .size = sizeof preset, .preset = "small", .model = model };
    kvant_scheme *scheme = make(&preset); /* works without a calibration */
    kvant_scheme_info info = { .size = sizeof info };
    assert_int_equal(kvant_scheme_get_info(scheme, &info), KVANT_OK);
    assert_null(info.calibration_path);
    assert_non_null(strstr(info.not_used, "another file than a.gguf"));
    kvant_scheme_free(&scheme);
    unlink(model);
    unlink(path);
    rmdir(folder);
}

CASE(mistakes_have_reasons)
{
    static const struct {
        kvant_scheme_params params;
        kvant_status status;
        const char *why;
    } cases[] = {
        { { .preset = "large" }, KVANT_ERR_ARGUMENT, "quality, balanced, small or tiny" },
        { { .preset = "small", .k = "int-4" }, KVANT_ERR_ARGUMENT, "one of them" },
        { { .k = "nothing-4" }, KVANT_ERR_SPEC, "nothing-4" },
        { { .k = "int-4:group=no" }, KVANT_ERR_SPEC, "group" },
        { { .k = "trellis-4:transform=file" }, KVANT_ERR_UNSUPPORTED, "calibration" },
        { { .settings = "/nowhere/at.all" }, KVANT_ERR_IO, "/nowhere/at.all" },
        { { .settings = "x", .protect = 1 }, KVANT_ERR_ARGUMENT, "protect_codec with settings" },
        { { .calibration = "/dev/null" }, KVANT_ERR_IO, "/dev/null" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        kvant_scheme_params params = cases[i].params;
        kvant_scheme *scheme = (void *)&params;
        params.size = sizeof params;
        assert_int_equal(kvant_scheme_create(&params, &scheme), cases[i].status);
        assert_null(scheme);
        if (!strstr(kvant_error_message(), cases[i].why))
            fail_msg("case %zu: %s", i, kvant_error_message());
    }
}

RUN_CASES(NULL, NULL)
