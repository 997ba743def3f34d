/* scheme.c - see kvant/scheme.h: which codecs a model's layers have, and their bits. Sizes in bytes
 * are in scheme_size.c.
 *
 * Linked lists are fast enough here. A scheme has a few specs, each for the few head dimensions
 * that divide a model's row. With a calibration there is at most one codec per kv head. */
#include <kvant/calibration.h>
#include <kvant/scheme.h>

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/os.h"

#define MAX_SPEC 256u /* as KVANT_SPEC_MAX_LENGTH, with its end */

#define MAX_PATH 4096u /* as PATH_MAX of Linux */

typedef struct made_codec {
    struct made_codec *next;
    kvant_codec *codec;
    uint32_t head_dim, layer, kv_head;
    kvant_role role;
    bool anywhere; /* it does not depend on layer and kv head */
    char spec[MAX_SPEC];
} made_codec;

/* The codecs of a layer and role that were requested before. */
typedef struct made_list {
    struct made_list *next;
    kvant_scheme_location location;
    const kvant_codec *codecs[];
} made_list;

struct kvant_scheme {
    kvant_preset preset;    /* name NULL: none */
    char spec[2][MAX_SPEC]; /* per role; unused with settings */
    char protect_codec[MAX_SPEC];
    uint32_t protect;
    uint64_t seed;
    kvant_settings *settings;
    kvant_calibration *calibration;
    bool needs_calibration, borrowed; /* borrowed: the calibration belongs to another scheme */
    char calibration_path[MAX_PATH];
    /* "", or why the calibration in the model's folder is not used: its path, some words and an
     * error. */
    char not_used[MAX_PATH + 512 + 32];
    pthread_mutex_t lock; /* guards the two lists below */
    made_codec *codecs;
    made_list *lists;
};

/* Creation */

static kvant_status read_spec(const char *what, const char *text, char *spec)
{
    if (strlen(text) >= MAX_SPEC)
        return kvant_fail(NULL, KVANT_ERR_SPEC, "the spec of %s is longer than %u characters", what,
                          MAX_SPEC - 1);
    memcpy(spec, text, strlen(text) + 1);
    return KVANT_OK;
}

static kvant_status read_preset(kvant_scheme *scheme, const char *name)
{
    kvant_preset *preset = &scheme->preset;
    preset->size = sizeof *preset;
    if (kvant_preset_get(name, scheme->calibration != NULL, preset) != KVANT_OK)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "there is no preset '%s'; there are %s", name,
                          KVANT_PRESET_NAMES);
    KVANT_FORWARD(read_spec("keys", preset->k, scheme->spec[KVANT_ROLE_K]));
    return read_spec("values", preset->v, scheme->spec[KVANT_ROLE_V]);
}

/* Uses the calibration of another scheme, so that schemes of many configurations read it once. */
static bool borrow(kvant_scheme *scheme, const kvant_scheme *like)
{
    scheme->borrowed = like && like->calibration;
    if (scheme->borrowed)
        scheme->calibration = like->calibration;
    return scheme->borrowed;
}

static void drop_calibration(kvant_scheme *scheme)
{
    if (!scheme->borrowed)
        kvant_calibration_free(&scheme->calibration);
    scheme->calibration = NULL;
    scheme->borrowed = false;
}

static bool has_checksum(const kvant_calibration *calibration, uint64_t checksum)
{
    kvant_calibration_info info = { .size = sizeof info };
    return calibration && kvant_calibration_get_info(calibration, &info) == KVANT_OK &&
           info.checksum == checksum;
}

/* Puts the file's path before a reason that does not begin with it. Reasons of the file system
 * do. */
static kvant_status refuse_file(const char *path, kvant_status status, const char *err)
{
    if (strncmp(err, path, strlen(path)) == 0)
        return kvant_fail(NULL, status, "%s", err);
    return kvant_fail(NULL, status, "%s: %s", path, err[0] ? err : kvant_strerror(status));
}

/* Reads a settings file and the calibration that it names, unless `like` has the same
 * calibration. */
