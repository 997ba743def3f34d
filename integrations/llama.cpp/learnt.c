/* learnt.c - see learnt.h. */
#define _POSIX_C_SOURCE 200809L /* getline */

#include "learnt.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"

/* The model */

static bool is_model(const char *path)
{
    struct stat state;
    char magic[4] = "";
    FILE *file = NULL;

    if (stat(path, &state) == 0 && S_ISREG(state.st_mode)) /* opening a device may do something */
        file = fopen(path, "rbe");
    if (file == NULL)
        return false;
    bool ok = fread(magic, 1, sizeof(magic), file) == sizeof(magic) && memcmp(magic, "GGUF", sizeof(magic)) == 0;
    fclose(file);
    return ok;
}

/* The first part stands for all of model-00002-of-00003.gguf. */
static void name_first_part(char *path)
{
    static const char pattern[] = "-00000-of-00000.gguf";
    const size_t n = sizeof(pattern) - 1, length = strlen(path);
    char *end = path + length - n;

    if (length < n)
        return;
    for (size_t i = 0; i < n; i++)
        if (pattern[i] == '0' ? end[i] < '0' || end[i] > '9' : end[i] != pattern[i])
            return;
    memcpy(end + 1, "00001", 5);
}

/* The path of a line of /proc/self/maps; false when it is no file's, or too long. */
static bool mapped_path(char *line, char *path)
{
    const char *at = strchr(line, '/');

    line[strcspn(line, "\n")] = '\0';
    if (at == NULL || strlen(at) >= KVP_LEARNT_PATH)
        return false;
    strcpy(path, at);
    return true;
}

/* The only model whose file is mapped. Of several it is not known which one a context runs. */
static size_t count_mapped(char *model)
{
    char path[KVP_LEARNT_PATH], last[KVP_LEARNT_PATH] = "", *line = NULL;
    FILE *maps = fopen("/proc/self/maps", "re");
    size_t n = 0, bytes = 0;

    while (maps != NULL && getline(&line, &bytes, maps) > 0) {
        if (!mapped_path(line, path) || strcmp(path, last) == 0)
            continue;
        strcpy(last, path);
        if (!is_model(path))
            continue;
        name_first_part(path);
        n += n == 0 || strcmp(path, model) != 0;
        strcpy(model, path);
    }
    free(line);
    if (maps != NULL)
        fclose(maps);
    return n;
}

static bool find_model(char *model)
{
    const char *given = getenv("KVANT_MODEL");
    const size_t n = count_mapped(model);

    if (n != 0 || given == NULL || strlen(given) >= KVP_LEARNT_PATH || !is_model(given))
        return n == 1;
    strcpy(model, given);
    return true;
}

/* The folder */

/* Each folder that is missing; only the user can read them. */
static bool make_folders(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        const bool ok = mkdir(path, 0700) == 0 || errno == EEXIST;
        *slash = '/';
        if (!ok)
            return false;
    }
    return true;
}

static bool is_absolute(const char *path)
{
    return path != NULL && path[0] == '/';
}

/* Where the file of this model goes, if there can be one. */
static void choose_path(kvp_learnt *learnt)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const bool xdg = is_absolute(cache);
    int n = 0;

    if (xdg || is_absolute(home))
        n = snprintf(learnt->path, sizeof(learnt->path), "%s%s/kvant/learnt/%016" PRIx64 ".kvcal", xdg ? cache : home,
                     xdg ? "" : "/.cache", learnt->fingerprint);
    if (n <= 0 || (size_t)n >= sizeof(learnt->path))
        learnt->path[0] = '\0';
}

static bool can_be_written(kvp_learnt *learnt)
{
    char *slash = strrchr(learnt->path, '/');

    if (!make_folders(learnt->path))
        return false;
    *slash = '\0';
    const bool ok = access(learnt->path, W_OK | X_OK) == 0;
    *slash = '/';
    return ok;
}

/* The files */

static bool is_of_model(const char *path, uint64_t fingerprint, char *err, size_t errlen)
{
    kvant_calibration *calibration;
    kvant_calibration_info info = { .size = sizeof(info) };

    if (kvant_calibration_load(path, &calibration, err, errlen) != KVANT_OK)
        return false;
    kvant_calibration_get_info(calibration, &info);
    kvant_calibration_free(&calibration);
    if (info.model_fingerprint != fingerprint)
        snprintf(err, errlen, "it was made with another model");
    return info.model_fingerprint == fingerprint;
}

static bool use(kvp_learnt *learnt, const char *path)
{
    static atomic_flag said = ATOMIC_FLAG_INIT; /* a program may plan with contexts before it creates its own */
    char err[512] = "";

    if (path[0] == '\0' || access(path, F_OK) != 0)
        return false;
    if (!is_of_model(path, learnt->fingerprint, err, sizeof(err))) {
        if (!atomic_flag_test_and_set(&said))
            kvp_say("%s is not used: %s", path, err);
        return false;
    }
    snprintf(learnt->used, sizeof(learnt->used), "%s", path);
    return true;
}

void kvp_learnt_find(kvp_learnt *learnt)
{
    char beside[KVP_LEARNT_PATH + 8];
    size_t length;

    *learnt = (kvp_learnt){ 0 };
    if (!find_model(learnt->model))
        return;
    learnt->fingerprint = kvant_model_fingerprint(learnt->model);
    if (learnt->fingerprint == 0)
        return;
    length = strlen(learnt->model);
    if (length > 5 && strcmp(learnt->model + length - 5, ".gguf") == 0)
        length -= 5;
    snprintf(beside, sizeof(beside), "%.*s.kvcal", (int)length, learnt->model);
    choose_path(learnt);
    if (use(learnt, beside) || use(learnt, learnt->path) || learnt->path[0] == '\0')
        return;
    if (!can_be_written(learnt)) {
        kvp_note("%s cannot be written: %s", learnt->path, strerror(errno));
        learnt->path[0] = '\0';
    }
}

bool kvp_learnt_keep(const kvp_learnt *learnt, const kvant_calibration *calibration, char *err, size_t errlen)
{
    char why[512] = "";

    err[0] = '\0';
    if (access(learnt->path, F_OK) == 0 && is_of_model(learnt->path, learnt->fingerprint, why, sizeof(why)))
        return false;
    return kvant_calibration_save(calibration, learnt->path, err, errlen) == KVANT_OK;
}
