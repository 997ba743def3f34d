/* cuda_layers.c - makes and frees what a cache keeps on a GPU. Refuses codecs that need open
 * pages or that have no kernel, with the codec's name and what works instead. */
#include "cuda_layers.h"

#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "tensor.h"

#define WORKS_ANYWAY "k = v = \"turboquant-4\" or \"int-4\" works; codecs of a calibration work with sink=0"

static kvant_status unsupported(uint32_t layer, kvant_role role, const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda: %s of layer %u: %s; " WORKS_ANYWAY,
                      role == KVANT_ROLE_K ? "keys" : "values", (unsigned)layer, what);
}

static const char *why_open(const kvant_codec_info *info)
{
    if (info->center == KVANT_CENTER_FIRST || info->norm == KVANT_NORM_FIRST)
        return "takes its centre or scale from the first rows";
    if (info->sink_tokens || info->recent_tokens)
        return "keeps some tokens as fp16";
    return info->block_tokens > 1 ? "quantises groups of tokens" : NULL;
}

static kvant_status check_part(const cuda_part *part, uint32_t n_kv_heads, uint32_t layer, kvant_role role)
{
    char text[512];
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        const kvant_codec_info *info = &part->codecs[head]->info;
        text[0] = 0;
        if (why_open(info))
            kvant_append(text, sizeof text, "%s %s, which needs open pages, and these are on the CPU only",
                         info->spec, why_open(info));
        else if (strcmp(info->spec, part->codecs[0]->info.spec) != 0)
            kvant_append(text, sizeof text, "kv heads have different codecs (%s, %s), which only the CPU has",
                         part->codecs[0]->info.spec, info->spec);
        if (text[0])
            return unsupported(layer, role, text);
    }
    return KVANT_OK;
}

/* Whether every codec could be on a GPU as far as libkvant knows: a message about a codec is of
 * more use than one about a missing driver. */
static kvant_status check_scheme(kvant_cache *cache, cuda_layer *layers)
{
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        cuda_part *part = &layers[i / 2].parts[i % 2];
        KVANT_FORWARD(kvant_cache_codecs(cache, i / 2, (kvant_role)(i % 2), &part->codecs));
        KVANT_FORWARD(check_part(part, cache->params.n_kv_heads, i / 2, (kvant_role)(i % 2)));
    }
    if (cache->params.n_heads / cache->params.n_kv_heads > KVANT_CUDA_MOST_HEADS_PER_KV_HEAD)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda: more than %u heads per kv head",
                          KVANT_CUDA_MOST_HEADS_PER_KV_HEAD);
    return KVANT_OK;
}

static kvant_status check_device(const kvant_cache *cache)
{
    const char *name = cache->params.device;
    int current = 0;
    KVANT_FORWARD(kvant_cuda_available(NULL, 0));
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_device_current(&current), "the current GPU"));
    if (strcmp(name, "cuda:0") == 0 && current != 0)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED, "cache on cuda:0: the thread's current GPU is %d", current);
    return KVANT_OK;
}

/* Layers of equal specs share a codec: it holds no numbers of a calibration. */
static kvant_status create_codec(cuda_layer *layers, uint32_t layer, kvant_role role)
{
    cuda_part *part = &layers[layer].parts[role];
    char text[512] = "";
    for (uint32_t i = 0; i < layer && !part->codec; i++)
        if (strcmp(layers[i].parts[role].codecs[0]->info.spec, part->codecs[0]->info.spec) == 0)
            part->codec = layers[i].parts[role].codec;
    if (part->codec)
        return KVANT_OK;
    kvant_status status = kvant_cuda_codec_from(part->codecs[0], &part->codec, text, sizeof text);
    part->owns_codec = status == KVANT_OK;
    return status == KVANT_ERR_UNSUPPORTED ? unsupported(layer, role, text) : status;
}

static kvant_status upload(void **device, const void *from, size_t bytes)
{
    kvant_status status = kvant_cuda_memory_new(device, bytes);
    return status == KVANT_OK ? kvant_cuda_memory_copy(*device, from, bytes) : status;
}

/* The arrays of a part on the host, in the order of their places on the device: centre, factors,
 * attention factors, weights, inverse weights. */
enum { CENTER, FACTORS, ATTENTION_FACTORS, WEIGHTS, INVERSE_WEIGHTS, N_ARRAYS };

static void gather_head(const kvant_cuda_tables *t, size_t d, uint32_t head, float *const *arrays)
{
    const float *sources[N_ARRAYS] = { t->center, t->factors, NULL, t->weights, t->inverse_weights };
    for (int i = 0; i < N_ARRAYS; i++) {
        size_t n = i >= WEIGHTS ? t->n_weights : d;
        if (sources[i])
            memcpy(arrays[i] + head * n, sources[i], n * sizeof(float));
    }
    for (size_t j = 0; j < d; j++)
        arrays[ATTENTION_FACTORS][head * d + j] =
            (t->factors ? t->factors[j] : 1) * (t->n_weights == d ? t->inverse_weights[j] : 1);
}

