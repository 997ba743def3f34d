/* settings.c - settings as an object: creation, look-up, checks against codecs and a calibration.
 * parse.c reads the file, format.c writes it. */
#include "settings_internal.h"

#include <kvant/calibration.h>

#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/file.h"
#include "../base/os.h"
#include "../codec/codec_internal.h"

void kvant_settings_free(kvant_settings **settings)
{
    if (!settings || !*settings)
        return;
    for (uint32_t i = 0; (*settings)->entries && i < 2 * (*settings)->n_layers; i++)
        kvant_free((*settings)->entries[i].specs);
    kvant_free((*settings)->entries);
    kvant_free((*settings)->folder);
    kvant_free(*settings);
    *settings = NULL;
}

kvant_status kvant_settings_set_layers(kvant_settings *s, uint32_t n_layers,
                                       const kvant_error *error)
{
    if (n_layers == 0 || n_layers > KVANT_SETTINGS_MAX_LAYERS)
        return kvant_fail(error, KVANT_ERR_ARGUMENT, "%" PRIu32 " layers: a model has 1 to %u",
                          n_layers, KVANT_SETTINGS_MAX_LAYERS);
    s->n_layers = n_layers;
    s->entries = kvant_alloc((size_t)2 * n_layers, sizeof *s->entries);
    return s->entries ? KVANT_OK
                      : kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for settings");
}

kvant_status kvant_settings_check_entry(const kvant_settings_layer *layer, const kvant_error *error)
{
    kvant_spec spec;
    if (layer->n_kv_heads == 0 || layer->n_kv_heads > KVANT_SETTINGS_MAX_KV_HEADS ||
        layer->head_dim == 0 || layer->head_dim > KVANT_MAX_HEAD_DIM)
        return kvant_fail(
            error, KVANT_ERR_ARGUMENT,
            "%" PRIu32 " kv heads of head_dim %" PRIu32 ": a layer has 1 to %u of head_dim 1 to %u",
            layer->n_kv_heads, layer->head_dim, KVANT_SETTINGS_MAX_KV_HEADS, KVANT_MAX_HEAD_DIM);
    return kvant_spec_parse(layer->spec, &spec, error);
}

kvant_status kvant_settings_open_entry(kvant_settings *s, kvant_settings_entry *entry,
                                       uint32_t n_kv_heads, uint32_t head_dim, uint32_t n_specs,
                                       const kvant_error *error)
{
    if (n_specs > KVANT_SETTINGS_MAX_SPECS - s->n_specs)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the settings have more than %u codecs, the most that a file can hold",
                          KVANT_SETTINGS_MAX_SPECS);
    const char **specs = kvant_alloc(n_specs, sizeof *specs + KVANT_SPEC_MAX_LENGTH + 1);
    if (!specs)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for settings");
    *entry = (kvant_settings_entry){ n_kv_heads, head_dim, n_specs, specs };
    s->n_specs += n_specs;
    return KVANT_OK;
}

void kvant_settings_set_spec(kvant_settings_entry *entry, uint32_t index, const char *spec)
{
    char *text =
        (char *)(entry->specs + entry->n_specs) + (size_t)index * (KVANT_SPEC_MAX_LENGTH + 1);
    strcpy(text, spec);
    entry->specs[index] = text;
}

void kvant_settings_close_entry(kvant_settings *s, kvant_settings_entry *entry)
{
    for (uint32_t i = 1; i < entry->n_specs; i++)
        if (strcmp(entry->specs[0], entry->specs[i]) != 0)
            return;
    s->n_specs -= entry->n_specs - 1;
    entry->n_specs = 1; /* the text is not moved */
}

bool kvant_settings_same(const kvant_settings_entry *x, uint32_t a, const kvant_settings_entry *y,
                         uint32_t b)
{
    return x->n_kv_heads == y->n_kv_heads && x->head_dim == y->head_dim &&
           strcmp(x->specs[a], y->specs[b]) == 0;
}

bool kvant_settings_is_first(const kvant_settings *s, uint32_t i, uint32_t index)
{
    const kvant_settings_entry *entry = &s->entries[i];
    for (uint32_t j = i % 2; j <= i; j += 2)
        for (uint32_t other = 0; other < (j < i ? s->entries[j].n_specs : index); other++)
            if (kvant_settings_same(&s->entries[j], other, entry, index))
                return false;
    return true;
}

static bool is_control(char c)
{
    return (unsigned char)c < 0x20 || c == 0x7f;
}