static kvant_status read_settings(kvant_scheme *scheme, const char *path, const kvant_scheme *like)
{
    kvant_settings_info info = { .size = sizeof info };
    char err[512] = "";
    kvant_status status = kvant_settings_load(path, &scheme->settings, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_settings_get_info(scheme->settings, &info);
    if (status == KVANT_OK && info.calibration &&
        !has_checksum(scheme->calibration, info.calibration_checksum)) {
        drop_calibration(scheme);
        scheme->calibration_path[0] = 0;
        if (!like || !has_checksum(like->calibration, info.calibration_checksum) ||
            !borrow(scheme, like))
            status = kvant_settings_load_calibration(scheme->settings, NULL, &scheme->calibration,
                                                     err, sizeof err);
    }
    if (status == KVANT_OK)
        status = kvant_settings_check(scheme->settings, scheme->calibration, err, sizeof err);
    scheme->needs_calibration = info.calibration != NULL;
    return status == KVANT_OK ? status : refuse_file(path, status, err);
}

/* Reads the calibration that the caller named. */
static kvant_status read_calibration(kvant_scheme *scheme, const char *path,
                                     const kvant_scheme *like)
{
    char err[512] = "";
    if (strlen(path) >= MAX_PATH)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the path of the calibration is longer than %u bytes: use a shorter one",
                          MAX_PATH - 1);
    memcpy(scheme->calibration_path, path, strlen(path) + 1);
    if (like && strcmp(like->calibration_path, path) == 0 && borrow(scheme, like))
        return KVANT_OK;
    kvant_status status = kvant_calibration_load(path, &scheme->calibration, err, sizeof err);
    return status == KVANT_OK ? status : refuse_file(path, status, err);
}

/* Looks for model.kvcal in the folder of model.gguf. It must have been made with this model: a
 * matching shape is not enough. */
static void find_calibration(kvant_scheme *scheme, const char *model, const kvant_scheme *like)
{
    kvant_calibration_info info = { .size = sizeof info };
    char err[512] = "";
    const size_t length = strlen(model), ending = strlen(".gguf");
    const bool has_ending = length > ending && strcmp(model + length - ending, ".gguf") == 0;
    const int n = snprintf(scheme->calibration_path, MAX_PATH, "%.*s.kvcal",
                           (int)(has_ending ? length - ending : length), model);
    if (like && strcmp(like->calibration_path, scheme->calibration_path) == 0 &&
        borrow(scheme, like))
        return;
    if (n > 0 && (size_t)n < MAX_PATH && kvant_os_exists(scheme->calibration_path)) {
        if (kvant_calibration_load(scheme->calibration_path, &scheme->calibration, err,
                                   sizeof err) == KVANT_OK &&
            kvant_calibration_get_info(scheme->calibration, &info) == KVANT_OK &&
            info.model_fingerprint != 0 && info.model_fingerprint == kvant_model_fingerprint(model))
            return;
        if (!err[0])
            snprintf(err, sizeof err, "it was made with another file than %s",
                     kvant_os_file_name(model));
        snprintf(scheme->not_used, sizeof scheme->not_used, "%s is not used: %s",
                 scheme->calibration_path, err);
    }
    kvant_calibration_free(&scheme->calibration);
    scheme->calibration_path[0] = 0;
}

/* Checks a spec before a model is known: it must work for one of the head dimensions that models
 * use. */
static kvant_status check_spec(kvant_scheme *scheme, const char *spec, kvant_role role)
{
    char err[512] = "";
    int needed = 0;
    kvant_status status = kvant_codec_needs_calibration(spec, role, &needed, err, sizeof err);
    if (status == KVANT_OK)
        status = kvant_codec_check(spec, role, scheme->calibration, err, sizeof err);
    scheme->needs_calibration |= needed != 0;
    return status == KVANT_OK
               ? status
               : kvant_fail(NULL, status, "%s: %s", spec, err[0] ? err : kvant_strerror(status));
}

static kvant_status check_specs(kvant_scheme *scheme)
{
    for (int role = 0; role < 2; role++) {
        KVANT_FORWARD(check_spec(scheme, scheme->spec[role], (kvant_role)role));
        /* This is checked even if no layer uses it yet. */
        KVANT_FORWARD(check_spec(scheme, scheme->protect_codec, (kvant_role)role));
    }
    return KVANT_OK;
}

static bool uses_calibration(const char *spec, kvant_role role)
{
    int needed = 0;
    return kvant_codec_needs_calibration(spec, role, &needed, NULL, 0) == KVANT_OK && needed;
}

/* Reads specs or a preset. A preset always uses a calibration; a spec uses one only if it makes no
 * codec without. */
