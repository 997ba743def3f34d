/* settings.c - see settings.h. */
#include "settings.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pthread.h>

#include "codec_cache.h"
#include "file_cache.h"

/* A variable that is set to nothing is not set. */
static const char *given(const char *name)
{
    const char *text = getenv(name);

    return text != NULL && text[0] != '\0' ? text : NULL;
}

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
    const char *text = given(name);

    *value = fallback;
    if (text == NULL)
        return true;
    if (parse_number(text, max, value) && *value >= min)
        return true;
    snprintf(err, errlen, "%s=%s is not a whole number from %llu to %llu", name, text, (unsigned long long)min,
             (unsigned long long)max);
    return false;
}

/* head_dim is not known yet unless it is given; then the spec has to fit it. */
static bool check_spec(const char *name, const char *spec, const kvp_settings *settings, kvant_role role, char *err,
                       size_t errlen)
{
    kvp_codec_site site = { spec, settings->head_dim, role, settings->seed, settings->calibration, 0, 0 };
    char reason[512] = "";

    if (settings->head_dim != 0
            ? kvp_codec_get(&site, reason, sizeof(reason)) != NULL
            : kvant_codec_check(spec, role, settings->calibration, reason, sizeof(reason)) == KVANT_OK)
        return true;
    snprintf(err, errlen, "%s=%s: %s", name, spec, reason);
    return false;
}

static bool read_spec(const char *name, const char *fallback, char *spec, char *err, size_t errlen)
{
    const char *text = given(name);

    if (text == NULL)
        text = fallback;
    if (strlen(text) >= KVP_MAX_SPEC) {
        snprintf(err, errlen, "%s is longer than %d characters", name, KVP_MAX_SPEC - 1);
        return false;
    }
    strcpy(spec, text);
    return true;
}

/* With a calibration a preset is better than without one. */
static bool read_preset(const kvp_settings *settings, kvant_preset *preset, char *err, size_t errlen)
{
    const char *name = given("KVANT_PRESET");

    *preset = (kvant_preset){ .size = sizeof(*preset) };
    if (kvant_preset_get(name != NULL ? name : KVANT_PRESET_DEFAULT, settings->calibration != NULL, preset) ==
        KVANT_OK)
        return true;
    snprintf(err, errlen, "KVANT_PRESET=%s is not %s", name, KVANT_PRESET_NAMES);
    return false;
}

static bool read_specs(kvp_settings *settings, char *err, size_t errlen)
{
    const char *k = given("KVANT_K"), *v = given("KVANT_V");
    kvant_preset preset;

    return read_preset(settings, &preset, err, errlen) &&
           read_spec("KVANT_K", v != NULL ? v : preset.k, settings->spec[KVANT_ROLE_K], err, errlen) &&
           read_spec("KVANT_V", k != NULL ? k : preset.v, settings->spec[KVANT_ROLE_V], err, errlen) &&
           read_spec("KVANT_PROTECT_CODEC", "f16", settings->protect_spec, err, errlen);
}

/* The variable that a role's spec came from: one alone is that of both. */
static const char *source_of(const char *own, const char *other)
{
    return given(own) == NULL && given(other) != NULL ? other : own;
}

static bool check_config(const kvp_settings *settings, char *err, size_t errlen)
{
    char reason[512] = "";

    if (kvant_settings_check(settings->config, settings->calibration, reason, sizeof(reason)) == KVANT_OK)
        return true;
    snprintf(err, errlen, "KVANT_CONFIG=%s: %s", given("KVANT_CONFIG"), reason);
    return false;
}

static bool check_specs(const kvp_settings *settings, char *err, size_t errlen)
{
    const char *k = source_of("KVANT_K", "KVANT_V"), *v = source_of("KVANT_V", "KVANT_K");

    return check_spec(k, settings->spec[KVANT_ROLE_K], settings, KVANT_ROLE_K, err, errlen) &&
           check_spec(v, settings->spec[KVANT_ROLE_V], settings, KVANT_ROLE_V, err, errlen) &&
           check_spec("KVANT_PROTECT_CODEC", settings->protect_spec, settings, KVANT_ROLE_K, err, errlen) &&
           check_spec("KVANT_PROTECT_CODEC", settings->protect_spec, settings, KVANT_ROLE_V, err, errlen);
}

/* Settings are read for every tensor, and a check may compute tables: those found good last are not checked
 * again. */
static bool check_once(const kvp_settings *settings, char *err, size_t errlen)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static kvp_settings good;
    bool ok;

    pthread_mutex_lock(&lock);
    ok = memcmp(settings, &good, sizeof(good)) == 0;
    pthread_mutex_unlock(&lock);
    if (ok)
        return true;
    ok = settings->config != NULL ? check_config(settings, err, errlen) : check_specs(settings, err, errlen);
    pthread_mutex_lock(&lock);
    if (ok)
        memcpy(&good, settings, sizeof(good));
    pthread_mutex_unlock(&lock);
    return ok;
}