/* Removes blanks at the ends, because editors may remove them when they save the file. */
static void set_model(kvant_settings *s, const char *model)
{
    size_t n = 0;
    model += strspn(model, " \t\r\n");
    for (; model[n]; n++)
        s->model[n] = is_control(model[n]) ? ' ' : model[n];
    while (n > 0 && s->model[n - 1] == ' ')
        s->model[--n] = 0;
}

static kvant_status set_calibration(kvant_settings *s, const kvant_settings_config *config,
                                    const kvant_error *error)
{
    size_t n = config->calibration ? strlen(config->calibration) : 0;
    if (!config->calibration)
        return KVANT_OK;
    if (n == 0 || n > KVANT_SETTINGS_MAX_PATH)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the name of the calibration has %zu bytes, not 1 to %u", n,
                          KVANT_SETTINGS_MAX_PATH);
    for (size_t i = 0; i < n; i++)
        if (is_control(config->calibration[i]))
            return kvant_fail(error, KVANT_ERR_ARGUMENT,
                              "the name of the calibration holds a control character");
    memcpy(s->calibration, config->calibration, n + 1);
    s->calibration_checksum = config->calibration_checksum;
    return KVANT_OK;
}

/* Checks every spec before it allocates memory, because the caller chose the number of specs. */
static kvant_status set_entry(kvant_settings *s, uint32_t i, const kvant_settings_layer *layer,
                              const kvant_error *error)
{
    kvant_settings_entry *entry = &s->entries[i];
    if (!layer->spec == !layer->heads)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "layer %" PRIu32 " needs either a spec or a spec for each kv head",
                          i / 2);
    const uint32_t n = layer->heads ? layer->n_kv_heads : 1;
    for (uint32_t h = 0; h < n; h++) {
        kvant_settings_layer one = *layer;
        one.spec = layer->heads ? layer->heads[h] : layer->spec;
        if (!one.spec)
            return kvant_fail(error, KVANT_ERR_ARGUMENT,
                              "layer %" PRIu32 " has no spec for one of its kv heads", i / 2);
        KVANT_FORWARD(kvant_settings_check_entry(&one, error));
    }
    if (n == 0)
        return kvant_settings_check_entry(layer, error);
    KVANT_FORWARD(
        kvant_settings_open_entry(s, entry, layer->n_kv_heads, layer->head_dim, n, error));
    for (uint32_t h = 0; h < n; h++)
        kvant_settings_set_spec(entry, h, layer->heads ? layer->heads[h] : layer->spec);
    kvant_settings_close_entry(s, entry);
    return KVANT_OK;
}

static kvant_status set_entries(kvant_settings *s, const kvant_settings_config *config,
                                const kvant_error *error)
{
    KVANT_FORWARD(kvant_settings_set_layers(s, config->n_layers, error));
    for (uint32_t i = 0; i < 2 * config->n_layers; i++)
        KVANT_FORWARD(set_entry(s, i, &config->layers[i], error));
    return KVANT_OK;
}

static kvant_status fill(kvant_settings *s, const kvant_settings_config *config,
                         const kvant_error *error)
{
    if (config->model && strlen(config->model) > KVANT_SETTINGS_MAX_NAME)
        return kvant_fail(error, KVANT_ERR_ARGUMENT,
                          "the name of the model is longer than %u bytes", KVANT_SETTINGS_MAX_NAME);
    set_model(s, config->model ? config->model : "");
    s->model_fingerprint = config->model_fingerprint;
    KVANT_FORWARD(set_calibration(s, config, error));
    return set_entries(s, config, error);
}

kvant_status kvant_settings_create(const kvant_settings_config *config, kvant_settings **settings,
                                   char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!settings)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the settings is NULL");
    *settings = NULL;
    kvant_settings_config given;
    if (!KVANT_ACCEPT_STRUCT(kvant_settings_config, &given, config, calibration_checksum) ||
        !given.layers)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "config or its layers is NULL, or its size field is not set to "
                          "sizeof(kvant_settings_config)");
    kvant_settings *s = kvant_alloc(1, sizeof *s);
    if (!s)
        return kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for settings");
    kvant_status status = fill(s, &given, &error);
    if (status != KVANT_OK)
        kvant_settings_free(&s);
    *settings = s;
    return status;
}

