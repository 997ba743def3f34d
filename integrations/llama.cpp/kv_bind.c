/* kv_bind.c - from a cache tensor's name and shape to its codecs and cells: which spec a layer gets, how much to reserve
 * while head_dim and the number of layers are not known, and what is created once they are (see kv_tensor.h). */
#include "kv_tensor.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec_cache.h"
#include "log.h"

/* Head dimensions worth reserving for when none is given: real models use multiples of 8 from 32 on.
 * Smaller ones would reserve for metadata that nobody stores. */
#define MIN_HEAD_DIM 32u
#define HEAD_DIM_STEP 8u

/* Beyond what any model has; a number in a name must not run over. */
#define MAX_LAYER 100000u

/* What ggml was told a tensor of this shape takes. */
struct decision {
    kvp_kv_shape shape;
    size_t reserved;
};

/* One llama context: its settings, and the tensors of all its caches (a model with a sliding window has two). */
struct kvp_layers {
    size_t n_users;
    uint32_t n;      /* the highest layer number, plus one */
    uint32_t n_here; /* layers whose keys are here */
    bool counted;    /* and it was said when they are not all */
    kvp_settings settings;
    struct decision *decisions;
    size_t n_decisions;
};

static pthread_mutex_t layers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t current_key; /* the context that a thread is creating; released with the thread */
static bool has_current_key;

static void layers_release(void *user)
{
    struct kvp_layers *layers = user;

    pthread_mutex_lock(&layers_lock);
    if (layers != NULL && --layers->n_users == 0) {
        free(layers->decisions);
        free(layers);
    }
    pthread_mutex_unlock(&layers_lock);
}

static void make_current_key(void)
{
    has_current_key = pthread_key_create(&current_key, layers_release) == 0;
}

/* Makes it this thread's; NULL gives up the one before. */
static bool set_current(struct kvp_layers *layers)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make_current_key);
    if (!has_current_key)
        return false;
    layers_release(pthread_getspecific(current_key));
    return pthread_setspecific(current_key, layers) == 0;
}

bool kvp_kv_new_context(char *err, size_t errlen)
{
    struct kvp_layers *layers = calloc(1, sizeof(*layers));

    if (layers == NULL || !set_current(NULL)) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        free(layers);
        return false;
    }
    layers->n_users = 1;
    if (!kvp_settings_read(&layers->settings, err, errlen) || !set_current(layers)) {
        free(layers);
        return false;
    }
    kvp_log_set_verbose(layers->settings.verbose);
    return true;
}

/* The context that this thread is creating. A program that allocates a buffer without a back end has one, too. */
static struct kvp_layers *current_layers(char *err, size_t errlen)
{
    struct kvp_layers *layers = has_current_key ? pthread_getspecific(current_key) : NULL;

    if (layers == NULL && kvp_kv_new_context(err, errlen))
        layers = pthread_getspecific(current_key);
    return layers;
}

static void layers_join(struct kvp_layers *layers, const kvp_kv_shape *shape)
{
    pthread_mutex_lock(&layers_lock);
    layers->n_users++;
    layers->n_here += shape->role == KVANT_ROLE_K;
    if (shape->layer >= layers->n)
        layers->n = shape->layer + 1;
    pthread_mutex_unlock(&layers_lock);
}

/* llama.cpp gives a device the last layers; those before stay uncompressed. Once per context, when all tensors exist. */
static void warn_of_missing(struct kvp_layers *layers)
{
    bool missing;

    pthread_mutex_lock(&layers_lock);
    missing = !layers->counted && layers->n_here < layers->n;
    layers->counted = true;
    pthread_mutex_unlock(&layers_lock);
    if (missing)
        kvp_error("warning: only %u of %u layers have a compressed cache, the others keep llama.cpp's own: set -ngl 99",
                  layers->n_here, layers->n);
}

static bool same_shape(const kvp_kv_shape *a, const kvp_kv_shape *b)
{
    return a->role == b->role && a->layer == b->layer && a->row == b->row && a->n_cells == b->n_cells &&
           a->n_streams == b->n_streams;
}

bool kvp_kv_name(const char *name)
{
    if (strncmp(name, "cache_k_l", 9) != 0 && strncmp(name, "cache_v_l", 9) != 0)
        return false;
    name += 9;
    return name[0] != '\0' && name[strspn(name, "0123456789")] == '\0';
}

