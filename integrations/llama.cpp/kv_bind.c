/* kv_bind.c - from a cache tensor's name and shape to its codecs and its kvant_tensor (see
 * kv_tensor.h).
 *
 * Keeps the state that the tensors of a context share, and creates a tensor when head_dim and the
 * number of layers are known. Before that, kv_reserve.c decides how many bytes a tensor takes.
 * Lines for the user come from kv_report.c. */
#include "kv_tensor.h"

#include <kvant/tensor_hooks.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffer_requests.h"
#include "kv_layers.h"
#include "host.h"
#include "kv_steps.h"
#include "llama_states.h"
#include "log.h"

/* More layers than any model has. A larger number in a tensor's name is refused before it
 * overflows. */
#define MAX_LAYER 100000u

static pthread_mutex_t layers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_key_t
    current_key; /* the context that a thread is creating; released with the thread */
static bool has_current_key;

static void layers_release(void *user)
{
    struct kvp_layers *layers = user;

    bool last;

    pthread_mutex_lock(&layers_lock);
    last = layers != NULL && --layers->n_users == 0;
    pthread_mutex_unlock(&layers_lock);
    if (last) {
        kvp_layer_kinds_free(&layers->kinds);
        free(layers);
    }
}

static void make_current_key(void)
{
    has_current_key = pthread_key_create(&current_key, layers_release) == 0;
}

/* Makes a context this thread's current one and gives up the previous one; NULL only gives up. */
static bool set_current(struct kvp_layers *layers)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make_current_key);
    if (!has_current_key)
        return false;
    layers_release(pthread_getspecific(current_key));
    return pthread_setspecific(current_key, layers) == 0;
}

/* The context that this thread is creating, or NULL. */
static struct kvp_layers *current(void)
{
    return has_current_key ? pthread_getspecific(current_key) : NULL;
}

bool kvp_kv_new_context(char *err, size_t errlen)
{
    struct kvp_layers *layers = calloc(1, sizeof(*layers));

    kvp_requests_reset();
    kvp_report("context");
    if (layers == NULL || !set_current(NULL)) {
        snprintf(err, errlen, "%s", kvant_strerror(KVANT_ERR_MEMORY));
        free(layers);
        return false;
    }
    layers->n_users = 1;
    layers->in_place = SIZE_MAX;
    if (!kvp_settings_read(&layers->settings, err, errlen) || !set_current(layers)) {
        free(layers);
        return false;
    }
    kvp_log_set(layers->settings.verbose, layers->settings.quiet);
    kvp_settings_find_calibration(&layers->settings);
    return true;
}

struct kvp_layers *kvp_kv_context(void)
{
    struct kvp_layers *layers = current();

    pthread_mutex_lock(&layers_lock);
    if (layers != NULL)
        layers->n_users++;
    pthread_mutex_unlock(&layers_lock);
    return layers;
}

void kvp_kv_context_release(struct kvp_layers *layers)
{
    kvp_requests_reset();
    layers_release(layers);
}

/* The context that this thread is creating. Creates one when a program allocates a buffer without a
 * back end. */
static struct kvp_layers *current_layers(char *err, size_t errlen)
{
    struct kvp_layers *layers = current();

    if (layers == NULL && kvp_kv_new_context(err, errlen))
        layers = pthread_getspecific(current_key);
    return layers;
}

void kvp_kv_note_state(uint32_t layer)
{
    if (current() != NULL)
        kvp_layer_kinds_add_state(&current()->kinds, layer);
}

void kvp_kv_note_keys_only(void)
{
    struct kvp_layers *layers = current();

    if (layers == NULL || !layers->kinds.keys_only)
        kvp_info("this model keeps keys without values (%s): that cache is not compressed",
                 layers != NULL && layers->latents ? "an indexer" : "MLA, an indexer");
    if (layers != NULL)
        layers->kinds.keys_only = true;
}

