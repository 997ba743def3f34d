/* A settings file: a codec for the keys and the values of each layer, written and read again.
 *
 *     cc settings.c $(pkg-config --cflags --libs kvant) -o settings && ./settings FOLDER
 *
 * `kvant tune` finds good ones for a model. */
#include <kvant/calibration.h>
#include <kvant/settings.h>

#include "example.h"

enum { LAYERS = 2, KV_HEADS = 2, DIM = 128 };

/* The specs of a preset, layer by layer; values of layer 1 get a codec of their own. */
static kvant_settings *make_settings(void)
{
    kvant_settings_layer layers[2 * LAYERS];
    kvant_preset preset = { .size = sizeof preset };
    kvant_settings *settings;
    check(kvant_preset_get("tiny", 0, &preset));
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        const kvant_role role = i % 2 ? KVANT_ROLE_V : KVANT_ROLE_K;
        layers[i] = (kvant_settings_layer){ .spec = kvant_preset_spec(&preset, role, i / 2, DIM),
                                            .n_kv_heads = KV_HEADS,
                                            .head_dim = DIM };
    }
    layers[3].spec = "int-8";
    const kvant_settings_config config = {
        .size = sizeof config, .model = "example", .n_layers = LAYERS, .layers = layers
    };
    check(kvant_settings_create(&config, &settings, NULL, 0));
    return settings;
}

int main(int argc, char **argv)
{
    char file[512], reason[256];
    snprintf(file, sizeof file, "%s/example.kvant", argc > 1 ? argv[1] : ".");
    kvant_settings *settings = make_settings();
    check(kvant_settings_save(settings, file, NULL, 0));
    kvant_settings_free(&settings);

    if (kvant_settings_load(file, &settings, reason, sizeof reason) != KVANT_OK) {
        fprintf(stderr, "%s\n", reason); /* names the line that is wrong */
        return 1;
    }
    kvant_settings_info info = { .size = sizeof info };
    kvant_calibration *calibration;
    check(kvant_settings_get_info(settings, &info));
    /* From the path that the settings name; NULL if they need none. */
    check(kvant_settings_load_calibration(settings, NULL, &calibration, NULL, 0));
    check(kvant_settings_check(settings, calibration, NULL, 0));
    for (uint32_t layer = 0; layer < info.n_layers; layer++) {
        kvant_settings_layer k, v;
        check(kvant_settings_get_layer(settings, layer, KVANT_ROLE_K, &k));
        check(kvant_settings_get_layer(settings, layer, KVANT_ROLE_V, &v));
        printf("layer %u: keys %s, values %s\n", (unsigned)layer, k.spec, v.spec);
    }
    kvant_calibration_free(&calibration);
    kvant_settings_free(&settings);
    return remove(file) != 0;
}
