/* plugin.c - finds the plug-in beside the command, checks and exports its settings. */
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
        complain("%s=%s: %s", PLUGIN_ENV_PATH, forced, strerror(errno));
        return false;
    }
    if (library_beside_command(PLUGIN_FILE, path, bytes))
        return true;
    char folder[PATH_MAX];
    if (own_folder(folder, sizeof folder)) {
        complain("the plug-in %s/../lib/" PLUGIN_FILE " is missing", folder);
        hint("build it with `make`, or set %s to its path", PLUGIN_ENV_PATH);
    } else {
        complain("cannot tell where this program is, so the plug-in cannot be found");
        hint("set %s to the path of " PLUGIN_FILE, PLUGIN_ENV_PATH);
    }
    return false;
}

static bool set_or_unset(const char *name, const char *value)
{
    return value != NULL ? setenv(name, value, 1) == 0 : unsetenv(name) == 0;
}

bool plugin_set(const plugin_settings *s)
{
    char protect[16];
    snprintf(protect, sizeof protect, "%lu", (unsigned long)s->protect);
    if (set_or_unset(PLUGIN_ENV_PRESET, NULL) && set_or_unset(PLUGIN_ENV_CONFIG, s->config) &&
        set_or_unset(PLUGIN_ENV_K, s->k) && set_or_unset(PLUGIN_ENV_V, s->v) &&
        set_or_unset(PLUGIN_ENV_PROTECT, s->protect > 0 ? protect : NULL) &&
        set_or_unset(PLUGIN_ENV_PROTECT_CODEC, s->protect_codec) &&
        set_or_unset(PLUGIN_ENV_CALIBRATION, s->calibration) && set_or_unset(PLUGIN_ENV_FP32, s->fp32 ? "1" : NULL))
        return true;
    complain("cannot set the environment: %s", strerror(errno));
    return false;
}

static bool check_spec(const char *option, const char *spec, kvant_role role, const kvant_calibration *calibration)
{
    char err[512] = "";
    const kvant_status status = kvant_codec_check(spec, role, calibration, err, sizeof err);
    if (status == KVANT_OK)
        return true;
    complain("%s %s: %s", option, spec, err[0] != 0 ? err : kvant_strerror(status));
    if (status == KVANT_ERR_UNSUPPORTED && calibration == NULL)
        hint("--calibration FILE, where a codec needs one; kvant codecs lists what there is");
    else
        hint("kvant codecs lists what there is");
    return false;
}

bool plugin_check(const plugin_settings *s, const kvant_calibration *calibration)
{
    const char *other = s->protect_codec != NULL ? s->protect_codec : PLUGIN_PROTECT_CODEC;
    return check_spec("-k", s->k, KVANT_ROLE_K, calibration) && check_spec("-v", s->v, KVANT_ROLE_V, calibration) &&
           check_spec("--protect-codec", other, KVANT_ROLE_K, calibration) &&
           check_spec("--protect-codec", other, KVANT_ROLE_V, calibration);
}

bool plugin_load_calibration(const char *path, kvant_calibration **calibration)
{
    char err[512] = "";
    *calibration = NULL;
    if (path == NULL)
        return true;
    const kvant_status status = kvant_calibration_load(path, calibration, err, sizeof err);
    if (status == KVANT_OK)
        return true;
    complain("--calibration %s: %s", path, err[0] != 0 ? err : kvant_strerror(status));
    hint("kvant calibrate -m MODEL -f TEXT -o FILE makes one");
    return false;
}

uint64_t plugin_fingerprint(void)
{
    char path[PATH_MAX];
    return plugin_path(path, sizeof path) ? fingerprint_whole_file(path) : 0;
}