void kvp_kv_plan_keys_only(void)
{
    if (current() != NULL)
        current()->plans_keys_only = true;
}

bool kvp_kv_plans_keys_only(void)
{
    return current() != NULL && current()->plans_keys_only;
}

void kvp_kv_note_elsewhere(void)
{
    if (current() != NULL)
        current()->kinds.elsewhere = true;
}

/* Removes a tensor. The context ends with its last tensor, so the thread's next tensors belong to
 * another context. */
static void layers_leave(struct kvp_layers *layers)
{
    pthread_mutex_lock(&layers_lock);
    layers->n_alive--;
    layers->refused = layers->refused && layers->n_alive > 0;
    pthread_mutex_unlock(&layers_lock);
    layers_release(layers);
}

void kvp_kv_note_rotation(const kvp_kv *kv)
{
    kv->layers->rotated = true;
}

/* Adds a tensor; false without memory. */
static bool layers_join(struct kvp_layers *layers, const kvp_kv_shape *shape)
{
    bool joined;

    pthread_mutex_lock(&layers_lock);
    joined = kvp_layer_kinds_add(&layers->kinds, shape->layer);
    layers->n_users++;
    layers->n_tensors++;
    layers->n_alive++;
    layers->n_here += shape->role == KVANT_ROLE_K;
    layers->latents = layers->latents || shape->latents;
    if (shape->n_cells > layers->n_positions)
        layers->n_positions = shape->n_cells;
    if (layers->n_tensors == 1 || shape->layer < layers->first)
        layers->first = shape->layer;
    if (shape->layer >= layers->n)
        layers->n = shape->layer + 1;
    pthread_mutex_unlock(&layers_lock);
    return joined;
}

uint32_t kvp_kv_n_positions(const kvp_kv *kv)
{
    return kv->layers->n_positions;
}

uint32_t kvp_kv_n_layers(const kvp_kv *kv)
{
    return kv->layers->n_here;
}

bool kvp_kv_is_first(const kvp_kv *kv)
{
    return kv->shape.layer == kv->layers->first &&
           (kv->shape.layer == 0 || kv->layers->kinds.n_states > 0);
}

bool kvp_kv_is_cache_tensor(const abi_tensor *tensor)
{
    const char *name = tensor->name;

    if (tensor->ne[0] == 0)
        return false;
    if (strncmp(name, "cache_k_l", 9) != 0 && strncmp(name, "cache_v_l", 9) != 0)
        return false;
    name += 9;
    return name[0] != '\0' && name[strspn(name, "0123456789")] == '\0';
}

/* llama.cpp creates the cache of all tokens before the cache of a window. */
bool kvp_kv_shape_read(const abi_tensor *tensor, bool in_order, kvp_kv_shape *shape, char *err,
                       size_t errlen)
{
    unsigned long layer;

    if (tensor->type != ABI_TYPE_F16) {
        snprintf(
            err, errlen,
            "the cache type is not f16; kvant compresses what llama.cpp takes for an f16 cache: "
            "set -ctk f16 -ctv f16 and choose the codecs with KVANT_PRESET, KVANT_K and KVANT_V, "
            "or use kvant exec "
            "--accel for attention on llama.cpp's own types");
        return false;
    }
    layer = strtoul(tensor->name + 9, NULL, 10);
    if (layer > MAX_LAYER || tensor->ne[3] != 1 || tensor->ne[0] <= 0 ||
        tensor->ne[0] > UINT32_MAX || tensor->ne[1] <= 0 || tensor->ne[1] > UINT32_MAX ||
        tensor->ne[2] <= 0 || tensor->ne[2] > UINT32_MAX) {
        snprintf(err, errlen, "%s has an unexpected shape", tensor->name);
        return false;
    }
    *shape = (kvp_kv_shape){
        .role = tensor->name[6] == 'k' ? KVANT_ROLE_K : KVANT_ROLE_V,
        .layer = (uint32_t)layer,
        .row = (uint32_t)tensor->ne[0],
        .n_cells = (uint32_t)tensor->ne[1],
        .n_streams = (uint32_t)tensor->ne[2],
        .window = current() != NULL && tensor->ne[1] < current()->n_positions,
        .in_order = in_order,
    };
    return true;
}

