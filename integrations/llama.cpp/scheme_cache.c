/* scheme_cache.c - see scheme_cache.h. */
#define _POSIX_C_SOURCE 200809L /* st_mtim */

#include "scheme_cache.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_KEY 8192u

struct entry {
    struct entry *next;
    kvant_scheme *scheme;
    char key[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

static void add_text(char *key, const char *text)
{
    size_t used = strlen(key);

    snprintf(key + used, MAX_KEY - used, "%s\n", text != NULL ? text : "\t");
}

/* Path, size and time of change: a file that cannot be seen cannot be read either, and the loader
 * says why. */
static void add_file(char *key, const char *path)
{
    struct stat state = { 0 };
    size_t used;

    add_text(key, path);
    if (path != NULL)
        stat(path, &state);
    used = strlen(key);
    snprintf(key + used, MAX_KEY - used, "%jd %jd %ld\n", (intmax_t)state.st_size, (intmax_t)state.st_mtim.tv_sec,
             state.st_mtim.tv_nsec);
}

static void write_key(const kvant_scheme_params *params, char *key)
{
    size_t used;

    key[0] = '\0';
    add_text(key, params->preset);
    add_text(key, params->k);
    add_text(key, params->v);
    add_text(key, params->protect_codec);
    add_file(key, params->settings);
    add_file(key, params->calibration);
    used = strlen(key);
    snprintf(key + used, MAX_KEY - used, "%" PRIu32 " %" PRIu64, params->protect, params->seed);
}

static kvant_scheme *create(const kvant_scheme_params *params, const char *key)
{
    struct entry *entry = malloc(sizeof(*entry) + strlen(key) + 1);

    if (entry == NULL)
        return NULL;
    strcpy(entry->key, key);
    if (kvant_scheme_create(params, &entry->scheme) != KVANT_OK) {
        free(entry);
        return NULL;
    }
    entry->next = entries;
    entries = entry;
    return entry->scheme;
}

kvant_scheme *kvp_scheme_get(const kvant_scheme_params *params)
{
    char key[MAX_KEY];
    kvant_scheme *scheme = NULL;

    write_key(params, key);
    pthread_mutex_lock(&lock);
    for (const struct entry *e = entries; e != NULL && scheme == NULL; e = e->next)
        if (strcmp(e->key, key) == 0)
            scheme = e->scheme;
    if (scheme == NULL)
        scheme = create(params, key);
    pthread_mutex_unlock(&lock);
    return scheme;
}
