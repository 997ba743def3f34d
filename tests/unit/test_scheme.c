/* test_scheme.c - which codec a layer has, how much it can take, and why not. */
#include "testing.h"

#include <kvant/scheme.h>

static kvant_scheme *make(const kvant_scheme_params *params)
{
    kvant_scheme *scheme;
    if (kvant_scheme_create(params, &scheme) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    return scheme;
}

static const char *spec_of(kvant_scheme *scheme, kvant_role role, uint32_t layer, uint32_t n_layers)
{
    kvant_scheme_place place = { .size = sizeof place, .role = role, .layer = layer, .n_layers = n_layers, .n_kv_heads = 2, .head_dim = 64 };
    const kvant_codec *const *codecs;
    if (kvant_scheme_codecs(scheme, &place, &codecs) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    assert_ptr_equal(codecs[0], codecs[1]); /* what does not depend on the head is one object */
    return info_of(codecs[0]).spec;
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static void choices(void **state)
{
    (void)state;
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
    scheme = make(&params); /* one alone is that of both */
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
    assert_true(begins(spec_of(scheme, KVANT_ROLE_K, 3, 0), "int-4")); /* the number of layers is not known */
    kvant_scheme_free(&scheme);
}

/* Sizes before head_dim is known: those of every head_dim that divides the row fit. */
static void sizes(void **state)
{
    (void)state;
    kvant_scheme_params params = { .size = sizeof params, .k = "int-4", .protect = 1 };
    kvant_scheme *scheme = make(&params);
    kvant_tensor_params tensor = { .size = sizeof tensor, .n_sequences = 1, .n_blocks = 10 };
    kvant_scheme_place place = { .size = sizeof place, .role = KVANT_ROLE_K };
    size_t most, bytes;
    assert_int_equal(kvant_scheme_most_bytes(scheme, &place, 192, &tensor, &most), KVANT_OK);
    for (uint32_t head_dim = 32; head_dim <= 192; head_dim += 8)
        for (uint32_t n_layers = 1; n_layers <= 3 && 192 % head_dim == 0; n_layers += 2) {
            kvant_scheme_place at = { .size = sizeof at, .layer = 1 % n_layers, .n_layers = n_layers, .n_kv_heads = 192 / head_dim, .head_dim = head_dim };
            tensor.n_kv_heads = at.n_kv_heads;
            assert_int_equal(kvant_scheme_codecs(scheme, &at, &tensor.codecs), KVANT_OK);
            assert_int_equal(kvant_tensor_size(&tensor, &bytes), KVANT_OK);
            assert_true(bytes <= most);
        }
    assert_true(most >= 10 * 64 * 192 * 2); /* the protected codec is f16 */
    assert_int_equal(kvant_scheme_most_bytes(scheme, &place, 31, &tensor, &most), KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(kvant_error_message(), "31"));
    kvant_scheme_free(&scheme);
}

static void mistakes_have_reasons(void **state)
{
    static const struct {
        kvant_scheme_params params;
        kvant_status status;
        const char *why;
    } cases[] = {
        { { .preset = "large" }, KVANT_ERR_ARGUMENT, "quality, balanced or small" },
        { { .preset = "small", .k = "int-4" }, KVANT_ERR_ARGUMENT, "one of them" },
        { { .k = "nothing-4" }, KVANT_ERR_SPEC, "nothing-4" },
        { { .k = "int-4:group=no" }, KVANT_ERR_SPEC, "group" },
        { { .k = "trellis-4:transform=file" }, KVANT_ERR_UNSUPPORTED, "calibration" },
        { { .settings = "/nowhere/at.all" }, KVANT_ERR_IO, "/nowhere/at.all" },
        { { .settings = "x", .protect = 1 }, KVANT_ERR_ARGUMENT, "settings file" },
        { { .calibration = "/dev/null" }, KVANT_ERR_IO, "/dev/null" },
    };
    (void)state;
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

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(choices), cmocka_unit_test(sizes),
                                        cmocka_unit_test(mistakes_have_reasons) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