static kvant_status check_head(const uint8_t *bytes, size_t n, const kvant_error *error)
{
    static const char magic[] = "kvant-settings ";
    if (n < KVANT_FILE_HEAD || memcmp(bytes, magic, sizeof magic - 1) != 0)
        return kvant_fail(error, KVANT_ERR_FORMAT, "this is not a settings file of kvant");
    if (n > KVANT_SETTINGS_MAX_BYTES)
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the settings file has %zu bytes, more than the format allows", n);
    return KVANT_OK;
}

static kvant_status set_folder(kvant_settings *s, const char *path, const kvant_error *error)
{
    size_t n = (size_t)(kvant_os_file_name(path) - path);
    s->folder = kvant_alloc(n + 1, 1);
    if (!s->folder)
        return kvant_fail(error, KVANT_ERR_MEMORY, "out of memory for settings");
    memcpy(s->folder, path, n);
    return KVANT_OK;
}

kvant_status kvant_settings_load(const char *path, kvant_settings **settings, char *err,
                                 size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!settings)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the settings is NULL");
    *settings = NULL;
    uint8_t *bytes;
    size_t n;
    KVANT_FORWARD(kvant_read_file(path, check_head, &bytes, &n, &error));
    kvant_settings *s = kvant_alloc(1, sizeof *s);
    kvant_status status = s ? kvant_settings_parse(s, (const char *)bytes, n, &error)
                            : kvant_fail(&error, KVANT_ERR_MEMORY, "out of memory for settings");
    kvant_free(bytes);
    if (status == KVANT_OK)
        status = set_folder(s, path, &error);
    if (status != KVANT_OK)
        kvant_settings_free(&s);
    *settings = s;
    return status;
}

kvant_status kvant_settings_save(const kvant_settings *settings, const char *path, char *err,
                                 size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!settings || !path)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "settings or path is NULL");
    char *text;
    size_t n;
    KVANT_FORWARD(kvant_settings_format(settings, &text, &n, &error));
    kvant_status status = kvant_write_file(path, (const uint8_t *)text, n, &error);
    kvant_free(text);
    return status;
}

kvant_status kvant_settings_get_info(const kvant_settings *settings, kvant_settings_info *info)
{
    KVANT_RETURN_IF(!settings, KVANT_ERR_ARGUMENT);
    const kvant_settings_info full = {
        .model = settings->model,
        .model_fingerprint = settings->model_fingerprint,
        .n_layers = settings->n_layers,
        .calibration = settings->calibration[0] ? settings->calibration : NULL,
        .calibration_checksum = settings->calibration_checksum,
    };
    return KVANT_RETURN_STRUCT(kvant_settings_info, info, &full, calibration_checksum)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}

kvant_status kvant_settings_get_layer(const kvant_settings *settings, uint32_t layer,
                                      kvant_role role, kvant_settings_layer *entry)
{
    if (!settings || !entry || layer >= settings->n_layers ||
        (role != KVANT_ROLE_K && role != KVANT_ROLE_V))
        return KVANT_ERR_ARGUMENT;
    const kvant_settings_entry *found = &settings->entries[2 * layer + (uint32_t)role];
    const bool alike = found->n_specs == 1;
    *entry = (kvant_settings_layer){ alike ? found->specs[0] : NULL, found->n_kv_heads,
                                     found->head_dim, alike ? NULL : found->specs };
    return KVANT_OK;
}

/* The path of the calibration. KVANT_ERR_ARGUMENT: it does not fit, or it is relative and the
 * settings were not loaded from a file. */
static kvant_status find_calibration(const kvant_settings *settings, char *path, size_t bytes)
{
    const bool relative = settings->calibration[0] && !kvant_os_is_absolute(settings->calibration);
    KVANT_RETURN_IF(relative && !settings->folder, KVANT_ERR_ARGUMENT);
    const char *folder = relative ? settings->folder : "";
    KVANT_RETURN_IF(strlen(folder) + strlen(settings->calibration) >= bytes, KVANT_ERR_ARGUMENT);
    strcpy(path, folder);
    strcat(path, settings->calibration);
    return KVANT_OK;
}

/* A calibration that was made again for the same model is refused, too: measurements with the old
 * one do not hold for it. */
static kvant_status check_theirs(const kvant_settings *s, const kvant_calibration *calibration,
                                 const char *name, const kvant_error *error)
{
    kvant_calibration_info info = { .size = sizeof info };
    KVANT_FORWARD(kvant_calibration_get_info(calibration, &info));
    if (info.checksum == s->calibration_checksum)
        return KVANT_OK;
    return kvant_fail(
        error, KVANT_ERR_ARGUMENT,
        "%s is not the one that the settings were made with: its checksum is %016" PRIx64
        ", theirs %016" PRIx64,
        name, info.checksum, s->calibration_checksum);
}