/* The tensor's place in the scheme, when all tensors of the context have been created. */
static kvant_scheme_location final_location_of(const kvp_kv *kv, uint32_t head_dim)
{
    const kvp_layer_kinds *kinds = &kv->layers->kinds;
    kvant_scheme_location location = kvp_kv_location(&kv->shape, kv->layers->n, head_dim);

    location.rank = kvp_layer_kinds_rank(kinds, kv->shape.layer);
    location.n_cached = kinds->n_cached;
    return location;
}

const kvp_settings *kvp_kv_current_settings(void)
{
    const struct kvp_layers *layers = current();

    return layers != NULL ? &layers->settings : NULL;
}

size_t kvp_kv_reserve(const kvp_kv_shape *shape, char *err, size_t errlen)
{
    const struct kvp_layers *layers = current_layers(err, errlen);

    return layers != NULL ? kvp_kv_reserve_with(&layers->settings, shape, err, errlen) : 0;
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
    kv->single_position = -1;
    kv->layers = kvp_invalid_create(&kv->invalid, (size_t)shape->n_cells * shape->n_streams)
                     ? current_layers(err, sizeof(err))
                     : NULL;
    if (kv->layers == NULL) {
        kvp_invalid_free(&kv->invalid);
        free(kv);
        return NULL;
    }
    kv->settings = &kv->layers->settings;
    kvp_states_count(kv->settings->saves_codes ? 1 : 0);
    if (layers_join(kv->layers, shape))
        return kv;
    kvp_kv_free(kv);
    return NULL;
}

bool kvp_kv_set_placement(kvp_kv *kv, kvp_placement *placement)
{
    kv->generations = calloc(kvp_placement_blocks(kv->shape.n_cells), sizeof(*kv->generations));
    kv->placement = kv->generations != NULL ? placement : NULL;
    return kv->placement != NULL;
}

void kvp_kv_free(kvp_kv *kv)
{
    if (kv == NULL)
        return;
    kvp_states_count(kv->settings->saves_codes ? -1 : 0);
    if (kv->cells != NULL)
        kv->remote->destroy(kv);
    kvant_tensor_free(&kv->tensor);
    kvp_kv_drop_pending(kv);
    kvp_state_drop(kv);
    kvp_invalid_free(&kv->invalid);
    free(kv->generations);
    layers_leave(kv->layers);
    free(kv);
}

/* Finds the codecs of a tensor's kv heads, or of its parts; NULL, with a reason in
 * kvant_error_message(). */
static const kvant_codec *const *find_codecs(kvp_kv *kv, const kvant_scheme_location *location)
{
    const kvant_codec *const *codecs = NULL;

    if (kv->shape.latents)
        return kvp_mla_codecs(kv->settings, location, kv->shape.row, kv->parts) ? kv->parts : NULL;
    return kvant_scheme_codecs(kv->settings->scheme, location, &codecs) == KVANT_OK ? codecs : NULL;
}

