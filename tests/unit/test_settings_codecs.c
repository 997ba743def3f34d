/* test_settings_codecs.c - codecs of settings and of presets. Settings are checked against a
 * calibration and a model. test_settings.c tests the file. */
#include "settings_fixture.h"

/* Settings of two layers with two kv heads, as the fixed calibration has. Layer 1's keys have the
 * given spec and shape. */
static kvant_settings *calibrated_settings(const char *spec, uint32_t n_kv_heads, uint32_t head_dim,
                                           const kvant_calibration *calibration)
{
    kvant_calibration_info info = { .size = sizeof info };
    const kvant_settings_layer two[4] = {
        { "int-4:center=file", 2, 8, NULL },
        { "int-4", 2, 8, NULL },
        { spec, n_kv_heads, head_dim, NULL },
        { "int-4", 2, 8, NULL },
    };
    assert_int_equal(kvant_calibration_get_info(calibration, &info), KVANT_OK);
    const kvant_settings_config config = { .size = sizeof config,
                                           .n_layers = 2,
                                           .layers = two,
                                           .calibration = "fixed.kvcal",
                                           .calibration_checksum = info.checksum };
    return create(&config);
}

CASE(calibration_is_found_beside_and_another_refused)
{
    kvant_calibration *own = calibrate_fixed(8), *other = calibrate_fixed(16), *loaded;
    kvant_settings *settings = calibrated_settings("int-4", 2, 8, own);
    char err[256] = "";
    assert_int_equal(kvant_settings_load_calibration(settings, NULL, &loaded, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
    assert_ok(kvant_settings_save(settings, in_folder("model.kvant"), err, sizeof err));
    kvant_settings_free(&settings);
    assert_ok(kvant_settings_load(in_folder("model.kvant"), &settings, err, sizeof err));
    assert_int_equal(kvant_settings_load_calibration(settings, NULL, &loaded, err, sizeof err),
                     KVANT_ERR_IO);
    assert_ok(kvant_calibration_save(own, in_folder("fixed.kvcal"), err, sizeof err));
    assert_ok(kvant_settings_load_calibration(settings, NULL, &loaded, err, sizeof err));
    assert_non_null(loaded);
    kvant_calibration_free(&loaded);
    assert_ok(kvant_calibration_save(other, in_folder("fixed.kvcal"), err, sizeof err));
    assert_int_equal(kvant_settings_load_calibration(settings, NULL, &loaded, err, sizeof err),
                     KVANT_ERR_ARGUMENT);
    assert_null(loaded);
    assert_non_null(strstr(err, "not the one that the settings were made with"));
    assert_int_equal(kvant_settings_check(settings, other, err, sizeof err), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_settings_check(settings, own, err, sizeof err), KVANT_OK);
    assert_ok(kvant_calibration_save(own, in_folder("elsewhere.kvcal"), err, sizeof err));
    assert_ok(kvant_settings_load_calibration(settings, in_folder("elsewhere.kvcal"), &loaded, err,
                                              sizeof err));
    kvant_calibration_free(&loaded);
    kvant_settings_free(&settings);
    kvant_calibration_free(&own);
    kvant_calibration_free(&other);
}

CASE(no_calibration_is_none)
{
    kvant_settings_config config = usual_config();
    kvant_calibration *loaded = (kvant_calibration *)&config;
    char err[256] = "";
    config.calibration = NULL;
    kvant_settings *settings = create(&config);
    assert_ok(kvant_settings_load_calibration(settings, NULL, &loaded, err, sizeof err));
    assert_null(loaded);
    kvant_settings_free(&settings);
}

CASE(check_creates_every_codec)
{
    static const struct {
        const char *spec;
        uint32_t n_kv_heads, head_dim;
        bool calibrated;
        kvant_status status;
        const char *said;
    } cases[] = {
        { "int-4:transform=file", 2, 8, true, KVANT_OK, "" },
        { "int-4:transform=file", 2, 8, false, KVANT_ERR_UNSUPPORTED,
          "layer 0, keys, int-4:center=file: " },
        { "int-9", 2, 8, true, KVANT_ERR_SPEC, "layer 1, keys, int-9: " },
        { "int-4", 2, 16, true, KVANT_ERR_ARGUMENT,
          "layer 1, keys, int-4: the calibration is for a model with other" },
        { "int-4", 1, 8, true, KVANT_ERR_ARGUMENT,
          "layer 1, keys, int-4: the calibration is for a model with other" },
        { "int-4", 3, 8, true, KVANT_ERR_ARGUMENT,
          "layer 1, keys, int-4: the calibration is for a model with other" },
    };
    kvant_calibration *calibration = calibrate_fixed(8);
    for (size_t i = 0; i < COUNT(cases); i++) {
        char err[512] = "";
        kvant_settings *settings =
            calibrated_settings(cases[i].spec, cases[i].n_kv_heads, cases[i].head_dim, calibration);
        kvant_status status = kvant_settings_check(
            settings, cases[i].calibrated ? calibration : NULL, err, sizeof err);
        if (status != cases[i].status || strncmp(err, cases[i].said, strlen(cases[i].said)) != 0)
            fail_msg("case %zu: status %d, \"%s\"", i, (int)status, err);
        kvant_settings_free(&settings);
    }
    kvant_calibration_free(&calibration);
}

CASE(check_creates_every_kv_head)
{
    static const struct {
        const char *keys[2];
        kvant_status status;
        const char *said;
    } cases[] = {
        { { "int-4:transform=file", "turboquant-2:transform=file,feedback" }, KVANT_OK, "" },
        { { "int-4", "int-9" }, KVANT_ERR_SPEC, "layer 0, keys, int-9: " },
        { { "int-4:center=file", "trellis-4" },
          KVANT_ERR_ARGUMENT,
          "layer 0, keys, trellis-4: its sink, recent or kind of centre" },
        { { "int-4:center=first,sink=0", "int-4" },
          KVANT_ERR_ARGUMENT,
          "layer 0, keys, int-4: its sink, recent or kind of centre" },
    };
    kvant_calibration *calibration = calibrate_fixed(8);
    for (size_t i = 0; i < COUNT(cases); i++) {
        const kvant_settings_layer one[2] = { { NULL, 2, 8, cases[i].keys },
                                              { "int-4", 2, 8, NULL } };
        const kvant_settings_config config = { .size = sizeof config,
                                               .n_layers = 1,
                                               .layers = one };
        kvant_settings *settings = create(&config);
        char err[512] = "";
        kvant_status status = kvant_settings_check(settings, calibration, err, sizeof err);
        if (status != cases[i].status || strncmp(err, cases[i].said, strlen(cases[i].said)) != 0)
            fail_msg("case %zu: status %d, \"%s\"", i, (int)status, err);
        kvant_settings_free(&settings);
    }
    kvant_calibration_free(&calibration);
}

/* Every preset works without a calibration and with one, which its keys then need. */
CASE(presets_make_codecs)
{
    static const char *const names[] = { "quality", "balanced", "small", "tiny" };
    kvant_calibration *calibration = calibrate_fixed(8);
    for (size_t i = 0; i < COUNT(names); i++)
        for (int calibrated = 0; calibrated < 2; calibrated++) {
            kvant_preset preset = { .size = sizeof preset };
            char err[256] = "";
            assert_int_equal(kvant_preset_get(names[i], calibrated, &preset), KVANT_OK);
            assert_string_equal(preset.name, names[i]);
            assert_non_null(strstr(KVANT_PRESET_NAMES, preset.name));
            const kvant_calibration *with = calibrated ? calibration : NULL;
            assert_ok(kvant_codec_check(preset.k, KVANT_ROLE_K, with, err, sizeof err));
            assert_ok(kvant_codec_check(preset.v, KVANT_ROLE_V, with, err, sizeof err));
            const bool learns = strcmp(names[i], "tiny") == 0; /* learns with a calibration, too */
            assert_true(!preset.more_k || kvant_codec_check(preset.more_k, KVANT_ROLE_K, NULL, err,
                                                            sizeof err) == KVANT_OK);
            kvant_status without = calibrated && !learns ? KVANT_ERR_UNSUPPORTED : KVANT_OK;
            assert_int_equal(kvant_codec_check(preset.k, KVANT_ROLE_K, NULL, err, sizeof err),
                             without);
        }
    kvant_calibration_free(&calibration);
}

/* A layer with head_dim d has 2 rows per token, with 2 bits per number and a scale of 16 bits. Some
 * keys have d bits more. There are as many of them as fit into the size at head_dim 64, which is
 * 2.25 bits per number. */
CASE(tiny_has_the_bits_of_head_dim_64)
{
    kvant_preset preset = { .size = sizeof preset };
    assert_null(kvant_preset_spec(NULL, KVANT_ROLE_K, 0, 64));
    assert_int_equal(kvant_preset_get("tiny", 0, &preset), KVANT_OK);
    for (uint32_t d = 64; d <= KVANT_MAX_HEAD_DIM; d += 8)
        for (uint32_t layer = 0, more = 0; layer < 100; layer++) {
            const char *k = kvant_preset_spec(&preset, KVANT_ROLE_K, layer, d);
            assert_ptr_equal(kvant_preset_spec(&preset, KVANT_ROLE_V, layer, d), preset.v);
            assert_true(k == preset.k || k == preset.more_k);
            more += k == preset.more_k;
            const uint32_t rows = 2 * (layer + 1), used = rows * (2 * d + 16) + more * d,
                           allowed = rows * (2 * d + d / 4);
            assert_true(used <= allowed && used + d > allowed);
        }
    assert_ptr_equal(kvant_preset_spec(&preset, KVANT_ROLE_K, UINT32_MAX, 32), preset.k);
    assert_int_equal(kvant_preset_get("small", 0, &preset), KVANT_OK);
    assert_ptr_equal(kvant_preset_spec(&preset, KVANT_ROLE_K, 2, 256), preset.k);
}

CASE(other_presets_are_refused)
{
    kvant_preset preset = { .size = sizeof preset };
    assert_int_equal(kvant_preset_get(KVANT_PRESET_DEFAULT, 0, &preset), KVANT_OK);
    assert_int_equal(kvant_preset_get("Balanced", 0, &preset), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_preset_get("", 0, &preset), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_preset_get(NULL, 0, &preset), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_preset_get("small", 0, NULL), KVANT_ERR_ARGUMENT);
    preset.size = 1;
    assert_int_equal(kvant_preset_get("small", 0, &preset), KVANT_ERR_ARGUMENT);
}

RUN_CASES(make_folder, remove_folder)