bool kvp_kv_shape_read(const abi_tensor *tensor, kvp_kv_shape *shape, char *err, size_t errlen)
{
    unsigned long layer;

    if (!kvp_kv_name(tensor->name)) {
        snprintf(err, errlen,
                 "the model keeps state in %s, which is not a plain KV cache; recurrent, hybrid and "
                 "indexed models are not supported, run them without --device KVANT",
                 tensor->name);
        return false;
    }
    if (tensor->type != ABI_TYPE_F16) {
        snprintf(err, errlen,
                 "the cache type is not f16; kvant compresses what llama.cpp takes for an f16 cache: "
                 "set -ctk f16 -ctv f16 and choose the codecs with KVANT_PRESET, KVANT_K and KVANT_V, or use kvant exec "
                 "--accel for attention on llama.cpp's own types");
        return false;
    }
    layer = strtoul(tensor->name + 9, NULL, 10);
    if (layer > MAX_LAYER || tensor->ne[3] != 1 || tensor->ne[0] <= 0 || tensor->ne[0] > UINT32_MAX ||
        tensor->ne[1] <= 0 || tensor->ne[1] > UINT32_MAX || tensor->ne[2] <= 0 || tensor->ne[2] > UINT32_MAX) {
        snprintf(err, errlen, "%s has an unexpected shape", tensor->name);
        return false;
    }
    *shape = (kvp_kv_shape){
        .role = tensor->name[6] == 'k' ? KVANT_ROLE_K : KVANT_ROLE_V,
        .layer = (uint32_t)layer,
        .row = (uint32_t)tensor->ne[0],
        .n_cells = (uint32_t)tensor->ne[1],
        .n_streams = (uint32_t)tensor->ne[2],
    };
    return true;
}

static kvp_codec_site site_of(const kvp_kv_shape *shape, const kvp_settings *settings, const char *spec,
                              uint32_t head_dim, uint32_t kv_head)
{
    return (kvp_codec_site){ spec,         head_dim, shape->role, settings->seed, settings->calibration,
                             shape->layer, kv_head };
}

static kvant_cells_config cells_config(const kvp_kv_shape *shape, uint32_t head_dim)
{
    return (kvant_cells_config){
        .size = sizeof(kvant_cells_config),
        .n_kv_heads = shape->row / head_dim,
        .n_streams = shape->n_streams,
        .n_cells = shape->n_cells,
    };
}

/* The codecs of the first n kv heads: of one spec the same object, unless they are calibrated. NULL with a reason
 * when one cannot be made. The array is the caller's to free, the codecs are not. */
static const kvant_codec **get_codecs(const kvp_kv_shape *shape, const kvp_settings *settings,
                                      const kvant_settings_layer *layer, uint32_t head_dim, uint32_t n, char *err,
                                      size_t errlen)
{
    const kvant_codec **codecs = calloc(n, sizeof(*codecs));

    if (codecs == NULL)
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
    for (uint32_t head = 0; codecs != NULL && head < n; head++) {
        const char *spec = layer->heads != NULL ? layer->heads[head] : layer->spec;
        kvp_codec_site site = site_of(shape, settings, spec, head_dim, head);
        codecs[head] = kvp_codec_get(&site, err, errlen);
        if (codecs[head] == NULL) {
            free(codecs);
            return NULL;
        }
    }
    return codecs;
}

/* Why the cells of a configuration cannot be. */
static void say_invalid(const kvp_kv_shape *shape, const kvant_cells_config *config, char *err, size_t errlen)
{
    kvant_codec_info first = { .size = sizeof(first) }, info = { .size = sizeof(info) };

    snprintf(err, errlen, "%u cells x %u streams of %u numbers are too many", shape->n_cells, shape->n_streams,
             shape->row);
    kvant_codec_get_info(config->codec, &first);
    for (uint32_t head = 1; config->codecs != NULL && head < config->n_kv_heads; head++) {
        kvant_codec_get_info(config->codecs[head], &info);
        if (!kvant_codecs_fit_together(&first, &info))
            snprintf(err, errlen, "%s of kv head 0 and %s of kv head %u do not fit together in one layer", first.spec,
                     info.spec, head);
    }
}

/* Bytes for a layer's codecs and head_dim, 0 with a reason when they cannot serve it. Codecs of one spec have one
 * size, so that of the first kv head tells it. */
static size_t bytes_for(const kvp_kv_shape *shape, const kvp_settings *settings, const kvant_settings_layer *layer,
                        uint32_t head_dim, char *err, size_t errlen)
{
    kvant_cells_config config = cells_config(shape, head_dim);
    const kvant_codec **codecs =
        get_codecs(shape, settings, layer, head_dim, layer->heads != NULL ? config.n_kv_heads : 1, err, errlen);
    size_t bytes;

    if (codecs == NULL)
        return 0;
    config.codec = codecs[0];
    config.codecs = layer->heads != NULL ? codecs : NULL;
    bytes = kvant_cells_bytes(&config);
    if (bytes == 0)
        say_invalid(shape, &config, err, errlen);
    free(codecs);
    return bytes;
}