bool kvp_kv_create_tensor(kvp_kv *kv, uint32_t head_dim, char *err, size_t errlen)
{
    kvant_scheme_location location = final_location_of(kv, head_dim);
    kvant_tensor_params params;
    kvant_exact_part part;
    size_t bytes;

    if (!kvp_kv_tensor_params(&kv->shape, kv->settings, &params, &part, err, errlen))
        return false;
    params.n_kv_heads = location.n_kv_heads;
    params.codecs = find_codecs(kv, &location);
    if (params.codecs == NULL || kvant_tensor_size(&params, &bytes) != KVANT_OK) {
        snprintf(err, errlen, "%s", kvant_error_message());
        return false;
    }
    if (bytes > kv->reserved) {
        snprintf(err, errlen,
                 "memory was reserved for another head_dim than %u; set KVANT_HEAD_DIM=%u",
                 head_dim, head_dim);
        return false;
    }
    if (kv->steps != NULL && !kvp_steps_map(kv)) {
        snprintf(err, errlen, "out of memory for the rows of a step");
        return false;
    }
    params.steps = kv->steps != NULL ? &kv->steps->pages : params.steps;
    if (kv->remote != NULL)
        return kv->remote->create(kv, params.codecs, params.n_kv_heads, head_dim, err, errlen);
    kv->roped = false;
    if (!kvp_host_commit(kv->memory, bytes)) {
        snprintf(err, errlen, "there is no memory for its %zu bytes; choose a smaller -c", bytes);
        return false;
    }
    if (kvant_tensor_create(&params, kv->memory, &kv->tensor) == KVANT_OK)
        return true;
    snprintf(err, errlen, "%s", kvant_error_message());
    return false;
}

size_t kvp_kv_extra_bytes(kvp_kv *kv)
{
    return atomic_load_explicit(&kv->beside, memory_order_relaxed);
}

void kvp_kv_count(kvp_kv *kv)
{
    const struct kvp_pending_rows *pending = &kv->pending;
    const size_t row =
        kv->shape.row * sizeof(float) + sizeof(*pending->cells) + sizeof(*pending->positions);

    atomic_store_explicit(&kv->beside,
                          kv->shared + kv->calibrated + kvant_tensor_learning_bytes(kv->tensor) +
                              pending->n * row,
                          memory_order_relaxed);
}

const kvant_codec *const *kvp_kv_codecs(const kvp_kv *kv)
{
    const kvant_scheme_location location = final_location_of(kv, kv->head_dim);
    const kvant_codec *const *codecs = NULL;

    if (kv->shape.latents)
        return kv->parts;
    return kvant_scheme_codecs(kv->settings->scheme, &location, &codecs) == KVANT_OK ? codecs
                                                                                     : NULL;
}

bool kvp_kv_size_now(const kvp_kv *kv, bool on_gpu, kvp_kv_size *size)
{
    const kvant_codec *const *codecs = kvp_kv_is_bound(kv) ? kvp_kv_codecs(kv) : NULL;

    return codecs != NULL && kvp_kv_full_size(kv, codecs, on_gpu, size);
}

/* Adds a bound tensor to the figures for the line at the start. */
static void note_bound(kvp_kv *kv)
{
    const uint32_t n_kv_heads = kv->shape.row / kv->head_dim;
    const kvant_codec *const *codecs = kvp_kv_codecs(kv);
    kvant_codec_info first = { .size = sizeof(first) }, info = { .size = sizeof(info) };
    bool alike = true;
    size_t in_place;

    if (codecs == NULL || !kvp_kv_full_size(kv, codecs, kv->remote != NULL, &kv->full))
        return;
    kvp_kv_size_add(&kv->layers->full, &kv->full);
    kv->layers->on_gpu = kv->layers->on_gpu || kv->remote != NULL;
    kv->layers->n_streams = kv->shape.n_streams;
    in_place = kvp_kv_tokens_in_place(kv, kv->remote != NULL);
    if (in_place < kv->layers->in_place)
        kv->layers->in_place = in_place;
    if (kv->shape.n_cells == kv->layers->n_positions)
        kv->layers->exact = kvp_kv_exact(&kv->shape, kv->settings, kv->shape.n_streams);
    kv->calibrated = kv->remote == NULL ? kvp_kv_calibrated_bytes(codecs, n_kv_heads) : 0;
    kvp_kv_count(kv);
    kvant_codec_get_info(codecs[0], &first);
    for (uint32_t head = 1; head < n_kv_heads; head++) {
        kvant_codec_get_info(codecs[head], &info);
        alike = alike && strcmp(first.spec, info.spec) == 0;
    }
    kvp_note("%s: %s%s, head_dim %u, %u kv heads, %u streams of %u cells, %.3f codec bits",
             kv->name, first.spec, alike ? "" : " and others", kv->head_dim, n_kv_heads,
             kv->shape.n_streams, kv->shape.n_cells,
             kv->full.codec_bits / (kv->full.numbers[0] + kv->full.numbers[1]));
}

