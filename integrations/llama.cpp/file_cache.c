/* file_cache.c - see file_cache.h. */
#define _POSIX_C_SOURCE 200809L /* st_mtim */

#include "file_cache.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>
#include <sys/stat.h>

typedef kvant_status load_fn(const char *path, void **content, char *err, size_t errlen);

struct file {
    struct file *next;
    load_fn *load; /* what kind of file it is */
    void *content;
    struct timespec changed;
    off_t size;
    char path[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct file *files;

static kvant_status load_calibration(const char *path, void **content, char *err, size_t errlen)
{
    kvant_calibration *calibration;
    kvant_status status = kvant_calibration_load(path, &calibration, err, errlen);

    *content = calibration;
    return status;
}

static kvant_status load_settings(const char *path, void **content, char *err, size_t errlen)
{
    kvant_settings *settings;
    kvant_status status = kvant_settings_load(path, &settings, err, errlen);

    *content = settings;
    return status;
}

static const void *find(load_fn *load, const char *path, const struct stat *state)
{
    for (const struct file *f = files; f != NULL; f = f->next)
        if (f->load == load && strcmp(f->path, path) == 0 && f->size == state->st_size &&
            f->changed.tv_sec == state->st_mtim.tv_sec && f->changed.tv_nsec == state->st_mtim.tv_nsec)
            return f->content;
    return NULL;
}

static const void *add(load_fn *load, const char *path, const struct stat *state, char *err, size_t errlen)
{
    size_t length = strlen(path) + 1;
    struct file *f = malloc(sizeof(*f) + length);

    if (f == NULL) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        return NULL;
    }
    *f = (struct file){ .next = files, .load = load, .changed = state->st_mtim, .size = state->st_size };
    memcpy(f->path, path, length);
    if (load(path, &f->content, err, errlen) != KVANT_OK) {
        free(f);
        return NULL;
    }
    files = f;
    return f->content;
}

static const void *get(load_fn *load, const char *path, char *err, size_t errlen)
{
    const void *content;
    struct stat state = { 0 }; /* a file that cannot be seen cannot be read either; the loader says why */

    stat(path, &state);
    pthread_mutex_lock(&lock);
    content = find(load, path, &state);
    if (content == NULL)
        content = add(load, path, &state, err, errlen);
    pthread_mutex_unlock(&lock);
    return content;
}

const kvant_calibration *kvp_calibration_get(const char *path, char *err, size_t errlen)
{
    return get(load_calibration, path, err, errlen);
}

const kvant_settings *kvp_config_get(const char *path, char *err, size_t errlen)
{
    return get(load_settings, path, err, errlen);
}