kvant_status kvant_settings_load_calibration(const kvant_settings *settings, const char *path,
                                             kvant_calibration **calibration, char *err,
                                             size_t errlen)
{
    kvant_error error = { err, errlen };
    char own[PATH_MAX];
    if (!calibration)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the argument that receives the calibration is NULL");
    *calibration = NULL;
    if (!settings)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "settings is NULL");
    if (!settings->calibration[0])
        return KVANT_OK;
    if (!path && find_calibration(settings, own, sizeof own) != KVANT_OK)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT,
                          "the settings do not say in which folder %s is: give its path",
                          settings->calibration);
    path = path ? path : own;
    KVANT_FORWARD(kvant_calibration_load(path, calibration, err, errlen));
    kvant_status status = check_theirs(settings, *calibration, path, &error);
    if (status != KVANT_OK)
        kvant_calibration_free(calibration);
    return status;
}

/* Checks that the kv heads of a layer have entries in the calibration, and no further kv head
 * has. */
static kvant_status check_calibrated(const kvant_settings_entry *e,
                                     const kvant_calibration *calibration, uint32_t layer,
                                     kvant_role role, const kvant_error *error)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    if (kvant_calibration_get_entry(calibration, layer, e->n_kv_heads - 1, role, &entry) ==
            KVANT_OK &&
        entry.head_dim == e->head_dim &&
        kvant_calibration_get_entry(calibration, layer, e->n_kv_heads, role, &entry) != KVANT_OK)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_ARGUMENT,
                      "the calibration is for a model with other layers, kv heads or head_dim");
}

/* Makes the codecs of all kv heads, or one codec if they share a spec. *spec = the spec that
 * fails. */
static kvant_status check_specs(const kvant_settings_entry *e, uint32_t i,
                                const kvant_calibration *calibration, const char **spec,
                                const kvant_error *error)
{
    kvant_codec_info first = { .size = 0 }, info;
    for (uint32_t head = 0; head < e->n_specs; head++) {
        kvant_codec *codec;
        *spec = e->specs[head];
        KVANT_FORWARD(kvant_codec_create_calibrated(
            *spec, e->head_dim, i % 2 ? KVANT_ROLE_V : KVANT_ROLE_K, 0, calibration, i / 2, head,
            &codec, error->text, error->size));
        info = codec->info;
        kvant_codec_free(&codec);
        first = head == 0 ? info : first;
        if (!kvant_codecs_fit_together(&first, &info))
            return kvant_fail(error, KVANT_ERR_ARGUMENT,
                              "its sink, recent or kind of centre differs from %s of kv head 0",
                              e->specs[0]);
    }
    return KVANT_OK;
}

/* Checks the codecs of a layer. *spec = the spec that fails. */
static kvant_status check_layer(const kvant_settings *s, uint32_t i,
                                const kvant_calibration *calibration, const char **spec,
                                const kvant_error *error)
{
    const kvant_settings_entry *e = &s->entries[i];
    if (calibration && s->calibration[0])
        KVANT_FORWARD(
            check_calibrated(e, calibration, i / 2, i % 2 ? KVANT_ROLE_V : KVANT_ROLE_K, error));
    return e->n_specs > 1 || kvant_settings_is_first(s, i, 0)
               ? check_specs(e, i, calibration, spec, error)
               : KVANT_OK;
}

kvant_status kvant_settings_check(const kvant_settings *settings,
                                  const kvant_calibration *calibration, char *err, size_t errlen)
{
    kvant_error error = { err, errlen };
    if (!settings)
        return kvant_fail(&error, KVANT_ERR_ARGUMENT, "settings is NULL");
    if (calibration && settings->calibration[0])
        KVANT_FORWARD(check_theirs(settings, calibration, "the calibration", &error));
    for (uint32_t i = 0; i < 2 * settings->n_layers; i++) {
        char reason[512] = "";
        const char *spec = settings->entries[i].specs[0];
        kvant_error inner = { reason, sizeof reason };
        kvant_status status = check_layer(settings, i, calibration, &spec, &inner);
        if (status != KVANT_OK)
            return kvant_fail(&error, status, "layer %" PRIu32 ", %s, %s: %s", i / 2,
                              i % 2 ? "values" : "keys", spec,
                              reason[0] ? reason : kvant_strerror(status));
    }
    return KVANT_OK;
}