/* What a settings file says of the layer; false, with a line in err, when it is one for another model. */
static bool config_layer(const kvp_kv_shape *shape, const kvp_settings *settings, uint32_t n_layers,
                         kvant_settings_layer *layer, char *err, size_t errlen)
{
    kvant_settings_info info = { .size = sizeof(info) };

    if (kvant_settings_get_info(settings->config, &info) != KVANT_OK)
        return false;
    if (kvant_settings_get_layer(settings->config, shape->layer, shape->role, layer) != KVANT_OK ||
        (n_layers != 0 && n_layers != info.n_layers))
        snprintf(err, errlen,
                 "the settings file of KVANT_CONFIG is for a model of %u layers (%s), this one has %s%u",
                 info.n_layers, info.model, n_layers == 0 ? "at least " : "",
                 n_layers == 0 ? shape->layer + 1 : n_layers);
    else if ((uint64_t)layer->n_kv_heads * layer->head_dim != shape->row)
        snprintf(
            err, errlen,
            "the settings file of KVANT_CONFIG is for a model with %u kv heads of %u numbers (%s), here are %u "
            "numbers a row",
            layer->n_kv_heads, layer->head_dim, info.model, shape->row);
    else
        return true;
    return false;
}

/* What a layer may get: one choice of specs, or two while the number of layers, which tells the last ones, is not known
 * (n_layers 0). 0 of them, with a line in err, when a settings file is for another model. */
static uint32_t choices_of(const kvp_kv_shape *shape, const kvp_settings *settings, uint32_t n_layers,
                           kvant_settings_layer choices[2], char *err, size_t errlen)
{
    uint32_t n = settings->protect;

    if (settings->config != NULL)
        return config_layer(shape, settings, n_layers, &choices[0], err, errlen) ? 1 : 0;
    choices[0] = (kvant_settings_layer){ .spec = settings->spec[shape->role] };
    choices[1] = (kvant_settings_layer){ .spec = settings->protect_spec };
    if (n == 0)
        return 1;
    if (n_layers == 0)
        return 2;
    if (shape->layer < n || shape->layer + n >= n_layers)
        choices[0] = choices[1];
    return 1;
}

/* head_dim where something tells it before the graph does, else 0. */
static uint32_t given_head_dim(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    kvant_settings_layer layer;

    return settings->config != NULL &&
                   kvant_settings_get_layer(settings->config, shape->layer, shape->role, &layer) == KVANT_OK
               ? layer.head_dim
               : settings->head_dim;
}

/* Bytes for the largest of n choices, 0 with a reason when one of them cannot serve. */
static size_t bytes_for_any(const kvp_kv_shape *shape, const kvp_settings *settings,
                            const kvant_settings_layer *choices, uint32_t n, uint32_t head_dim, char *err,
                            size_t errlen)
{
    size_t most = 0;

    for (uint32_t i = 0; i < n; i++) {
        size_t bytes = bytes_for(shape, settings, &choices[i], head_dim, err, errlen);
        if (bytes == 0)
            return 0;
        if (bytes > most)
            most = bytes;
    }
    return most;
}

/* Bytes that hold the cells for every plausible head_dim, or for the given one; 0 with a reason. */
static size_t reserve(const kvp_kv_shape *shape, const kvp_settings *settings, char *err, size_t errlen)
{
    uint32_t given = given_head_dim(shape, settings);
    uint32_t first = given ? given : MIN_HEAD_DIM, last = given ? given : KVANT_MAX_HEAD_DIM;
    kvant_settings_layer choices[2];
    uint32_t n = choices_of(shape, settings, 0, choices, err, errlen);
    size_t most = 0;

    if (n == 0)
        return 0;
    err[0] = '\0';
    for (uint32_t head_dim = first; head_dim <= last; head_dim += HEAD_DIM_STEP) {
        size_t bytes =
            shape->row % head_dim ? 0 : bytes_for_any(shape, settings, choices, n, head_dim, err, errlen);
        if (bytes > most)
            most = bytes;
    }
    if (most == 0 && err[0] == '\0')
        snprintf(err, errlen, "no head_dim divides rows of %u numbers; set KVANT_HEAD_DIM to the model's (up to %u)",
                 shape->row, KVANT_MAX_HEAD_DIM);
    return most;
}

size_t kvp_kv_reserve(const kvp_kv_shape *shape, char *err, size_t errlen)
{
    struct kvp_layers *layers = current_layers(err, errlen);
    struct decision *decisions;
    size_t bytes;

    if (layers == NULL)
        return 0;
    for (size_t i = 0; i < layers->n_decisions; i++)
        if (same_shape(&layers->decisions[i].shape, shape))
            return layers->decisions[i].reserved;
    bytes = reserve(shape, &layers->settings, err, errlen);
    if (bytes == 0)
        return 0;
    decisions = realloc(layers->decisions, (layers->n_decisions + 1) * sizeof(*decisions));
    if (decisions == NULL) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        return 0;
    }
    layers->decisions = decisions;
    decisions[layers->n_decisions++] = (struct decision){ *shape, bytes };
    return bytes;
}