static kvant_status read_specs(kvant_scheme *scheme, const kvant_scheme_params *p)
{
    const bool preset = !p->k && !p->v;
    KVANT_FORWARD(read_spec("protected layers", p->protect_codec ? p->protect_codec : "f16",
                            scheme->protect_codec));
    scheme->protect = p->protect;
    if (!preset) {
        KVANT_FORWARD(read_spec("keys", p->k ? p->k : p->v, scheme->spec[KVANT_ROLE_K]));
        KVANT_FORWARD(read_spec("values", p->v ? p->v : p->k, scheme->spec[KVANT_ROLE_V]));
    }
    if (!scheme->calibration && p->model &&
        (preset || uses_calibration(scheme->spec[KVANT_ROLE_K], KVANT_ROLE_K) ||
         uses_calibration(scheme->spec[KVANT_ROLE_V], KVANT_ROLE_V)))
        find_calibration(scheme, p->model, p->like);
    if (preset)
        KVANT_FORWARD(read_preset(scheme, p->preset ? p->preset : KVANT_PRESET_DEFAULT));
    const kvant_status status = check_specs(scheme);
    if (status != KVANT_ERR_UNSUPPORTED || !scheme->not_used[0])
        return status;
    char why[512];
    snprintf(why, sizeof why, "%s", kvant_error_message());
    return kvant_fail(NULL, status, "%s; %s", why, scheme->not_used);
}

static kvant_status fill(kvant_scheme *scheme, const kvant_scheme_params *p)
{
    scheme->seed = p->seed;
    if ((p->preset != NULL) + (p->k || p->v) + (p->settings != NULL) > 1 ||
        (p->settings && (p->protect || p->protect_codec)))
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "preset, specs (k, v) and settings each choose the codecs: give one of them%s",
            p->settings ? ", and neither protect nor protect_codec with settings" : "");
    if (p->calibration)
        KVANT_FORWARD(read_calibration(scheme, p->calibration, p->like));
    return p->settings ? read_settings(scheme, p->settings, p->like) : read_specs(scheme, p);
}

kvant_status kvant_scheme_create(const kvant_scheme_params *params, kvant_scheme **out)
{
    kvant_scheme_params p;
    KVANT_RETURN_IF(!out, KVANT_ERR_ARGUMENT);
    *out = NULL;
    if (!KVANT_ACCEPT_STRUCT(kvant_scheme_params, &p, params, seed))
        return kvant_fail(
            NULL, KVANT_ERR_ARGUMENT,
            "scheme: params is NULL, or its size field is not set to sizeof(kvant_scheme_params)");
    kvant_scheme *scheme = kvant_alloc(1, sizeof *scheme);
    if (!scheme)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for a scheme");
    pthread_mutex_init(&scheme->lock, NULL);
    kvant_status status = fill(scheme, &p);
    if (status != KVANT_OK)
        kvant_scheme_free(&scheme);
    *out = scheme;
    return status;
}

void kvant_scheme_free(kvant_scheme **scheme)
{
    if (!scheme || !*scheme)
        return;
    for (made_codec *m = (*scheme)->codecs, *next; m; m = next) {
        next = m->next;
        kvant_codec_free(&m->codec);
        kvant_free(m);
    }
    for (made_list *l = (*scheme)->lists, *next; l; l = next) {
        next = l->next;
        kvant_free(l);
    }
    kvant_settings_free(&(*scheme)->settings);
    drop_calibration(*scheme);
    pthread_mutex_destroy(&(*scheme)->lock);
    kvant_free(*scheme);
    *scheme = NULL;
}

/* Codecs */

static const kvant_codec *find(const kvant_scheme *scheme, const char *spec,
                               const kvant_scheme_location *location, uint32_t kv_head)
{
    for (const made_codec *m = scheme->codecs; m; m = m->next)
        if (m->head_dim == location->head_dim && m->role == location->role &&
            strcmp(m->spec, spec) == 0 &&
            (m->anywhere || (m->layer == location->layer && m->kv_head == kv_head)))
            return m->codec;
    return NULL;
}

