/* model_file.c - see model_file.h. */
#define _POSIX_C_SOURCE 200809L /* getline */

#include "model_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

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
    if (at == NULL || strlen(at) >= KVP_MODEL_PATH)
        return false;
    strcpy(path, at);
    return true;
}

bool kvp_find_model(char *model)
{
    char path[KVP_MODEL_PATH], last[KVP_MODEL_PATH] = "", *line = NULL;
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
    return n == 1;
}
