/* settings.c - see settings.h. */
#include "settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec_cache.h"

#define DEFAULT_SPEC "turboquant-4"

/* Digits alone: strtoull would take a sign and blanks. */
static bool parse_number(const char *text, uint64_t max, uint64_t *value)
{
    char *end;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return errno == 0 && *end == '\0' && *value <= max;
}

static bool read_number(const char *name, uint64_t min, uint64_t max, uint64_t fallback, uint64_t *value, char *err,
                        size_t errlen)
{
    const char *text = getenv(name);

    *value = fallback;
    if (text == NULL || text[0] == '\0')
        return true;
    if (parse_number(text, max, value) && *value >= min)
        return true;
    snprintf(err, errlen, "%s=%s is not a whole number from %llu to %llu", name, text, (unsigned long long)min,
             (unsigned long long)max);
    return false;
}

/* A spec may fit some head dimensions only (a group of 96 channels, say), and the model's is not known yet.
 * It is good when it works with the given one or with any that models use. */
static bool check_spec(const char *name, const kvp_settings *settings, kvant_role role, char *err, size_t errlen)
{
    static const uint32_t common[] = { 64, 128, 96, 80, 256, 512 };
    const char *spec = settings->spec[role];
    char reason[512] = "", other[512];

    if (settings->head_dim != 0) {
        if (kvp_codec_get(spec, settings->head_dim, role, settings->seed, reason, sizeof(reason)) != NULL)
            return true;
    } else {
        for (size_t i = 0; i < sizeof(common) / sizeof(common[0]); i++)
            if (kvp_codec_get(spec, common[i], role, settings->seed, i ? other : reason, sizeof(reason)) != NULL)
                return true;
    }
    snprintf(err, errlen, "%s=%s: %s", name, spec, reason);
    return false;
}

static bool read_spec(const char *name, kvp_settings *settings, kvant_role role, char *err, size_t errlen)
{
    const char *text = getenv(name);

    if (text == NULL || text[0] == '\0')
        text = DEFAULT_SPEC;
    if (strlen(text) >= KVP_MAX_SPEC) {
        snprintf(err, errlen, "%s is longer than %d characters", name, KVP_MAX_SPEC - 1);
        return false;
    }
    strcpy(settings->spec[role], text);
    return check_spec(name, settings, role, err, errlen);
}

bool kvp_settings_read(kvp_settings *settings, char *err, size_t errlen)
{
    uint64_t head_dim, verbose;

    if (!read_number("KVANT_SEED", 0, UINT64_MAX, 0, &settings->seed, err, errlen) ||
        !read_number("KVANT_HEAD_DIM", 1, KVANT_MAX_HEAD_DIM, 0, &head_dim, err, errlen) ||
        !read_number("KVANT_VERBOSE", 0, 1, 0, &verbose, err, errlen))
        return false;
    settings->head_dim = (uint32_t)head_dim;
    settings->verbose = verbose != 0;
    return read_spec("KVANT_K", settings, KVANT_ROLE_K, err, errlen) &&
           read_spec("KVANT_V", settings, KVANT_ROLE_V, err, errlen);
}