static kvant_status create_at(const kvant_scheme *scheme, const char *spec,
                              const kvant_scheme_location *location, uint32_t kv_head,
                              const kvant_calibration *calibration, kvant_codec **codec)
{
    char err[512] = "";
    kvant_status status = kvant_codec_create_calibrated(spec, location->head_dim, location->role,
                                                        scheme->seed, calibration, location->layer,
                                                        kv_head, codec, err, sizeof err);
    return status == KVANT_OK
               ? status
               : kvant_fail(NULL, status, "%s: %s", spec, err[0] ? err : kvant_strerror(status));
}

/* Makes a codec. If no calibration is needed for it, it does not depend on layer and kv head. */
static kvant_status make(kvant_scheme *scheme, const char *spec,
                         const kvant_scheme_location *location, uint32_t kv_head,
                         const kvant_codec **codec)
{
    made_codec *m = kvant_alloc(1, sizeof *m);
    if (!m)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for a codec");
    kvant_status status = create_at(scheme, spec, location, kv_head, NULL, &m->codec);
    m->anywhere = status == KVANT_OK;
    if (status == KVANT_ERR_UNSUPPORTED && scheme->calibration)
        status = create_at(scheme, spec, location, kv_head, scheme->calibration, &m->codec);
    if (status != KVANT_OK) {
        kvant_free(m);
        return status;
    }
    m->head_dim = location->head_dim;
    m->role = location->role;
    m->layer = location->layer;
    m->kv_head = kv_head;
    snprintf(m->spec, sizeof m->spec, "%s", spec);
    m->next = scheme->codecs;
    scheme->codecs = m;
    *codec = m->codec;
    return KVANT_OK;
}

static const char *ordinary_spec(const kvant_scheme *scheme, const kvant_scheme_location *location)
{
    return scheme->preset.name ? kvant_preset_spec(&scheme->preset, location->role, location->layer,
                                                   location->head_dim)
                               : scheme->spec[location->role];
}

static bool is_protected(const kvant_scheme *scheme, const kvant_scheme_location *location)
{
    const uint32_t n = location->n_cached ? location->n_cached : location->n_layers;
    const uint32_t at = location->n_cached ? location->rank : location->layer;
    return location->n_layers && (at < scheme->protect || at + scheme->protect >= n);
}

/* Chooses the specs of a layer, and checks that a settings file fits the model. */
static kvant_status choose(const kvant_scheme *scheme, const kvant_scheme_location *location,
                           kvant_settings_layer *layer)
{
    kvant_settings_info info = { .size = sizeof info };
    if (!scheme->settings) {
        const bool protected = is_protected(scheme, location);
        *layer = (kvant_settings_layer){ .spec = protected ? scheme->protect_codec
                                                           : ordinary_spec(scheme, location) };
        return KVANT_OK;
    }
    KVANT_FORWARD(kvant_settings_get_info(scheme->settings, &info));
    if (kvant_settings_get_layer(scheme->settings, location->layer, location->role, layer) !=
            KVANT_OK ||
        (location->n_layers && location->n_layers != info.n_layers))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the settings file is for a model of %u layers (%s), but this model has "
                          "%s%u: make one with kvant tune",
                          info.n_layers, info.model, location->n_layers ? "" : "at least ",
                          location->n_layers ? location->n_layers : location->layer + 1);
    if (layer->n_kv_heads != location->n_kv_heads || layer->head_dim != location->head_dim)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the settings file is for a model with %u kv heads of head_dim %u (%s), "
                          "but this model has %u of %u: make one with kvant tune",
                          layer->n_kv_heads, layer->head_dim, info.model, location->n_kv_heads,
                          location->head_dim);
    return KVANT_OK;
}

static kvant_status fill_list(kvant_scheme *scheme, const kvant_settings_layer *layer,
                              made_list *list)
{
    for (uint32_t head = 0; head < list->location.n_kv_heads; head++) {
        const char *spec = layer->heads ? layer->heads[head] : layer->spec;
        list->codecs[head] = find(scheme, spec, &list->location, head);
        if (!list->codecs[head])
            KVANT_FORWARD(make(scheme, spec, &list->location, head, &list->codecs[head]));
    }
    return KVANT_OK;
}

static bool same_location(const kvant_scheme_location *a, const kvant_scheme_location *b)
{
    return a->role == b->role && a->layer == b->layer && a->n_layers == b->n_layers &&
           a->n_kv_heads == b->n_kv_heads && a->head_dim == b->head_dim && a->rank == b->rank &&
           a->n_cached == b->n_cached;
}

