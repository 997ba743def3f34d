/* settings.c - see settings.h. Contexts with equal settings share a scheme, and with it their
 * codecs. When a settings file or a calibration changes, the next context gets a new scheme, and
 * the old one stays. */

#include "settings.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"
#include "llama_states.h"
#include "log.h"
#include "mla.h"

/* Schemes, which live as long as the process */

struct entry {
    struct entry *next;
    kvant_scheme *scheme;
    char key[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

/* An entry with the key of these params, and without a scheme. The key has the path, the size and
 * the time of change of each file. A file that cannot be seen cannot be read either, and its loader
 * says why. NULL: out of memory. */
static struct entry *new_entry(const kvant_scheme_params *params)
{
    char settings[96] = "", calibration[96] = "", numbers[64];
    const char *parts[] = {
        params->preset,   params->k,   params->v,           settings,
        params->settings, calibration, params->calibration, params->protect_codec,
        numbers
    };
    const size_t n = sizeof(parts) / sizeof(parts[0]);
    size_t bytes = 1, used = 0;
    struct entry *entry;

    if (params->settings != NULL)
        kvp_host_file_state(params->settings, settings, sizeof(settings));
    if (params->calibration != NULL)
        kvp_host_file_state(params->calibration, calibration, sizeof(calibration));
    snprintf(numbers, sizeof(numbers), "%" PRIu32 " %" PRIu64, params->protect, params->seed);
    for (size_t i = 0; i < n; i++) {
        parts[i] = parts[i] != NULL ? parts[i] : "\t";
        bytes += strlen(parts[i]) + 1;
    }
    entry = malloc(sizeof(*entry) + bytes);
    for (size_t i = 0; i < n && entry != NULL; i++)
        used += (size_t)snprintf(entry->key + used, bytes - used, "%s\n", parts[i]);
    return entry;
}

static const struct entry *find_entry(const char *key)
{
    const struct entry *e = entries;

    while (e != NULL && strcmp(e->key, key) != 0)
        e = e->next;
    return e;
}

/* *scheme = the scheme for these params, or NULL with the reason in kvant_error_message(), except
 * with KVANT_ERR_MEMORY. Thread-safe. */
static kvant_status get_scheme(const kvant_scheme_params *params, kvant_scheme **scheme)
{
    struct entry *entry = new_entry(params);
    const struct entry *found;
    kvant_status status = entry != NULL ? KVANT_OK : KVANT_ERR_MEMORY;

    *scheme = NULL;
    if (status != KVANT_OK)
        return status;
    pthread_mutex_lock(&lock);
    found = find_entry(entry->key);
    if (found == NULL)
        status = kvant_scheme_create(params, &entry->scheme);
    if (found == NULL && status == KVANT_OK) {
        entry->next = entries;
        found = entries = entry;
        entry = NULL;
    }
    *scheme = found != NULL ? found->scheme : NULL;
    pthread_mutex_unlock(&lock);
    free(entry);
    return status;
}

/* Variables */

/* The value of a variable; NULL when it is not set, or set to an empty string. */
static const char *given(const char *name)
{
    const char *text = kvant_os_variable(name);

    return text != NULL && text[0] != '\0' ? text : NULL;
}

/* Accepts digits only; strtoull would also accept a sign and blanks. */
static bool parse_number(const char *text, uint64_t max, uint64_t *value)
{
    char *end;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *value = strtoull(text, &end, 0);
    return errno == 0 && *end == '\0' && *value <= max;
}

static bool read_number(const char *name, uint64_t min, uint64_t max, uint64_t fallback,
                        uint64_t *value, char *err, size_t errlen)
{
    const char *text = given(name);

    *value = fallback;
    if (text == NULL)
        return true;
    if (parse_number(text, max, value) && *value >= min)
        return true;
    snprintf(err, errlen, "%s=%s is not a whole number from %llu to %llu", name, text,
             (unsigned long long)min, (unsigned long long)max);
    return false;
}

/* Whether the user chose in one way only. A settings file excludes all other variables that choose
 * codecs. */
static bool one_choice(char *err, size_t errlen)
{
    static const char *const names[] = { "KVANT_CONFIG", "KVANT_PRESET",  "KVANT_K",
                                         "KVANT_V",      "KVANT_PROTECT", "KVANT_PROTECT_CODEC" };
    const bool config = given(names[0]) != NULL, preset = given(names[1]) != NULL;

    for (size_t i = 1; i < sizeof(names) / sizeof(names[0]); i++) {
        const bool specs = i == 2 || i == 3;
        if (given(names[i]) == NULL || !(config || (preset && specs)))
            continue;
        snprintf(err, errlen,
                 "%s and %s are both set, and each chooses the codecs; unset one of them",
                 config ? names[0] : names[1], names[i]);
        return false;
    }
    return true;
}

/* Writes the library's reason, preceded by the name of the variable that it is about. */
static void report_reason(char *err, size_t errlen)
{
    static const char *const names[] = { "KVANT_K",      "KVANT_V",      "KVANT_PROTECT_CODEC",
                                         "KVANT_PRESET", "KVANT_CONFIG", "KVANT_CALIBRATION" };
    const char *why = kvant_error_message();

    snprintf(err, errlen, "%s", why);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *text = given(names[i]);
        if (text != NULL && strncmp(why, text, strlen(text)) == 0 && why[strlen(text)] == ':') {
            snprintf(err, errlen, "%s=%s", names[i], why);
            return;
        }
    }
    for (size_t i = 3; i < sizeof(names) / sizeof(names[0]); i++) {
        const char *text = given(names[i]);
        if (text != NULL && (i == 4 || strstr(why, text) != NULL)) {
            snprintf(err, errlen, "%s=%s: %s", names[i], text, why);
            return;
        }
    }
}

/* Specs that suit some head_dim must suit the given head_dim. */
static bool check_head_dim(const kvp_settings *settings)
{
    const kvant_codec *const *codecs;
    kvant_scheme_location location = { .size = sizeof(location),
                                       .n_kv_heads = 1,
                                       .head_dim = settings->head_dim };
    kvant_scheme_info info = { .size = sizeof(info) };

    if (settings->head_dim == 0 || kvant_scheme_get_info(settings->scheme, &info) != KVANT_OK ||
        info.settings != NULL)
        return true;
    for (int role = 0; role < 2; role++) {
        location.role = (kvant_role)role;
        location.n_layers = 0;
        if (kvant_scheme_codecs(settings->scheme, &location, &codecs) != KVANT_OK)
            return false;
        location.n_layers = 1; /* with one layer, the layer is protected if any is */
        if (kvant_scheme_codecs(settings->scheme, &location, &codecs) != KVANT_OK)
            return false;
    }
    return true;
}

static void write_label(kvp_settings *settings)
{
    kvant_scheme_info info = { .size = sizeof(info) };
    const char *config = given("KVANT_CONFIG");

    kvant_scheme_get_info(settings->scheme, &info);
    if (info.settings != NULL)
        snprintf(settings->label, sizeof(settings->label), "of %s",
                 config != NULL ? config : "a settings file");
    else if (info.preset != NULL || strcmp(info.k, info.v) == 0)
        snprintf(settings->label, sizeof(settings->label), "%s",
                 info.preset != NULL ? info.preset : info.k);
    else
        snprintf(settings->label, sizeof(settings->label), "%s / %s", info.k, info.v);
    if (info.preset != NULL)
        snprintf(settings->remark, sizeof(settings->remark), "%s",
                 info.calibration != NULL ? "; calibrated"
                                          : "; not calibrated, learns from prompts");
}

bool kvp_settings_set_cpu_level(char *err, size_t errlen)
{
    const char *text = given("KVANT_CPU");
    kvant_cpu_level level;

    if (text == NULL)
        return true;
    if (kvant_cpu_level_from_name(text, &level) != KVANT_OK)
        snprintf(err, errlen,
                 "KVANT_CPU=%s is not a CPU level; set auto, c, avx2, avx2vnni, avx512, "
                 "avx512vnni, avx512vbmi, neon or neondot",
                 text);
    else if (kvant_set_cpu_level(level) != KVANT_OK)
        snprintf(err, errlen,
                 "KVANT_CPU=%s: this machine or this build does not have this level; unset "
                 "KVANT_CPU to use the best level",
                 text);
    else
        return true;
    return false;
}

/* A settings file has no codecs for rows of latents. */
static void make_latents(kvp_settings *settings, const kvant_scheme_params *params)
{
    char latents[256], rope[256];
    kvant_scheme_info info = { .size = sizeof(info) };
    kvant_scheme_params of = { .size = sizeof(of),
                               .k = latents,
                               .v = latents,
                               .protect = params->protect,
                               .protect_codec = params->protect_codec,
                               .seed = params->seed };

    kvant_scheme_get_info(settings->scheme, &info);
    if (info.k == NULL || !kvp_mla_spec(info.k, latents, sizeof(latents)) ||
        !kvp_mla_rope_spec(info.k, rope, sizeof(rope)))
        return;
    get_scheme(&of, &settings->latents);
    of.k = of.v = rope;
    get_scheme(&of, &settings->rope);
}

static bool read_params(kvant_scheme_params *params, char *err, size_t errlen)
{
    uint64_t protect;

    *params = (kvant_scheme_params){ .size = sizeof(*params),
                                     .preset = given("KVANT_PRESET"),
                                     .k = given("KVANT_K"),
                                     .v = given("KVANT_V"),
                                     .settings = given("KVANT_CONFIG"),
                                     .calibration = given("KVANT_CALIBRATION"),
                                     .protect_codec = given("KVANT_PROTECT_CODEC") };
    if (!read_number("KVANT_SEED", 0, UINT64_MAX, 0, &params->seed, err, errlen) ||
        !read_number("KVANT_PROTECT", 0, KVP_MAX_PROTECT, 0, &protect, err, errlen))
        return false;
    params->protect = (uint32_t)protect;
    return true;
}

static bool read_exact(uint64_t *exact, bool *is_auto, char *err, size_t errlen)
{
    const char *text = given("KVANT_EXACT");

    *is_auto = text == NULL || strcmp(text, "auto") == 0;
    *exact = UINT32_MAX;
    if (*is_auto || parse_number(text, UINT32_MAX, exact))
        return true;
    snprintf(err, errlen, "KVANT_EXACT=%s is neither auto nor a whole number of tokens", text);
    return false;
}

static bool read_states(kvp_settings *settings, char *err, size_t errlen)
{
    const char *text = given("KVANT_STATES");
    const bool is_auto = text != NULL && strcmp(text, "auto") == 0;

    settings->chose_codes = is_auto && kvp_states_are_served();
    settings->saves_codes = settings->chose_codes || (text != NULL && strcmp(text, "codes") == 0);
    if (text == NULL || is_auto || settings->saves_codes || strcmp(text, "rows") == 0)
        return true;
    snprintf(err, errlen, "KVANT_STATES=%s is none of auto, codes and rows", text);
    return false;
}

bool kvp_settings_leave_states(void)
{
    const char *text = given("KVANT_STATES");

    return text != NULL && strcmp(text, "rows") == 0;
}

bool kvp_settings_read(kvp_settings *settings, char *err, size_t errlen)
{
    kvant_scheme_params params;
    uint64_t head_dim, exact, verbose, quiet;
    kvant_status status;
    kvp_settings states;
    bool auto_exact;

    if (!read_params(&params, err, errlen) ||
        !read_number("KVANT_HEAD_DIM", 1, KVANT_MAX_HEAD_DIM, 0, &head_dim, err, errlen) ||
        !read_exact(&exact, &auto_exact, err, errlen) || !read_states(&states, err, errlen) ||
        !read_number("KVANT_VERBOSE", 0, 1, 0, &verbose, err, errlen) ||
        !read_number("KVANT_QUIET", 0, 1, 0, &quiet, err, errlen) || !one_choice(err, errlen))
        return false;
    *settings = (kvp_settings){ .head_dim = (uint32_t)head_dim,
                                .exact = (uint32_t)exact,
                                .auto_exact = auto_exact,
                                .wants_exact = given("KVANT_EXACT") != NULL && exact > 0,
                                .saves_codes = states.saves_codes,
                                .chose_codes = states.chose_codes,
                                .verbose = verbose != 0,
                                .quiet = quiet != 0 };
    status = get_scheme(&params, &settings->scheme);
    if (status == KVANT_OK && check_head_dim(settings)) {
        make_latents(settings, &params);
        write_label(settings);
        return true;
    }
    if (status == KVANT_ERR_MEMORY)
        snprintf(err, errlen, "out of memory for the settings of the cache");
    else
        report_reason(err, errlen);
    return false;
}

/* Prints the line once, because a program may plan with contexts before it creates its own. */
static void report_unused(const char *why)
{
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (!atomic_flag_test_and_set(&said))
        kvp_info("%s", why);
}

void kvp_settings_find_calibration(kvp_settings *settings)
{
    char model[KVP_MODEL_PATH], err[256];
    kvant_scheme_params params;
    kvant_scheme *beside, *found = NULL;
    kvant_scheme_info info = { .size = sizeof(info) };

    if (!read_params(&params, err, sizeof(err)) || params.calibration != NULL ||
        !kvp_find_model(model))
        return;
    params.model = model;
    if (kvant_scheme_create(&params, &beside) != KVANT_OK)
        return;
    kvant_scheme_get_info(beside, &info);
    if (info.not_used != NULL)
        report_unused(info.not_used);
    if (info.calibration_path != NULL) {
        params.model = NULL;
        params.calibration = info.calibration_path;
        get_scheme(&params, &found);
    }
    if (found != NULL) {
        settings->scheme = found;
        snprintf(settings->remark, sizeof(settings->remark), "; calibrated: %s",
                 info.calibration_path);
    }
    kvant_scheme_free(&beside);
}

bool kvp_settings_read_switch(const char *name, bool fallback, bool *on, char *err, size_t errlen)
{
    uint64_t value;
    bool ok = read_number(name, 0, 1, fallback, &value, err, errlen);

    *on = ok && value != 0;
    return ok;
}