static kvant_status upload_numbers(cuda_part *part, const kvant_cuda_tables *first, uint32_t n_kv_heads, size_t d)
{
    size_t offsets[N_ARRAYS + 1] = { 0 };
    for (int i = 0; i < N_ARRAYS; i++)
        offsets[i + 1] = offsets[i] + n_kv_heads * (i >= WEIGHTS ? first->n_weights : d);
    float *host = kvant_alloc(offsets[N_ARRAYS], sizeof *host), *arrays[N_ARRAYS];
    KVANT_RETURN_IF(!host, KVANT_ERR_MEMORY);
    for (int i = 0; i < N_ARRAYS; i++)
        arrays[i] = host + offsets[i];
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        kvant_cuda_codec_tables(part->codecs[head], &tables);
        gather_head(&tables, d, head, arrays);
    }
    void *device = NULL;
    kvant_status status = upload(&device, host, offsets[N_ARRAYS] * sizeof *host);
    kvant_free(host);
    part->numbers = device;
    part->center = first->center ? part->numbers + offsets[CENTER] : NULL;
    part->factors = first->factors ? part->numbers + offsets[FACTORS] : NULL;
    part->attention_factors =
        first->factors || first->n_weights == d ? part->numbers + offsets[ATTENTION_FACTORS] : NULL;
    part->weights = first->n_weights ? part->numbers + offsets[WEIGHTS] : NULL;
    part->inverse_weights = first->n_weights ? part->numbers + offsets[INVERSE_WEIGHTS] : NULL;
    part->n_weights = first->n_weights;
    return status;
}

static kvant_status create_numbers(cuda_part *part, uint32_t n_kv_heads, uint32_t layer, kvant_role role)
{
    const kvant_codec_info *info = &part->codecs[0]->info;
    const size_t d = info->head_dim;
    kvant_cuda_tables tables = { .size = sizeof tables };
    KVANT_FORWARD(kvant_cuda_codec_tables(part->codecs[0], &tables));
    if ((info->center == KVANT_CENTER_FILE && !tables.center) || (info->norm == KVANT_NORM_FILE && !tables.factors))
        return unsupported(layer, role, "the codec takes its centre or scale from a calibration: there is none");
    if (tables.n_weights > d && (role == KVANT_ROLE_V || tables.factors))
        return unsupported(layer, role, "transform=file is for keys without norm=file there");
    if (!tables.center && !tables.factors && !tables.n_weights)
        return KVANT_OK;
    return kvant_cuda_said(upload_numbers(part, &tables, n_kv_heads, d), "numbers of a calibration");
}

static kvant_status create_pages(kvant_cache *cache, cuda_layer *layer)
{
    size_t bytes;
    void *pages;
    for (int role = 0; role < 2; role++) {
        cuda_part *part = &layer->parts[role];
        part->page_bytes = part->codecs[0]->info.page_bytes;
        part->offset = layer->block_bytes;
        layer->block_bytes += part->page_bytes * cache->params.n_kv_heads;
        part->written = kvant_alloc(cache->n_blocks, sizeof *part->written);
        KVANT_RETURN_IF(!part->written, kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its tables"));
    }
    kvant_status status = kvant_mul_size(cache->n_blocks, layer->block_bytes, &bytes)
                              ? kvant_cuda_memory_new(&pages, bytes)
                              : KVANT_ERR_MEMORY;
    layer->pages = status == KVANT_OK ? pages : NULL;
    return kvant_cuda_said(status, "memory for pages");
}

static kvant_status create_layer(kvant_cache *cache, cuda_layer *layers, uint32_t layer)
{
    cuda_part *parts = layers[layer].parts;
    char text[512] = "";
    for (int role = 0; role < 2; role++) {
        KVANT_FORWARD(create_codec(layers, layer, (kvant_role)role));
        KVANT_FORWARD(create_numbers(&parts[role], cache->params.n_kv_heads, layer, (kvant_role)role));
    }
    kvant_status status = kvant_cuda_attention_check(parts[0].codec, parts[1].codec, text, sizeof text);
    if (status != KVANT_OK)
        return unsupported(layer, KVANT_ROLE_K, text);
    return create_pages(cache, &layers[layer]);
}

static kvant_status create_workspace(kvant_cache *cache, cuda_memory *memory)
{
    const size_t bytes = sizeof(cuda_arguments) + cache->n_blocks * sizeof(int32_t);
    void *arguments, *workspace;
    memory->staging = kvant_alloc(1, bytes);
    KVANT_RETURN_IF(!memory->staging, kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its tables"));
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_new(&arguments, bytes), "memory for arguments"));
    memory->arguments = arguments;
    memory->workspace_bytes = kvant_cuda_attention_workspace(cache->params.head_dim);
    KVANT_RETURN_IF(!memory->workspace_bytes, kvant_cuda_said(KVANT_ERR_CUDA, "the workspace of attention"));
    KVANT_FORWARD(kvant_cuda_said(kvant_cuda_memory_new(&workspace, memory->workspace_bytes),
                                  "the workspace of attention"));
    memory->workspace = workspace;
    return KVANT_OK;
}

kvant_status kvant_cuda_layers_create(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory = kvant_alloc(1, sizeof *memory);
    if (memory)
        memory->layers = kvant_alloc(cache->params.n_layers, sizeof *memory->layers);
    if (!memory || !memory->layers)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: no memory for its layers");
    KVANT_FORWARD(check_scheme(cache, memory->layers));
    KVANT_FORWARD(check_device(cache));
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        KVANT_FORWARD(create_layer(cache, memory->layers, layer));
    return create_workspace(cache, memory);
}

void kvant_cuda_layers_destroy(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    for (uint32_t i = 0; memory && memory->layers && i < 2 * cache->params.n_layers; i++) {
        cuda_part *part = &memory->layers[i / 2].parts[i % 2];
        if (part->owns_codec)
            kvant_cuda_codec_free(&part->codec);
        kvant_cuda_memory_free(part->numbers);
        kvant_free(part->written);
        if (i % 2)
            kvant_cuda_memory_free(memory->layers[i / 2].pages);
    }
    if (memory) {
        kvant_cuda_memory_free(memory->arguments);
        kvant_cuda_memory_free(memory->workspace);
        kvant_cuda_memory_free(memory->queries);
        kvant_free(memory->staging);
        kvant_free(memory->layers);
    }
    kvant_free(memory);
}