static kvant_status list_codecs(kvant_scheme *scheme, const kvant_scheme_location *location,
                                const kvant_settings_layer *layer,
                                const kvant_codec *const **codecs)
{
    size_t bytes;
    if (!kvant_mul_size(location->n_kv_heads, sizeof(kvant_codec *), &bytes) ||
        bytes > SIZE_MAX / 2)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "scheme: n_kv_heads is too large");
    made_list *list = kvant_alloc(1, sizeof *list + bytes);
    if (!list)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for codecs");
    list->location = *location;
    kvant_status status = fill_list(scheme, layer, list);
    if (status != KVANT_OK) {
        kvant_free(list);
        return status;
    }
    list->next = scheme->lists;
    scheme->lists = list;
    *codecs = list->codecs;
    return KVANT_OK;
}

static kvant_status codecs_at(kvant_scheme *scheme, const kvant_scheme_location *location,
                              const kvant_codec *const **codecs)
{
    kvant_settings_layer layer;
    for (const made_list *l = scheme->lists; l; l = l->next)
        if (same_location(&l->location, location)) {
            *codecs = l->codecs;
            return KVANT_OK;
        }
    KVANT_FORWARD(choose(scheme, location, &layer));
    return list_codecs(scheme, location, &layer, codecs);
}

static kvant_status accept_location(const kvant_scheme *scheme,
                                    const kvant_scheme_location *location, kvant_scheme_location *p)
{
    if (!scheme || !KVANT_ACCEPT_STRUCT(kvant_scheme_location, p, location, head_dim))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: scheme or location is NULL, or the size field of location is "
                          "not set to sizeof(kvant_scheme_location)");
    if (p->role != KVANT_ROLE_K && p->role != KVANT_ROLE_V)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: role is neither KVANT_ROLE_K nor KVANT_ROLE_V");
    return KVANT_OK;
}

kvant_status kvant_scheme_codecs(kvant_scheme *scheme, const kvant_scheme_location *location,
                                 const kvant_codec *const **codecs)
{
    kvant_scheme_location p;
    KVANT_FORWARD(accept_location(scheme, location, &p));
    if (!codecs || !p.n_kv_heads || !p.head_dim)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: codecs is NULL, or n_kv_heads or head_dim is 0");
    pthread_mutex_lock(&scheme->lock);
    kvant_status status = codecs_at(scheme, &p, codecs);
    pthread_mutex_unlock(&scheme->lock);
    return status;
}

kvant_status kvant_scheme_head_dim(const kvant_scheme *scheme, uint32_t layer, kvant_role role,
                                   uint32_t *head_dim)
{
    kvant_settings_layer entry;
    kvant_calibration_entry measured = { .size = sizeof measured };
    KVANT_RETURN_IF(!scheme || !head_dim, KVANT_ERR_ARGUMENT);
    *head_dim = 0;
    if (scheme->settings &&
        kvant_settings_get_layer(scheme->settings, layer, role, &entry) == KVANT_OK)
        *head_dim = entry.head_dim;
    else if (scheme->calibration && kvant_calibration_get_entry(scheme->calibration, layer, 0, role,
                                                                &measured) == KVANT_OK)
        *head_dim = measured.head_dim;
    return KVANT_OK;
}

/* Bits */

/* Checks that a settings file fits the model: its layers have the model's kv heads. A model may mix
 * head dimensions, but the caller knows only one, so one layer with it is enough. */
static kvant_status check_model(const kvant_scheme *scheme, const kvant_scheme_model *model)
{
    kvant_settings_info info = { .size = sizeof info };
    kvant_settings_layer first = { .spec = NULL }, layer;
    bool found[2] = { false, false };
    if (!scheme->settings)
        return KVANT_OK;
    KVANT_FORWARD(kvant_settings_get_info(scheme->settings, &info));
    KVANT_FORWARD(kvant_settings_get_layer(scheme->settings, 0, KVANT_ROLE_K, &first));
    for (uint32_t i = 0; i < 2 * info.n_layers; i++)
        if (kvant_settings_get_layer(scheme->settings, i / 2, (kvant_role)(i % 2), &layer) ==
            KVANT_OK)
            found[i % 2] |= layer.head_dim == model->head_dim[i % 2];
    if (info.n_layers == model->n_layers && first.n_kv_heads == model->n_kv_heads && found[0] &&
        found[1])
        return KVANT_OK;
    return kvant_fail(
        NULL, KVANT_ERR_ARGUMENT,
        "the settings file is for another model: for %s with %u layers of %u kv heads of head_dim "
        "%u; this model has %u layers of %u of %u: make one with kvant tune",
        info.model[0] ? info.model : "a model without a name", info.n_layers, first.n_kv_heads,
        first.head_dim, model->n_layers, model->n_kv_heads, model->head_dim[KVANT_ROLE_K]);
}

