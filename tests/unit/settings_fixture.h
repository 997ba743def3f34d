/* settings_fixture.h - settings that the tests write, and the folder of their files. */
#ifndef KVANT_TESTS_SETTINGS_FIXTURE_H
#define KVANT_TESTS_SETTINGS_FIXTURE_H

#include "testing.h"

#include <kvant/calibration.h>
#include <kvant/settings.h>

#include <unistd.h>

#include "../../src/base/fnv.h"
#include "calibrated.h"

#define LAYERS 5u

static char folder[] = "/tmp/kvant-settings-XXXXXX";

static inline const char *in_folder(const char *name)
{
    static char path[4][256];
    static unsigned next;
    char *to = path[next++ % 4];
    snprintf(to, sizeof path[0], "%s/%s", folder, name);
    return to;
}

static inline int make_folder(void **state)
{
    return mkdtemp(folder) ? 0 : -1;
}

static inline int remove_folder(void **state)
{
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command);
}

static const char *const heads[] = { "turboquant-3", "int-2:group=32", "turboquant-3" };

static const kvant_settings_layer layers[2 * LAYERS] = {
    { "turboquant-4:center=first", 3, 64, NULL },
    { "turboquant-3", 3, 32, NULL },
    { "f16", 3, 64, NULL },
    { "turboquant-3", 3, 32, NULL },
    { "turboquant-4:center=first", 3, 64, NULL },
    { "turboquant-3", 3, 32, NULL },
    { "turboquant-4:center=first", 3, 64, NULL },
    { "turboquant-3", 1, 32, NULL },
    { "turboquant-4:center=first", 3, 64, NULL },
    { NULL, 3, 32, heads },
};

static inline kvant_settings_config usual_config(void)
{
    return (kvant_settings_config){ .size = sizeof(kvant_settings_config),
                                    .model = " A\nModel 135M ",
                                    .model_fingerprint = 0x0123456789abcdefu,
                                    .n_layers = LAYERS,
                                    .layers = layers,
                                    .calibration = "a model.kvcal",
                                    .calibration_checksum = 0xfedcba9876543210u };
}

static inline kvant_settings *create(const kvant_settings_config *config)
{
    kvant_settings *settings;
    char err[256] = "";
    if (kvant_settings_create(config, &settings, err, sizeof err) != KVANT_OK)
        fail_msg("%s", err);
    return settings;
}

#endif
