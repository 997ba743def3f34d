/* codec_cache.c - see codec_cache.h. A list suffices: a process uses a few configurations, each for the few
 * head dimensions that divide the model's row. */
#include "codec_cache.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    struct entry *next;
    kvant_codec *codec;
    uint32_t head_dim;
    kvant_role role;
    uint64_t seed;
    char spec[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

static const kvant_codec *find(const char *spec, uint32_t head_dim, kvant_role role, uint64_t seed)
{
    for (const struct entry *e = entries; e != NULL; e = e->next)
        if (e->head_dim == head_dim && e->role == role && e->seed == seed && strcmp(e->spec, spec) == 0)
            return e->codec;
    return NULL;
}

static const kvant_codec *create(const char *spec, uint32_t head_dim, kvant_role role, uint64_t seed, char *err,
                                 size_t errlen)
{
    size_t length = strlen(spec) + 1;
    struct entry *e = malloc(sizeof(*e) + length);

    if (e == NULL) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        return NULL;
    }
    *e = (struct entry){ .next = entries, .head_dim = head_dim, .role = role, .seed = seed };
    memcpy(e->spec, spec, length);
    if (kvant_codec_create(spec, head_dim, role, seed, &e->codec, err, errlen) != KVANT_OK) {
        free(e);
        return NULL;
    }
    entries = e;
    return e->codec;
}

const kvant_codec *kvp_codec_get(const char *spec, uint32_t head_dim, kvant_role role, uint64_t seed, char *err,
                                 size_t errlen)
{
    const kvant_codec *codec;

    pthread_mutex_lock(&lock);
    codec = find(spec, head_dim, role, seed);
    if (codec == NULL)
        codec = create(spec, head_dim, role, seed, err, errlen);
    pthread_mutex_unlock(&lock);
    return codec;
}