/* The bits of a spec. They do not depend on layer and kv head, so one codec stands for all. */
static kvant_status bits_of(kvant_scheme *scheme, const char *spec,
                            const kvant_scheme_location *location, double *bits)
{
    kvant_codec_info info = { .size = sizeof info };
    const kvant_codec *codec = NULL;
    for (const made_codec *m = scheme->codecs; m && !codec; m = m->next)
        if (m->head_dim == location->head_dim && m->role == location->role &&
            strcmp(m->spec, spec) == 0)
            codec = m->codec;
    if (!codec)
        KVANT_FORWARD(make(scheme, spec, location, 0, &codec));
    KVANT_FORWARD(kvant_codec_get_info(codec, &info));
    *bits = info.true_bits;
    return KVANT_OK;
}

static kvant_status add_bits(kvant_scheme *scheme, kvant_scheme_location location, double *sum,
                             double *numbers)
{
    kvant_settings_layer layer;
    double bits;
    if (scheme->settings && kvant_settings_get_layer(scheme->settings, location.layer,
                                                     location.role, &layer) == KVANT_OK) {
        location.n_kv_heads = layer.n_kv_heads;
        location.head_dim = layer.head_dim;
    }
    KVANT_FORWARD(choose(scheme, &location, &layer));
    for (uint32_t head = 0; head < location.n_kv_heads; head++) {
        KVANT_FORWARD(
            bits_of(scheme, layer.heads ? layer.heads[head] : layer.spec, &location, &bits));
        *sum += bits * location.head_dim;
        *numbers += location.head_dim;
    }
    return KVANT_OK;
}

kvant_status kvant_scheme_true_bits(kvant_scheme *scheme, const kvant_scheme_model *model,
                                    double *bits)
{
    kvant_scheme_model m;
    double sum = 0, numbers = 0;
    if (!scheme || !bits || !KVANT_ACCEPT_STRUCT(kvant_scheme_model, &m, model, head_dim) ||
        !m.n_layers || !m.n_kv_heads)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: scheme, model or bits is NULL, n_layers or n_kv_heads is 0, or "
                          "the size field of model is not set to sizeof(kvant_scheme_model)");
    kvant_status status = check_model(scheme, &m);
    pthread_mutex_lock(&scheme->lock);
    for (uint32_t i = 0; i < 2 * m.n_layers && status == KVANT_OK; i++) {
        const kvant_scheme_location location = { .role = (kvant_role)(i % 2),
                                                 .layer = i / 2,
                                                 .n_layers = m.n_layers,
                                                 .n_kv_heads = m.n_kv_heads,
                                                 .head_dim = m.head_dim[i % 2] };
        status = add_bits(scheme, location, &sum, &numbers);
    }
    pthread_mutex_unlock(&scheme->lock);
    if (status == KVANT_OK)
        *bits = sum / numbers;
    return status;
}

kvant_status kvant_scheme_get_info(const kvant_scheme *scheme, kvant_scheme_info *info)
{
    KVANT_RETURN_IF(!scheme, KVANT_ERR_ARGUMENT);
    kvant_scheme_info full = { .preset = scheme->preset.name,
                               .k = scheme->settings ? NULL : scheme->spec[KVANT_ROLE_K],
                               .v = scheme->settings ? NULL : scheme->spec[KVANT_ROLE_V],
                               .protect = scheme->protect,
                               .settings = scheme->settings,
                               .calibration = scheme->calibration,
                               .needs_calibration = scheme->needs_calibration,
                               .calibration_path =
                                   scheme->calibration_path[0] ? scheme->calibration_path : NULL,
                               .not_used = scheme->not_used[0] ? scheme->not_used : NULL };
    return KVANT_RETURN_STRUCT(kvant_scheme_info, info, &full, needs_calibration)
               ? KVANT_OK
               : KVANT_ERR_ARGUMENT;
}
