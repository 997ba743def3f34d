/* test_settings.c - the settings file: round trips and every kind of damage.
 * test_settings_codecs.c tests the codecs that settings make. */
#include "settings_fixture.h"

static const char written[] = "kvant-settings 1\n"
                              "model A Model 135M\n"
                              "fingerprint 0123456789abcdef\n"
                              "layers 5\n"
                              "calibration fedcba9876543210 a model.kvcal\n"
                              "k 0,2-4 3x64 turboquant-4:center=first\n"
                              "k 1 3x64 f16\n"
                              "v 0-2,4/0,4/2 3x32 turboquant-3\n"
                              "v 3 1x32 turboquant-3\n"
                              "v 4/1 3x32 int-2:group=32\n";

/* Writes the body and its checksum. */
static void write_sealed(const char *path, const char *body, size_t n)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(body, 1, n, file), n);
    fprintf(file, "check %016llx\n", (unsigned long long)kvant_fnv1a(KVANT_FNV_START, body, n));
    assert_int_equal(fclose(file), 0);
}

static size_t read_back(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    size_t n = fread(text, 1, room, file);
    fclose(file);
    return n;
}

static void assert_usual(const kvant_settings *settings)
{
    kvant_settings_info info = { .size = sizeof info };
    assert_int_equal(kvant_settings_get_info(settings, &info), KVANT_OK);
    assert_string_equal(info.model, "A Model 135M");
    assert_true(info.model_fingerprint == 0x0123456789abcdefu);
    assert_int_equal(info.n_layers, LAYERS);
    assert_string_equal(info.calibration, "a model.kvcal");
    assert_true(info.calibration_checksum == 0xfedcba9876543210u);
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        kvant_settings_layer layer;
        assert_ok(kvant_settings_get_layer(settings, i / 2, (kvant_role)(i % 2), &layer));
        assert_true((layer.spec == NULL) == (layers[i].spec == NULL));
        assert_true((layer.heads == NULL) == (layers[i].heads == NULL));
        for (uint32_t h = 0; layer.heads && h < layer.n_kv_heads; h++)
            assert_string_equal(layer.heads[h], layers[i].heads[h]);
        if (layer.spec)
            assert_string_equal(layer.spec, layers[i].spec);
        assert_int_equal(layer.n_kv_heads, layers[i].n_kv_heads);
        assert_int_equal(layer.head_dim, layers[i].head_dim);
    }
}

CASE(file_is_as_documented_and_comes_back)
{
    const kvant_settings_config config = usual_config();
    kvant_settings *made = create(&config), *loaded;
    char text[1024], err[256] = "";
    assert_usual(made);
    assert_int_equal(kvant_settings_save(made, in_folder("usual"), err, sizeof err), KVANT_OK);
    size_t n = read_back(in_folder("usual"), text, sizeof text);
    assert_int_equal(n, sizeof written - 1 + 23);
    assert_memory_equal(text, written, sizeof written - 1);
    assert_int_equal(kvant_settings_load(in_folder("usual"), &loaded, err, sizeof err), KVANT_OK);
    assert_usual(loaded);
    assert_int_equal(kvant_settings_save(loaded, in_folder("again"), err, sizeof err), KVANT_OK);
    char again[1024];
    assert_int_equal(read_back(in_folder("again"), again, sizeof again), n);
    assert_memory_equal(again, text, n);
    kvant_settings_free(&made);
    kvant_settings_free(&loaded);
    assert_null(loaded);
    kvant_settings_free(&loaded);
    kvant_settings_free(NULL);
}

/* Settings without a name, a fingerprint and a calibration; then settings with another spec for
 * every layer, up to the limit. */
CASE(smallest_and_largest_come_back)
{
    static char specs[2 * KVANT_SETTINGS_MAX_LAYERS][16];
    static kvant_settings_layer many[2 * KVANT_SETTINGS_MAX_LAYERS];
    const kvant_settings_layer one[2] = { { "f16", 1, 1, NULL }, { "f16", 4096, 512, NULL } };
    kvant_settings_config config = { .size = sizeof config, .n_layers = 1, .layers = one };
    for (uint32_t i = 0; i < COUNT(many); i++) {
        snprintf(specs[i], sizeof specs[i], "codec-%u", (unsigned)i);
        many[i] = (kvant_settings_layer){ specs[i], 8, 128, NULL };
    }
    for (int large = 0; large < 2; large++) {
        kvant_settings *made = create(&config), *loaded;
        char err[256] = "";
        assert_int_equal(kvant_settings_save(made, in_folder("size"), err, sizeof err), KVANT_OK);
        if (kvant_settings_load(in_folder("size"), &loaded, err, sizeof err) != KVANT_OK)
            fail_msg("%s", err);
        for (uint32_t i = 0; i < 2 * config.n_layers; i++) {
            kvant_settings_layer layer;
            assert_ok(kvant_settings_get_layer(loaded, i / 2, (kvant_role)(i % 2), &layer));
            assert_string_equal(layer.spec, config.layers[i].spec);
        }
        kvant_settings_free(&made);
        kvant_settings_free(&loaded);
        config.n_layers = KVANT_SETTINGS_MAX_LAYERS;
        config.layers = many;
    }
}