/* Prints one line per context. The creation of the context then fails. */
void kvp_kv_refuse(kvp_kv *kv, const char *format, ...)
{
    char why[768];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(why, sizeof(why), format, arguments);
    va_end(arguments);
    if (!kv->layers->refused)
        kvp_error("%s: %s", kv->name, why);
    kv->layers->refused = true;
}

bool kvp_kv_refused(void)
{
    return current() != NULL && current()->refused;
}

bool kvp_kv_is_refused(const kvp_kv *kv)
{
    return kv->layers->refused;
}

void kvp_kv_note_attention(kvp_kv *kv, size_t bytes, size_t queries)
{
    struct kvp_layers *layers = kv->layers;

    layers->attention = bytes > layers->attention ? bytes : layers->attention;
    layers->queries = queries > layers->queries ? queries : layers->queries;
}

void kvp_kv_graph_is_sized(void)
{
    struct kvp_layers *layers = current();

    if (layers != NULL && layers->n_bound > 0 && layers->n_bound >= layers->n_tensors)
        kvp_layers_report(layers);
}

void kvp_kv_note_copies(kvp_kv *kv)
{
    if (!kv->layers->copies)
        kvp_info(
            "llama.cpp reads %s without flash attention, from a decoded copy of the whole cache "
            "for every token, which is slow: set -fa on (T5 has no flash attention even then)",
            kv->name);
    kv->layers->copies = true;
}

bool kvp_kv_bind(kvp_kv *kv, uint32_t head_dim)
{
    const bool latents = kv->shape.latents; /* rows of latents give head_dim by themselves */
    const uint32_t given = latents ? 0 : kvp_kv_known_head_dim(&kv->shape, kv->settings);
    char err[512] = "";

    head_dim = latents ? KVP_MLA_PART : head_dim;
    if (kv->head_dim == head_dim)
        return true;
    if (kv->bind_failed)
        return false;
    if (kv->head_dim != 0)
        snprintf(err, sizeof(err), "its head_dim is %u", kv->head_dim);
    else if (!latents && kv->settings->head_dim != 0 && kv->settings->head_dim != head_dim)
        snprintf(err, sizeof(err),
                 "KVANT_HEAD_DIM is %u; unset it, or set it to the head_dim of the model",
                 kv->settings->head_dim);
    else if (given != 0 && given != head_dim)
        snprintf(err, sizeof(err),
                 "the settings file of KVANT_CONFIG says %u; use a settings file of this model",
                 given);
    else if (head_dim == 0 || kv->shape.row % head_dim != 0)
        snprintf(err, sizeof(err), "it does not divide rows of %u values", kv->shape.row);
    else if (kvp_kv_create_tensor(kv, head_dim, err, sizeof(err))) {
        kv->head_dim = head_dim;
        note_bound(kv);
        if (++kv->layers->n_bound >= kv->layers->n_tensors && !kv->layers->on_gpu)
            kvp_layers_report(kv->layers);
        return true;
    }
    kv->bind_failed = true;
    kvp_kv_refuse(kv, "attention with head_dim %u cannot be computed: %s", head_dim, err);
    return false;
}

bool kvp_kv_ready(kvp_kv *kv)
{
    const uint32_t given =
        kv->shape.latents ? KVP_MLA_PART : kvp_kv_known_head_dim(&kv->shape, kv->settings);

    return kvp_kv_is_bound(kv) || (given != 0 && kvp_kv_bind(kv, given));
}
