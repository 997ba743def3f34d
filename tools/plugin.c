/* plugin.c - finds the plug-in in folders relative to the command, checks and exports its
 * settings. */
#define _GNU_SOURCE
#include "plugin.h"

#include "command.h"
#include "fingerprint.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLUGIN_FILE "libggml-kvant.so"

static bool own_folder(char *folder, size_t bytes)
{
    const ssize_t n = readlink("/proc/self/exe", folder, bytes - 1);
    if (n <= 0 || (size_t)n >= bytes - 1)
        return false;
    folder[n] = 0;
    char *slash = strrchr(folder, '/');
    if (slash == NULL)
        return false;
    *slash = 0;
    return true;
}

static bool resolve(const char *candidate, char *path, size_t bytes)
{
    char *real = realpath(candidate, NULL);
    const bool ok = real != NULL && access(real, R_OK) == 0 && strlen(real) < bytes;
    if (ok)
        memcpy(path, real, strlen(real) + 1);
    free(real);
    return ok;
}

/* The folder of the two, relative to the program's, that has the file. */
static bool beside_command(const char *const places[2], const char *file, char *path, size_t bytes)
{
    char folder[PATH_MAX];
    if (!own_folder(folder, sizeof folder))
        return false;
    for (size_t i = 0; i < 2; i++) {
        char candidate[PATH_MAX + 128];
        snprintf(candidate, sizeof candidate, "%s/%s/%s", folder, places[i], file);
        if (resolve(candidate, path, bytes))
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
        if (resolve(forced, path, bytes))
            return true;
        return complain("%s=%s: %s", PLUGIN_ENV_PATH, forced, strerror(errno));
    }
    if (library_beside_command(PLUGIN_FILE, path, bytes))
        return true;
    char folder[PATH_MAX];
    if (own_folder(folder, sizeof folder)) {
        complain("the plug-in %s/../lib/" PLUGIN_FILE " is missing", folder);
        hint("build it with `make`, or set %s to its path", PLUGIN_ENV_PATH);
    } else {
        complain("cannot find the folder of this program, which the plug-in is next to");
        hint("set %s to the path of " PLUGIN_FILE, PLUGIN_ENV_PATH);
    }
    return false;
}

static bool set_or_unset(const char *name, const char *value)
{
    return value != NULL ? setenv(name, value, 1) == 0 : unsetenv(name) == 0;
}

/* 5000 rounds are about 0.1 ms. Barriers of a model on idle cores are shorter, so nothing is lost
 * there. With libgomp's own 300000 rounds a thread spins for milliseconds while the system runs
 * another program in place of the thread that it waits for. */
bool plugin_limit_spinning(void)
{
    if (getenv("OMP_WAIT_POLICY") != NULL || setenv("GOMP_SPINCOUNT", "5000", 0) == 0)
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
    if (set_or_unset(PLUGIN_ENV_PRESET, info.preset) &&
        set_or_unset(PLUGIN_ENV_CONFIG, p->settings) &&
        set_or_unset(PLUGIN_ENV_K, info.preset != NULL ? NULL : info.k) &&
        set_or_unset(PLUGIN_ENV_V, info.preset != NULL ? NULL : info.v) &&
        set_or_unset(PLUGIN_ENV_PROTECT, info.protect > 0 ? protect : NULL) &&
        set_or_unset(PLUGIN_ENV_PROTECT_CODEC, p->protect_codec) &&
        set_or_unset(PLUGIN_ENV_CALIBRATION, info.calibration_path) &&
        set_or_unset(PLUGIN_ENV_FP32, fp32 ? "1" : NULL))
        return true;
    return complain("cannot set the environment: %s", strerror(errno));
}

uint64_t plugin_fingerprint(void)
{
    char path[PATH_MAX];
    return plugin_path(path, sizeof path) ? fingerprint_whole_file(path) : 0;
}