/* Any single changed byte, and every shorter file. */
CASE(damage_anywhere_is_found)
{
    char text[1024], err[256];
    kvant_settings *settings;
    write_sealed(in_folder("whole"), written, sizeof written - 1);
    size_t n = read_back(in_folder("whole"), text, sizeof text);
    for (size_t i = 0; i < 2 * n; i++) {
        FILE *file = fopen(in_folder("damaged"), "wb");
        assert_non_null(file);
        if (i < n) {
            text[i] ^= 1;
            fwrite(text, 1, n, file);
            text[i] ^= 1;
        } else {
            fwrite(text, 1, i - n, file);
        }
        fclose(file);
        err[0] = 0;
        assert_int_equal(kvant_settings_load(in_folder("damaged"), &settings, err, sizeof err),
                         KVANT_ERR_FORMAT);
        assert_null(settings);
        assert_true(err[0] != 0);
    }
}

/* Breaks every rule of the format under a right checksum. The error names the line. */
CASE(every_rule_names_its_line)
{
    static const struct {
        const char *body, *said;
    } cases[] = {
        { "kvant-settings 2\nlayers 1\nk 0 1x1 f16\nv 0 1x1 f16\n", "version 2" },
        { "kvant-settings one\nlayers 1\nk 0 1x1 f16\nv 0 1x1 f16\n", "line 1" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 f16\nv 0 1x1 f16\nw 0 1x1 f16\n",
          "line 5: it does not begin with" },
        { "kvant-settings 1\nlayers 1\n\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3: it does not begin with" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 f16\nv 0 1x1 f16\r\n",
          "line 4: it holds a control" },
        { "kvant-settings 1\nk 0 1x1 f16\nv 0 1x1 f16\nlayers 1\n",
          "line 2: the number of layers has to come" },
        { "kvant-settings 1\nmodel nothing else is said here at all\n", "how many layers" },
        { "kvant-settings 1\nlayers 1\nlayers 1\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3: the number of layers is given" },
        { "kvant-settings 1\nlayers 0\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 2: the number of layers is 1" },
        { "kvant-settings 1\nlayers 4097\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 2: the number of layers is 1" },
        { "kvant-settings 1\nlayers 01\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 2: the number of layers is 1" },
        { "kvant-settings 1\nlayers 18446744073709551617\nk 0 1x1 f16\nv 0 1x1 f16\n", "line 2" },
        { "kvant-settings 1\nlayers 1\nmodel a\nmodel b\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 4: the model is" },
        { "kvant-settings 1\nlayers 1\nmodel \nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3: a model's name" },
        { "kvant-settings 1\nlayers 1\nfingerprint 0\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3: a fingerprint" },
        { "kvant-settings 1\nlayers 1\nfingerprint 0000000000000000\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3" },
        { "kvant-settings 1\nlayers 1\nfingerprint 0123456789ABCDEF\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3" },
        { "kvant-settings 1\nlayers 1\nfingerprint 0123456789abcdef0\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3" },
        { "kvant-settings 1\nlayers 1\ncalibration a.kvcal\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3: calibration is" },
        { "kvant-settings 1\nlayers 1\ncalibration 0123456789abcdef \nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 3" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 f16\nk 0 1x1 f16\nv 0 1x1 f16\n",
          "line 4: keys of layer 0 are given" },
        { "kvant-settings 1\nlayers 2\nk 0-1 1x1 f16\nv 1,0,1 1x1 f16\n",
          "line 4: values of layer 1 are given twice" },
        { "kvant-settings 1\nlayers 2\nk 0-1 1x1 f16\nv 0 1x1 f16\n",
          "no codec for values of layer 1" },
        { "kvant-settings 1\nlayers 2\nk 0-2 1x1 f16\nv 0-1 1x1 f16\n",
          "line 3: layers are written as 0-3,7 or, for kv head 1 of layer 7, 7/1; they are 0 to "
          "1" },
        { "kvant-settings 1\nlayers 1\nk 0/ 1x1 f16\nv 0 1x1 f16\n", "line 3: layers are written" },
        { "kvant-settings 1\nlayers 2\nk 0-1/0 1x1 f16\nv 0-1 1x1 f16\n",
          "line 3: layers are followed by" },
        { "kvant-settings 1\nlayers 1\nk 0/4096 2x1 f16\nv 0 1x1 f16\n",
          "line 3: layers are written" },
        { "kvant-settings 1\nlayers 1\nk 0/2 2x1 f16\nv 0 1x1 f16\n",
          "line 3: keys of layer 0 do not have that kv head" },
        { "kvant-settings 1\nlayers 1\nk 0/0 2x1 f16\nv 0 2x1 f16\n",
          "keys of layer 0 in one of its kv heads" },
        { "kvant-settings 1\nlayers 1\nk 0/0,0/1,0/0 2x1 f16\nv 0 2x1 f16\n",
          "line 3: keys of layer 0 are given twice" },
        { "kvant-settings 1\nlayers 1\nk 0/0 2x1 f16\nk 0 2x1 f32\nv 0 2x1 f16\n",
          "line 4: keys of layer 0 are given twice" },
        { "kvant-settings 1\nlayers 1\nk 0 2x1 f16\nk 0/1 2x1 f32\nv 0 2x1 f16\n",
          "line 4: keys of layer 0 are given twice" },
        { "kvant-settings 1\nlayers 1\nk 0/0 2x1 f16\nk 0/1 2x2 f16\nv 0 2x1 f16\n",
          "line 4: keys of layer 0 are given two shapes" },
        { "kvant-settings 1\nlayers 5\nk 0/0,1/0,2/0,3/0,4/0 4096x1 f16\nv 0 2x1 f16\n",
          "line 3: the settings have more than 16384 codecs" },
        { "kvant-settings 1\nlayers 2\nk 1-0 1x1 f16\nv 0-1 1x1 f16\n",
          "line 3: layers are written" },
        { "kvant-settings 1\nlayers 2\nk 0-1,1x1 f16\nv 0-1 1x1 f16\n", "line 3" },
        { "kvant-settings 1\nlayers 2\nk  1x1 f16 and so on\nv 0-1 1x1 f16\n",
          "line 3: layers are written" },
        { "kvant-settings 1\nlayers 1\nk 0 0x1 f16\nv 0 1x1 f16\n", "line 3: 0 kv heads" },
        { "kvant-settings 1\nlayers 1\nk 0 1x513 f16\nv 0 1x1 f16\n",
          "line 3: layers are followed by their shape" },
        { "kvant-settings 1\nlayers 1\nk 0 4097x1 f16\nv 0 1x1 f16\n",
          "line 3: layers are followed by their shape" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 \nv 0 1x1 f16\n",
          "line 3: the shape is followed by a codec" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 f16 \nv 0 1x1 f16\n",
          "line 3: 'f16 ' is not a codec" },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 int-4:a=1,a=2\nv 0 1x1 f16\n",
          "line 3: option 'a' is given twice" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char err[256] = "";
        kvant_settings *settings;
        write_sealed(in_folder("rule"), cases[i].body, strlen(cases[i].body));
        assert_int_equal(kvant_settings_load(in_folder("rule"), &settings, err, sizeof err),
                         KVANT_ERR_FORMAT);
        assert_null(settings);
        if (!strstr(err, cases[i].said))
            fail_msg("case %zu says \"%s\", not \"%s\"", i, err, cases[i].said);
    }
}

