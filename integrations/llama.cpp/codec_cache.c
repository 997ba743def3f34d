/* codec_cache.c - see codec_cache.h. Lists suffice: a process uses a few configurations, each for the few
 * head dimensions that divide the model's row, and at most one codec a kv head with a calibration. */
#include "codec_cache.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

struct entry {
    struct entry *next;
    kvant_codec *codec;
    kvp_codec_site site; /* spec points to text; calibration NULL when the codec is the same everywhere */
    char text[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

static bool same(const kvp_codec_site *a, const kvp_codec_site *b)
{
    return a->head_dim == b->head_dim && a->role == b->role && a->seed == b->seed &&
           a->calibration == b->calibration && a->layer == b->layer && a->kv_head == b->kv_head &&
           strcmp(a->spec, b->spec) == 0;
}

static const kvant_codec *find(const kvp_codec_site *site)
{
    for (const struct entry *e = entries; e != NULL; e = e->next)
        if (same(&e->site, site))
            return e->codec;
    return NULL;
}

static kvant_status create(const kvp_codec_site *site, const kvant_codec **codec, char *err, size_t errlen)
{
    size_t length = strlen(site->spec) + 1;
    struct entry *e = malloc(sizeof(*e) + length);
    kvant_status status;

    *codec = NULL;
    if (e == NULL) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        return KVANT_ERR_MEMORY;
    }
    *e = (struct entry){ .next = entries, .site = *site };
    memcpy(e->text, site->spec, length);
    e->site.spec = e->text;
    status = kvant_codec_create_calibrated(e->text, site->head_dim, site->role, site->seed, site->calibration,
                                           site->layer, site->kv_head, &e->codec, err, errlen);
    if (status != KVANT_OK) {
        free(e);
        return status;
    }
    entries = e;
    *codec = e->codec;
    return KVANT_OK;
}

/* A codec that can be made without the calibration does not depend on the place. */
static const kvant_codec *get(const kvp_codec_site *site, char *err, size_t errlen)
{
    kvp_codec_site anywhere = { site->spec, site->head_dim, site->role, site->seed, NULL, 0, 0 };
    const kvant_codec *codec = find(&anywhere);
    kvant_status status;

    if (codec == NULL && site->calibration != NULL)
        codec = find(site);
    if (codec != NULL)
        return codec;
    status = create(&anywhere, &codec, err, errlen);
    if (status == KVANT_ERR_UNSUPPORTED && site->calibration != NULL)
        create(site, &codec, err, errlen);
    return codec;
}

const kvant_codec *kvp_codec_get(const kvp_codec_site *site, char *err, size_t errlen)
{
    const kvant_codec *codec;

    pthread_mutex_lock(&lock);
    codec = get(site, err, errlen);
    pthread_mutex_unlock(&lock);
    return codec;
}
