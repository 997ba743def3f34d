/* llama_params.c - see llama_params.h: finds members by their defaults and sets them. */
#include "llama_params.h"

#include <string.h>

/* Places in bytes. */
enum { N_CTX = 0, N_BATCH = 4, N_UBATCH = 8, N_SEQ_MAX = 12, N_OUTPUTS = 20 };
enum { DEVICES = 0, N_GPU_LAYERS = 16, SPLIT_MODE = 20 };

static int32_t number_at(const llama_params *params, size_t place)
{
    int32_t number;
    memcpy(&number, params->bytes + place, sizeof number);
    return number;
}

static uint64_t word_at(const llama_params *params, size_t place)
{
    uint64_t word;
    memcpy(&word, params->bytes + place, sizeof word);
    return word;
}

static void set(llama_params *params, size_t place, const void *value, size_t bytes)
{
    memcpy(params->bytes + place, value, bytes);
}

/* After the split mode lie one to three numbers and then four pointers: the split between devices,
 * the callback, its argument and the overrides. Five or more switches follow, one of which is on
 * (use_extra_bufts). All pointers are NULL, so the first word that is not 0 is the switches'. */
static bool find_progress(const llama_params *params, size_t *place)
{
    const size_t switches = word_at(params, 64) != 0 ? 64 : 72;
    if (word_at(params, DEVICES) != 0 || word_at(params, DEVICES + 8) != 0 ||
        number_at(params, N_GPU_LAYERS) == 0 ||
        number_at(params, SPLIT_MODE) != LLAMA_SPLIT_MODE_LAYER || word_at(params, switches) == 0)
        return false;
    for (size_t at = switches - 32; at < switches; at += 8)
        if (word_at(params, at) != 0)
            return false;
    for (size_t at = switches; at < switches + 5; at++)
        if (params->bytes[at] > 1)
            return false;
    *place = switches - 24;
    return true;
}

bool model_params(llama_params *params, const model_settings *settings)
{
    size_t progress;
    if (!find_progress(params, &progress))
        return false;
    set(params, DEVICES, &settings->devices, sizeof settings->devices);
    set(params, N_GPU_LAYERS, &settings->n_gpu_layers, sizeof settings->n_gpu_layers);
    set(params, progress, &settings->progress, sizeof settings->progress);
    return true;
}

typedef struct context_offsets {
    size_t n_threads, flash_attention, on_node, type_k, swa_full;
    bool has_outputs;
} context_offsets;

static bool are(const llama_params *params, size_t place, int32_t number, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (number_at(params, place + 4 * i) != number)
            return false;
    return true;
}

/* Finds two counts of threads, which are 4, then the kind of context, which the first version
 * does not have, and four choices that are -1: RoPE's scaling, pooling, attention and flash
 * attention. */
static bool find_threads(const llama_params *params, context_offsets *places)
{
    size_t at = N_SEQ_MAX + 4;
    while (at < 40 && !are(params, at, GGML_DEFAULT_N_THREADS, 2))
        at += 4;
    const size_t choices = at + (are(params, at + 8, -1, 4) ? 8 : 12);
    *places = (context_offsets){ .n_threads = at,
                                 .flash_attention = choices + 12,
                                 .has_outputs = at >= N_OUTPUTS + 4 };
    return at < 40 && are(params, choices, -1, 4) &&
           (at == N_SEQ_MAX + 4 || at == N_OUTPUTS + 4 || at == N_OUTPUTS + 8);
}

/* Eight numbers of RoPE and of the cache after the choices, then a callback and its argument, both
 * NULL, and the types of the cache, both f16. */
static bool find_types(const llama_params *params, context_offsets *places)
{
    places->on_node = (places->flash_attention + 4 + 8 * 4 + 7) / 8 * 8;
    places->type_k = places->on_node + 16;
    return word_at(params, places->on_node) == 0 && word_at(params, places->on_node + 8) == 0 &&
           are(params, places->type_k, GGML_TYPE_F16, 2);
}

/* Six switches in a row: embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified. */
static bool find_switches(const llama_params *params, context_offsets *places)
{
    static const unsigned char defaults[] = { 0, 1, 1, 1, 1, 0 };
    size_t at = places->type_k + 8;
    while (at < 160 && memcmp(params->bytes + at, defaults, sizeof defaults) != 0)
        at += 8;
    places->swa_full = at + 4;
    return at < 160;
}

static bool find_context(const llama_params *params, context_offsets *places)
{
    return number_at(params, N_CTX) == 512 && number_at(params, N_BATCH) == 2048 &&
           number_at(params, N_UBATCH) == 512 && number_at(params, N_SEQ_MAX) == 1 &&
           find_threads(params, places) && find_types(params, places) &&
           find_switches(params, places);
}

bool context_params(llama_params *params, const context_settings *s)
{
    const bool swa_full = false; /* as llama.cpp's programs, not as its C interface, default to */
    context_offsets places;
    if (!find_context(params, &places))
        return false;
    set(params, N_CTX, &s->n_ctx, sizeof s->n_ctx);
    set(params, N_BATCH, &s->n_batch, sizeof s->n_batch);
    set(params, N_UBATCH, &s->n_ubatch, sizeof s->n_ubatch);
    if (places.has_outputs)
        set(params, N_OUTPUTS, &s->n_outputs, sizeof s->n_outputs);
    set(params, places.n_threads, &s->n_threads, sizeof s->n_threads);
    set(params, places.n_threads + 4, &s->n_threads, sizeof s->n_threads);
    set(params, places.flash_attention, &s->flash_attention, sizeof s->flash_attention);
    set(params, places.on_node, &s->on_node, sizeof s->on_node);
    set(params, places.on_node + 8, &s->on_node_user, sizeof s->on_node_user);
    set(params, places.type_k, &s->type_k, sizeof s->type_k);
    set(params, places.type_k + 4, &s->type_v, sizeof s->type_v);
    set(params, places.swa_full, &swa_full, sizeof swa_full);
    return true;
}