CASE(long_words_are_refused)
{
    char body[8192], word[2048], err[256] = "";
    kvant_settings *settings;
    static const struct {
        const char *format;
        int fits;
    } cases[] = {
        { "kvant-settings 1\nlayers 1\nmodel %s\nk 0 1x1 f16\nv 0 1x1 f16\n", 255 },
        { "kvant-settings 1\nlayers 1\ncalibration 0123456789abcdef %s\nk 0 1x1 f16\nv 0 1x1 f16\n",
          1023 },
        { "kvant-settings 1\nlayers 1\nk 0 1x1 %s\nv 0 1x1 f16\n", 255 }
    };
    memset(word, 'w', sizeof word);
    for (size_t i = 0; i < COUNT(cases); i++)
        for (int more = 0; more < 2; more++) {
            word[cases[i].fits + more] = 0;
            snprintf(body, sizeof body, cases[i].format, word);
            word[cases[i].fits + more] = 'w';
            write_sealed(in_folder("long"), body, strlen(body));
            kvant_status status =
                kvant_settings_load(in_folder("long"), &settings, err, sizeof err);
            assert_int_equal(status, more ? KVANT_ERR_FORMAT : KVANT_OK);
            kvant_settings_free(&settings);
        }
}

CASE(other_files_are_refused)
{
    char err[256] = "";
    kvant_settings *settings;
    assert_int_equal(kvant_settings_load(in_folder("absent"), &settings, err, sizeof err),
                     KVANT_ERR_IO);
    assert_non_null(strstr(err, "No such file"));
    assert_int_equal(kvant_settings_load(folder, &settings, err, sizeof err), KVANT_ERR_IO);
    FILE *file = fopen(in_folder("large"), "wb");
    assert_non_null(file);
    fputs("kvant-settings 1\n", file);
    assert_int_equal(ftruncate(fileno(file), KVANT_SETTINGS_MAX_BYTES + 1), 0);
    fclose(file);
    assert_int_equal(kvant_settings_load(in_folder("large"), &settings, err, sizeof err),
                     KVANT_ERR_FORMAT);
    assert_non_null(strstr(err, "more than the format allows"));
    write_sealed(in_folder("other"), "GGUF this is another kind of file, long enough to be read\n",
                 58);
    assert_int_equal(kvant_settings_load(in_folder("other"), &settings, err, sizeof err),
                     KVANT_ERR_FORMAT);
    assert_non_null(strstr(err, "not a settings file"));
}

