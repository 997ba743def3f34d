/* plugin.c - finds the plug-in beside the command, checks and exports its settings. */
#define _GNU_SOURCE
#include "plugin.h"

#include "command.h"

#include <errno.h>
#include <kvant/codec.h>
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

bool plugin_path(char *path, size_t bytes)
{
    const char *forced = getenv(PLUGIN_ENV_PATH);
    if (forced != NULL && forced[0] != 0) {
        if (resolve(forced, path, bytes))
            return true;
        complain("%s=%s: %s", PLUGIN_ENV_PATH, forced, strerror(errno));
        return false;
    }
    /* The build folder has ../lib; an installation may have ../lib64 or ../lib/<triplet>. */
    static const char *const places[] = { "../lib", KVANT_PLUGIN_FOLDER };
    char folder[PATH_MAX];
    if (!own_folder(folder, sizeof folder)) {
        complain("cannot tell where this program is, so the plug-in cannot be found");
        hint("set %s to the path of " PLUGIN_FILE, PLUGIN_ENV_PATH);
        return false;
    }
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char candidate[PATH_MAX + 128];
        snprintf(candidate, sizeof candidate, "%s/%s/%s", folder, places[i], PLUGIN_FILE);
        if (resolve(candidate, path, bytes))
            return true;
    }
    complain("the plug-in %s/%s/" PLUGIN_FILE " is missing", folder, places[0]);
    hint("build it with `make`, or set %s to its path", PLUGIN_ENV_PATH);
    return false;
}

bool plugin_set_specs(const char *k, const char *v)
{
    if (setenv(PLUGIN_ENV_K, k, 1) == 0 && setenv(PLUGIN_ENV_V, v, 1) == 0)
        return true;
    complain("cannot set the environment: %s", strerror(errno));
    return false;
}

/* Some specs fit some head dimensions only, and the model's is not known here: one that models use is enough,
 * the plug-in checks the model's own. */
static bool check_spec(const char *option, const char *spec, kvant_role role)
{
    static const uint32_t common[] = { 128, 64, 96, 80, 256, 512 };
    char first[512], other[512];
    kvant_status status = KVANT_OK;
    for (size_t i = 0; i < sizeof common / sizeof *common; i++) {
        kvant_codec *codec = NULL;
        char *err = i == 0 ? first : other;
        const kvant_status this_one = kvant_codec_create(spec, common[i], role, 0, &codec, err, sizeof first);
        kvant_codec_free(&codec);
        if (this_one == KVANT_OK)
            return true;
        status = i == 0 ? this_one : status;
    }
    complain("%s %s: %s", option, spec, first[0] != 0 ? first : kvant_strerror(status));
    hint("kvant codecs lists what there is");
    return false;
}

bool plugin_check_specs(const char *k, const char *v)
{
    return check_spec("-k", k, KVANT_ROLE_K) && check_spec("-v", v, KVANT_ROLE_V);
}
