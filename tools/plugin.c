/* plugin.c - finds the plug-in in folders relative to the command, checks and exports its
 * settings. */
#include "plugin.h"

#include "command.h"
#include "fingerprint.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PLUGIN_FILE KVANT_OS_LIBRARY("ggml-kvant")

static bool own_folder(char *folder, size_t bytes)
{
    if (!os_own_path(folder, bytes))
        return false;
    const size_t n = (size_t)(kvant_os_file_name(folder) - folder);
    folder[n > 0 ? n - 1 : 0] = 0;
    return n > 0;
}

/* The folder of the two, relative to the program's, that has the file. */
static bool beside_command(const char *const places[2], const char *file, char *path, size_t bytes)
{
    char folder[OS_MAX_PATH];
    if (!own_folder(folder, sizeof folder))
        return false;
    for (size_t i = 0; i < 2; i++) {
        char candidate[OS_MAX_PATH + 128];
        snprintf(candidate, sizeof candidate, "%s/%s/%s", folder, places[i], file);
        if (os_resolve(candidate, path, bytes))
            return true;
    }
    return false;
}

/* The build folder has ../lib; an installation may have ../lib64 or ../lib/<triplet>. */
bool library_beside_command(const char *file, char *path, size_t bytes)
{
    static const char *const places[] = { "../lib", KVANT_PLUGIN_FOLDER };
    return beside_command(places, file, path, bytes);
}

bool data_beside_command(char *path, size_t bytes)
{
    static const char *const places[] = { "../share/kvant", KVANT_DATA_FOLDER };
    return beside_command(places, "", path, bytes);
}

bool plugin_path(char *path, size_t bytes)
{
    const char *forced = getenv(PLUGIN_ENV_PATH);
    if (forced != NULL && forced[0] != 0) {
        if (os_resolve(forced, path, bytes))
            return true;
        return complain("%s=%s: %s", PLUGIN_ENV_PATH, forced, strerror(errno));
    }
    if (library_beside_command(PLUGIN_FILE, path, bytes))
        return true;
    char folder[OS_MAX_PATH];
    if (own_folder(folder, sizeof folder)) {
        complain("the plug-in %s/../lib/" PLUGIN_FILE " is missing", folder);
        hint("build it with `make`, or set %s to its path", PLUGIN_ENV_PATH);
    } else {
        complain("cannot find the folder of this program, which the plug-in is next to");
        hint("set %s to the path of " PLUGIN_FILE, PLUGIN_ENV_PATH);
    }
    return false;
}

/* 5000 rounds are about 0.1 ms. Barriers of a model on idle cores are shorter, so nothing is lost
 * there. With libgomp's own 300000 rounds a thread spins for milliseconds while the system runs
 * another program in place of the thread that it waits for. */
bool plugin_limit_spinning(void)
{
    if (getenv("OMP_WAIT_POLICY") != NULL || os_set_default("GOMP_SPINCOUNT", "5000"))
        return true;
    return complain("cannot set the environment: %s", strerror(errno));
}

bool plugin_set(const kvant_scheme_params *p, const kvant_scheme *scheme, bool fp32)
{
    char protect[16];
    kvant_scheme_info info = { .size = sizeof info };
    if (scheme != NULL)
        kvant_scheme_get_info(scheme, &info);
    snprintf(protect, sizeof protect, "%lu", (unsigned long)info.protect);
    if (os_set_variable(PLUGIN_ENV_PRESET, info.preset) &&
        os_set_variable(PLUGIN_ENV_CONFIG, p->settings) &&
        os_set_variable(PLUGIN_ENV_K, info.preset != NULL ? NULL : info.k) &&
        os_set_variable(PLUGIN_ENV_V, info.preset != NULL ? NULL : info.v) &&
        os_set_variable(PLUGIN_ENV_PROTECT, info.protect > 0 ? protect : NULL) &&
        os_set_variable(PLUGIN_ENV_PROTECT_CODEC, p->protect_codec) &&
        os_set_variable(PLUGIN_ENV_CALIBRATION, info.calibration_path) &&
        os_set_variable(PLUGIN_ENV_FP32, fp32 ? "1" : NULL))
        return true;
    return complain("cannot set the environment: %s", strerror(errno));
}

uint64_t plugin_fingerprint(void)
{
    char path[OS_MAX_PATH];
    return plugin_path(path, sizeof path) ? fingerprint_whole_file(path) : 0;
}