static bool read_calibration(kvp_settings *settings, char *err, size_t errlen)
{
    const char *path = given("KVANT_CALIBRATION");
    char reason[512] = "";

    settings->calibration = NULL;
    if (path == NULL)
        return true;
    settings->calibration = kvp_calibration_get(path, reason, sizeof(reason));
    if (settings->calibration == NULL)
        snprintf(err, errlen, "KVANT_CALIBRATION=%s: %s", path, reason);
    return settings->calibration != NULL;
}

/* A settings file says all of it by itself. */
static bool one_choice(char *err, size_t errlen)
{
    static const char *const names[] = { "KVANT_CONFIG", "KVANT_PRESET",  "KVANT_K",
                                         "KVANT_V",      "KVANT_PROTECT", "KVANT_PROTECT_CODEC" };
    const bool config = given(names[0]) != NULL, preset = given(names[1]) != NULL;

    for (size_t i = 1; i < sizeof(names) / sizeof(names[0]); i++) {
        const bool specs = i == 2 || i == 3;
        if (given(names[i]) == NULL || !(config || (preset && specs)))
            continue;
        snprintf(err, errlen, "%s and %s are both set; unset one of them, each chooses the codecs",
                 config ? names[0] : names[1], names[i]);
        return false;
    }
    return true;
}

static bool has_checksum(const kvant_calibration *calibration, uint64_t checksum)
{
    kvant_calibration_info info = { .size = sizeof(info) };

    return calibration != NULL && kvant_calibration_get_info(calibration, &info) == KVANT_OK &&
           info.checksum == checksum;
}

/* The settings file and its calibration: that of KVANT_CALIBRATION if it is the one, else the one that the file names. */
static bool read_config(kvp_settings *settings, char *err, size_t errlen)
{
    const char *path = given("KVANT_CONFIG");
    char reason[512] = "", calibration[4096];
    kvant_settings_info info = { .size = sizeof(info) };

    if (path == NULL)
        return true;
    settings->config = kvp_config_get(path, reason, sizeof(reason));
    if (settings->config != NULL && kvant_settings_get_info(settings->config, &info) == KVANT_OK) {
        if (info.calibration == NULL || has_checksum(settings->calibration, info.calibration_checksum))
            return true;
        if (kvant_settings_calibration_path(settings->config, calibration, sizeof(calibration)) != KVANT_OK)
            snprintf(reason, sizeof(reason), "the path of its calibration %s is too long", info.calibration);
        else if ((settings->calibration = kvp_calibration_get(calibration, reason, sizeof(reason))) != NULL)
            return true;
    }
    snprintf(err, errlen, "KVANT_CONFIG=%s: %s", path, reason);
    return false;
}

bool kvp_settings_set_cpu_level(char *err, size_t errlen)
{
    const char *text = given("KVANT_CPU");
    kvant_cpu_level level;

    if (text == NULL)
        return true;
    if (kvant_cpu_level_from_name(text, &level) != KVANT_OK)
        snprintf(err, errlen,
                 "KVANT_CPU=%s is not auto, c, avx2, avx2vnni, avx512, avx512vnni, avx512vbmi, neon or neondot",
                 text);
    else if (kvant_set_cpu_level(level) != KVANT_OK)
        snprintf(err, errlen,
                 "KVANT_CPU=%s: this machine or this build lacks it; unset KVANT_CPU to use the best it has", text);
    else
        return true;
    return false;
}

bool kvp_settings_read(kvp_settings *settings, char *err, size_t errlen)
{
    uint64_t head_dim, verbose, protect;

    memset(settings, 0, sizeof(*settings)); /* padding too: settings are compared */
    if (!read_number("KVANT_SEED", 0, UINT64_MAX, 0, &settings->seed, err, errlen) ||
        !read_number("KVANT_HEAD_DIM", 1, KVANT_MAX_HEAD_DIM, 0, &head_dim, err, errlen) ||
        !read_number("KVANT_PROTECT", 0, KVP_MAX_PROTECT, 0, &protect, err, errlen) ||
        !read_number("KVANT_VERBOSE", 0, 1, 0, &verbose, err, errlen))
        return false;
    settings->head_dim = (uint32_t)head_dim;
    settings->protect = (uint32_t)protect;
    settings->verbose = verbose != 0;
    return one_choice(err, errlen) && read_calibration(settings, err, errlen) &&
           read_specs(settings, err, errlen) && read_config(settings, err, errlen) &&
           check_once(settings, err, errlen);
}

bool kvp_settings_read_switch(const char *name, bool fallback, bool *on, char *err, size_t errlen)
{
    uint64_t value;
    bool ok = read_number(name, 0, 1, fallback, &value, err, errlen);

    *on = ok && value != 0;
    return ok;
}