CASE(wrong_arguments_are_refused)
{
    kvant_settings_config good = usual_config(), bad;
    kvant_settings_layer wrong[2 * LAYERS];
    kvant_settings *settings = NULL;
    kvant_settings_layer layer;
    char err[256] = "", name[300];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    assert_int_equal(kvant_settings_create(NULL, &settings, err, sizeof err), KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_settings_create(&good, NULL, err, sizeof err), KVANT_ERR_ARGUMENT);
#define REFUSED(field, value, status)                                                              \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.field = (value);                                                                       \
        assert_int_equal(kvant_settings_create(&bad, &settings, err, sizeof err), status);         \
        assert_null(settings);                                                                     \
    } while (0)
    REFUSED(size, 1, KVANT_ERR_ARGUMENT);
    REFUSED(layers, NULL, KVANT_ERR_ARGUMENT);
    REFUSED(n_layers, 0, KVANT_ERR_ARGUMENT);
    REFUSED(n_layers, KVANT_SETTINGS_MAX_LAYERS + 1, KVANT_ERR_ARGUMENT);
    REFUSED(calibration, "", KVANT_ERR_ARGUMENT);
    REFUSED(calibration, "a\nb", KVANT_ERR_ARGUMENT);
    REFUSED(model, name, KVANT_ERR_ARGUMENT);
    memcpy(wrong, layers, sizeof wrong);
    wrong[3].spec = NULL;
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3].spec = "f16\nlayers 1";
    REFUSED(layers, wrong, KVANT_ERR_SPEC);
    wrong[3] = (kvant_settings_layer){ "f16", 0, 64, NULL };
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3] = (kvant_settings_layer){ "f16", 1, 513, NULL };
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3] = (kvant_settings_layer){ "f16", 3, 64, heads };
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3] = (kvant_settings_layer){ NULL, 0, 64, heads };
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3] = (kvant_settings_layer){ NULL, 3, 64, (const char *const[]){ "f16", NULL, "f16" } };
    REFUSED(layers, wrong, KVANT_ERR_ARGUMENT);
    wrong[3] = (kvant_settings_layer){ NULL, 3, 64, (const char *const[]){ "f16", "f16", "f 16" } };
    REFUSED(layers, wrong, KVANT_ERR_SPEC);
#undef REFUSED
    settings = create(&good);
    assert_int_equal(kvant_settings_get_layer(settings, LAYERS, KVANT_ROLE_K, &layer),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_settings_get_layer(settings, 0, (kvant_role)2, &layer),
                     KVANT_ERR_ARGUMENT);
    assert_int_equal(kvant_settings_save(settings, in_folder("no/such/folder"), err, sizeof err),
                     KVANT_ERR_IO);
    kvant_settings_free(&settings);
    assert_int_equal(kvant_settings_load(NULL, &settings, err, sizeof err), KVANT_ERR_ARGUMENT);
}

RUN_CASES(make_folder, remove_folder)