kvp_kv *kvp_kv_create(const char *name, const kvp_kv_shape *shape, void *memory, size_t reserved)
{
    kvp_kv *kv = calloc(1, sizeof(*kv));
    char err[512];

    if (kv == NULL)
        return NULL;
    snprintf(kv->name, sizeof(kv->name), "%s", name);
    kv->shape = *shape;
    kv->memory = memory;
    kv->reserved = reserved;
    kv->layers = current_layers(err, sizeof(err));
    if (kv->layers == NULL) {
        free(kv);
        return NULL;
    }
    layers_join(kv->layers, shape);
    kv->settings = &kv->layers->settings;
    return kv;
}

void kvp_kv_free(kvp_kv *kv)
{
    if (kv == NULL)
        return;
    kvant_cells_free(&kv->cells);
    layers_release(kv->layers);
    free(kv);
}

bool kvp_kv_create_cells(kvp_kv *kv, uint32_t head_dim, char *err, size_t errlen)
{
    kvant_cells_config config = cells_config(&kv->shape, head_dim);
    const kvant_codec **codecs;
    kvant_settings_layer choices[2];
    kvant_status status;
    size_t bytes;

    if (choices_of(&kv->shape, kv->settings, kv->layers->n, choices, err, errlen) == 0)
        return false;
    bytes = bytes_for(&kv->shape, kv->settings, &choices[0], head_dim, err, errlen);
    if (bytes == 0)
        return false;
    if (bytes > kv->reserved) {
        snprintf(err, errlen, "head_dim %u was not reserved for; set KVANT_HEAD_DIM=%u", head_dim, head_dim);
        return false;
    }
    codecs = get_codecs(&kv->shape, kv->settings, &choices[0], head_dim, config.n_kv_heads, err, errlen);
    if (codecs == NULL)
        return false;
    config.codecs = codecs;
    status = kvant_cells_create(&config, kv->memory, &kv->cells);
    free(codecs);
    if (status != KVANT_OK)
        snprintf(err, errlen, "%s", kvant_strerror(status));
    return status == KVANT_OK;
}

/* What was bound, in the user's terms. */
static void note_bound(const kvp_kv *kv)
{
    kvant_cells_config config = kvant_cells_get_config(kv->cells);
    kvant_codec_info first = { .size = sizeof(first) }, info = { .size = sizeof(info) };
    double bits = 0;
    bool alike = true;

    kvant_codec_get_info(config.codecs[0], &first);
    for (uint32_t head = 0; head < config.n_kv_heads; head++) {
        kvant_codec_get_info(config.codecs[head], &info);
        bits += info.true_bits / config.n_kv_heads;
        alike = alike && strcmp(first.spec, info.spec) == 0;
    }
    kvp_note("%s: %s%s, head_dim %u, %u kv heads, %u streams of %u cells, %.3f bits", kv->name, first.spec,
             alike ? "" : " and others", kv->head_dim, config.n_kv_heads, config.n_streams, config.n_cells, bits);
}

bool kvp_kv_bind(kvp_kv *kv, uint32_t head_dim)
{
    uint32_t given = given_head_dim(&kv->shape, kv->settings);
    char err[512] = "";

    if (kv->head_dim == head_dim)
        return true;
    if (kv->bind_failed)
        return false;
    if (kv->head_dim != 0)
        snprintf(err, sizeof(err), "already bound to head_dim %u", kv->head_dim);
    else if (kv->settings->head_dim != 0 && kv->settings->head_dim != head_dim)
        snprintf(err, sizeof(err), "KVANT_HEAD_DIM says %u", kv->settings->head_dim);
    else if (given != 0 && given != head_dim)
        snprintf(err, sizeof(err), "the settings file of KVANT_CONFIG says %u", given);
    else if (head_dim == 0 || kv->shape.row % head_dim != 0)
        snprintf(err, sizeof(err), "it does not divide rows of %u numbers", kv->shape.row);
    else if (kvp_kv_create_cells(kv, head_dim, err, sizeof(err))) {
        kv->head_dim = head_dim;
        note_bound(kv);
        warn_of_missing(kv->layers);
        return true;
    }
    kv->bind_failed = true;
    kvp_error("%s cannot serve attention with head_dim %u: %s", kv->name, head_dim, err);
    return false;
}

bool kvp_kv_ready(kvp_kv *kv)
{
    uint32_t given = given_head_dim(&kv->shape, kv->settings);

    return kv->cells != NULL || (given != 0 && kvp_kv_bind(kv, given));
}
