/* cuda_layers.c - makes and frees the memory of a cache on a GPU. Refuses codecs without kernels;
 * the message names the codec and codecs that work. */
#include "cuda_layers.h"

#include <string.h>

#include <kvant/cuda_kernels.h>

#include "../base/alloc.h"
#include "../base/attributes.h"

#define MEMORY_ALIGN 256u /* alignment of a part's arrays, like the driver's allocations */
#define WORKS_ANYWAY "use a preset, turboquant-4 or int-4, or a cache on the CPU"

static kvant_status unsupported(uint32_t layer, kvant_role role, const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                      "cache on cuda: %s of layer %u: %s; " WORKS_ANYWAY,
                      role == KVANT_ROLE_K ? "keys" : "values", (unsigned)layer, what);
}

static kvant_status check_codecs(const kvant_tensor_params *params, uint32_t layer, kvant_role role)
{
    char text[512];
    for (uint32_t head = 1; head < params->n_kv_heads; head++) {
        const char *first = params->codecs[0]->info.spec, *spec = params->codecs[head]->info.spec;
        text[0] = 0;
        if (strcmp(first, spec) == 0)
            continue;
        kvant_append(text, sizeof text,
                     "kv heads have different codecs (%s, %s), which only a cache on the CPU "
                     "supports: a seed "
                     "for each head does not lower the error",
                     first, spec);
        return unsupported(layer, role, text);
    }
    return KVANT_OK;
}

/* Checks as far as libkvant knows whether every codec can be on a GPU. It comes before the driver
 * is needed, because a message about a codec helps more than one about a missing driver. */
static kvant_status check_scheme(const kvant_cache *cache)
{
    const kvant_cache_params *p = &cache->params;
    kvant_tensor_params params;
    for (uint32_t i = 0; i < 2 * p->n_layers; i++) {
        KVANT_FORWARD(kvant_layers_params(cache, i / 2, (kvant_role)(i % 2), &params));
        KVANT_FORWARD(check_codecs(&params, i / 2, (kvant_role)(i % 2)));
    }
    if (p->v_head_dim != p->head_dim)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "cache on cuda: v_head_dim %u differs from head_dim %u, which only a "
                          "cache on the CPU supports",
                          (unsigned)p->v_head_dim, (unsigned)p->head_dim);
    return KVANT_OK;
}

static kvant_status check_device(const kvant_cache *cache)
{
    const char *name = cache->params.device;
    int current = 0;
    KVANT_FORWARD(kvant_cuda_available(NULL, 0));
    KVANT_FORWARD(
        kvant_cuda_report_error(kvant_cuda_device_current(&current), "asking for the current GPU"));
    if (strcmp(name, "cuda:0") == 0 && current != 0)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "cache on cuda:0: the thread's current GPU is %d: call cudaSetDevice(0), "
                          "or use cuda for the current GPU",
                          current);
    return KVANT_OK;
}

/* Codecs */

/* Makes a layer's codecs, or shares the codecs of an earlier layer with equal specs. They hold no
 * coefficients of a calibration. */
static kvant_status create_codecs(cuda_part *part, const kvant_codec *source,
                                  const cuda_layer *layers, uint32_t layer)
{
    char text[512] = "";
    for (uint32_t i = 0; i < layer; i++) {
        const cuda_part *other = &layers[i].parts[part->role];
        if (strcmp(other->tensor->codecs[0]->info.spec, source->info.spec) != 0)
            continue;
        part->codec = other->codec;
        part->open_codec = other->open_codec;
        return KVANT_OK;
    }
    part->owns_codecs = true;
    kvant_status status = kvant_cuda_codec_unrotated(source, &part->codec, text, sizeof text);
    if (status != KVANT_OK)
        return status == KVANT_ERR_UNSUPPORTED ? unsupported(layer, part->role, text) : status;
    return kvant_cuda_report_error(kvant_cuda_codec_create_open(part->codec, &part->open_codec),
                                   "creating the codec of exact pages");
}

/* Coefficients */

kvant_cuda_tables kvant_cuda_tables_of(const cuda_part *part, uint32_t head)
{
    kvant_cuda_tables tables = { .size = sizeof tables };
    kvant_cuda_codec_tables(part->tensor->codecs[head], &tables);
    return tables;
}

static kvant_status create_feedback(cuda_part *part)
{
    const size_t d = part->tensor->head_dim, columns = d * d * sizeof(float),
                 pivots = d * sizeof(float);
    const uint32_t n = kvant_cuda_tables_of(part, 0).pivots ? part->tensor->n_kv_heads : 0;
    void *memory = NULL;
    if (n)
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_memory_new(&memory, n * (columns + pivots)), "allocating feedback"));
    part->feedback = memory;
    for (uint32_t head = 0; head < n; head++) {
        const kvant_cuda_tables tables = kvant_cuda_tables_of(part, head);
        float *at = part->feedback + head * (d + d * d);
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_memory_copy(at, tables.pivots, pivots, part->memory->stream),
            "copying feedback"));
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_memory_copy(at + d, tables.columns, columns, part->memory->stream),
            "copying feedback"));
    }
    return KVANT_OK;
}

static kvant_status create_centroids(cuda_part *part)
{
    const size_t n = kvant_cuda_tables_of(part, 0).n_centroids,
                 heads = n ? part->tensor->n_kv_heads : 0;
    void *memory = NULL;
    if (n)
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_memory_new(&memory, heads * n * sizeof(float)), "allocating centroids"));
    part->centroids = memory;
    for (uint32_t head = 0; head < heads; head++)
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_memory_copy(part->centroids + head * n,
                                   kvant_cuda_tables_of(part, head).centroids, n * sizeof(float),
                                   part->memory->stream),
            "copying centroids"));
    return KVANT_OK;
}

static const float *matrix_of(const cuda_part *part, uint32_t head)
{
    return kvant_codec_get_view(part->tensor->codecs[head])->transform.matrix;
}

/* How many rotations a part has: one, or one per kv head if a calibration gives them (hessian). */
static uint32_t count_matrices(const cuda_part *part, size_t bytes)
{
    for (uint32_t head = 1; head < part->tensor->n_kv_heads; head++)
        if (memcmp(matrix_of(part, head), matrix_of(part, 0), bytes) != 0)
            return part->tensor->n_kv_heads;
    return 1;
}

static kvant_status create_matrix(cuda_part *part)
{
    const size_t d = part->tensor->head_dim, n = d * d;
    void *memory;
    if (!matrix_of(part, 0) || part->key_transform_size > d)
        return KVANT_OK;
    const uint32_t heads = count_matrices(part, n * sizeof(float));
    float *both = kvant_alloc(2 * n * heads, sizeof *both);
    KVANT_RETURN_IF(!both,
                    kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for a rotation"));
    for (size_t head = 0; head < heads; head++)
        for (size_t i = 0; i < n; i++)
            both[2 * n * head + i % d * d + i / d] = both[2 * n * head + n + i] =
                matrix_of(part, (uint32_t)head)[i];
    part->matrix_stride = heads > 1 ? 2 * n : 0;
    kvant_status status = kvant_cuda_memory_new(&memory, 2 * n * heads * sizeof *both);
    part->matrix = memory;
    if (status == KVANT_OK)
        status = kvant_cuda_memory_copy(memory, both, 2 * n * heads * sizeof *both,
                                        part->memory->stream);
    kvant_free(both);
    return kvant_cuda_report_error(status, "copying a rotation");
}

kvant_cuda_rotate_rows_args kvant_cuda_rotation_of(const cuda_part *part, bool back)
{
    const uint32_t d = part->tensor->head_dim, n = part->tensor->n_kv_heads;
    return (kvant_cuda_rotate_rows_args){ .n_kv_heads = n,
                                          .head_dim = d,
                                          .matrix = part->matrix + (back ? (size_t)d * d : 0),
                                          .matrix_stride = part->matrix_stride };
}

/* Memory */

kvant_cuda_pages kvant_cuda_pages_of(const cuda_part *part, bool open)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t open_bytes = kvant_open_block_bytes(tensor);
    return open ? (kvant_cuda_pages){ (void *)((uintptr_t)tensor->open -
                                               part->n_absent * open_bytes),
                                      open_bytes, tensor->open_page_bytes }
                : (kvant_cuda_pages){ tensor->sealed, tensor->block_bytes,
                                      kvant_tensor_codec_info(tensor)->page_bytes };
}

const float *kvant_cuda_read_back(cuda_memory *memory, cuda_buffer *buffer, const float *numbers,
                                  size_t n, kvant_status *status)
{
    *status = KVANT_OK;
    if (n * sizeof *numbers > buffer->bytes) {
        kvant_cuda_host_free(buffer->at);
        *status = kvant_cuda_host_new(&buffer->at, n * sizeof *numbers);
        buffer->bytes = *status == KVANT_OK ? n * sizeof *numbers : 0;
    }
    if (*status == KVANT_OK)
        *status = kvant_cuda_memory_read(buffer->at, numbers, n * sizeof *numbers, memory->stream);
    return *status == KVANT_OK ? buffer->at : NULL;
}

kvant_status kvant_cuda_grow(cuda_buffer *buffer, size_t bytes, const char *what)
{
    if (bytes <= buffer->bytes)
        return KVANT_OK;
    kvant_cuda_memory_free(buffer->at);
    const kvant_status status = kvant_cuda_memory_new(&buffer->at, bytes);
    buffer->bytes = status == KVANT_OK ? bytes : 0;
    return kvant_cuda_report_error(status, what);
}

void kvant_cuda_record_error(cuda_memory *memory, kvant_status status, const char *what)
{
    if (status == KVANT_OK || memory->status != KVANT_OK)
        return;
    memory->status = status;
    memory->failed = what;
}

/* Computes the bytes of a part: pages of the tensor, exact pages after the last open page, then
 * exact rows as floats. A role without open pages begins with its exact pages. */
static kvant_status size_part(kvant_cache *cache, uint32_t layer, kvant_role role,
                              size_t *floats_at, size_t *total)
{
    const cuda_memory *memory = cache->memory;
    cuda_layer *l = kvant_cuda_layer(cache, layer);
    cuda_part *part = &l->parts[role];
    const uint32_t n = l->has_exact ? memory->n_exact : 0;
    kvant_tensor_params params;
    size_t bytes;
    KVANT_FORWARD(kvant_layers_params(cache, layer, role, &params));
    KVANT_FORWARD(kvant_tensor_size(&params, &bytes));
    const size_t open = (size_t)params.n_kv_heads * KVANT_PAGE_TOKENS *
                        params.codecs[0]->info.head_dim * sizeof(uint16_t);
    part->n_absent = n && !part->n_open ? l->first_exact : 0;
    bytes += n ? (n + (part->n_open ? l->first_exact - part->n_open : 0)) * open : 0;
    bytes -= part->n_unused * open;
    *floats_at = (bytes + MEMORY_ALIGN - 1) / MEMORY_ALIGN * MEMORY_ALIGN;
    bytes = *floats_at + (memory->keeps_floats ? 2 * n * open : 0);
    *total = (bytes + MEMORY_ALIGN - 1) / MEMORY_ALIGN * MEMORY_ALIGN;
    return KVANT_OK;
}

/* Allocates the memory of all layers at once, because the driver rounds every allocation up to 2
 * MiB. */
static kvant_status create_pages(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    size_t sum = 0, floats_at, bytes;
    KVANT_FORWARD(kvant_cuda_exact_create(cache));
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++) {
        KVANT_FORWARD(size_part(cache, i / 2, (kvant_role)(i % 2), &floats_at, &bytes));
        sum += bytes;
    }
    KVANT_FORWARD(
        kvant_cuda_report_error(kvant_cuda_memory_new(&memory->pages, sum), "allocating pages"));
    uint8_t *at = memory->pages;
    for (uint32_t i = 0; i < 2 * cache->params.n_layers; i++, at += bytes) {
        cuda_part *part = &memory->layers[i / 2].parts[i % 2];
        KVANT_FORWARD(size_part(cache, i / 2, (kvant_role)(i % 2), &floats_at, &bytes));
        part->pages = at;
        part->floats = memory->keeps_floats ? (float *)(void *)(at + floats_at) : NULL;
    }
    return KVANT_OK;
}

static kvant_status create_statistics(cuda_part *part)
{
    void *memory;
    if (!part->tensor->learns)
        return KVANT_OK;
    KVANT_FORWARD(kvant_cuda_report_error(
        kvant_cuda_memory_new(&memory, 2 * kvant_statistics_bytes(part->tensor)),
        "allocating statistics"));
    part->statistics = memory;
    kvant_transforms_set_memory(part->tensor, part->statistics);
    return KVANT_OK;
}

static kvant_status create_part(kvant_cache *cache, uint32_t layer, kvant_role role)
{
    cuda_memory *memory = cache->memory;
    cuda_part *part = &memory->layers[layer].parts[role];
    kvant_tensor_params params;
    part->memory = memory;
    part->layer = &memory->layers[layer];
    part->role = role;
    KVANT_FORWARD(kvant_layers_params(cache, layer, role, &params));
    KVANT_FORWARD(create_codecs(part, params.codecs[0], memory->layers, layer));
    KVANT_FORWARD(kvant_tensor_create_on(&kvant_cuda_page_device, part, &params, part->pages,
                                         kvant_cache_tensor(cache, layer, role)));
    part->tensor = *kvant_cache_tensor(cache, layer, role);
    part->tensor->half_rows = kvant_cuda_has_exact(part);
    if (part->n_unused) {
        KVANT_FORWARD(kvant_steps_leave_out_first(part->tensor));
        part->tensor->open = (uint8_t *)((uintptr_t)part->tensor->open -
                                         part->n_unused * kvant_open_block_bytes(part->tensor));
    }
    KVANT_FORWARD(create_statistics(part));
    KVANT_FORWARD(kvant_cuda_transforms_create(part));
    KVANT_FORWARD(create_feedback(part));
    KVANT_FORWARD(create_centroids(part));
    return create_matrix(part);
}

static kvant_status create_layer(kvant_cache *cache, uint32_t layer)
{
    cuda_layer *l = kvant_cuda_layer(cache, layer);
    const cuda_part *k = &l->parts[KVANT_ROLE_K], *v = &l->parts[KVANT_ROLE_V];
    char text[512] = "";
    KVANT_FORWARD(create_part(cache, layer, KVANT_ROLE_K));
    KVANT_FORWARD(create_part(cache, layer, KVANT_ROLE_V));
    if (kvant_cuda_attention_check(k->codec, v->codec, text, sizeof text) != KVANT_OK)
        return unsupported(layer, KVANT_ROLE_K, text);
    return KVANT_OK;
}

static kvant_status create_workspace(const kvant_cache *cache, cuda_memory *memory)
{
    const size_t width = (size_t)cache->params.n_kv_heads * cache->params.head_dim;
    void *arguments, *workspace, *refused = NULL;
    memory->transform_values = kvant_alloc(4 * width, sizeof *memory->transform_values);
    if (!memory->transform_values)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its tables");
    KVANT_FORWARD(kvant_cuda_report_error(kvant_cuda_memory_new(&arguments, sizeof(cuda_arguments)),
                                          "allocating arguments"));
    memory->arguments = arguments;
    for (uint32_t i = 0; i < KVANT_CACHE_BATCH; i++)
        memory->planned.slots[i] = i; /* there is no plan yet */
    KVANT_FORWARD(kvant_cuda_report_error(
        kvant_cuda_memory_copy(memory->arguments->rows, memory->planned.slots,
                               sizeof memory->arguments->rows, memory->stream),
        "copying arguments"));
    if (cache->params.asynchronous)
        KVANT_FORWARD(kvant_cuda_report_error(
            kvant_cuda_host_new(&refused, sizeof *memory->refused), "allocating arguments"));
    memory->refused = refused;
    memory->workspace_bytes =
        kvant_cuda_kernel_workspace(cache->params.head_dim, KVANT_MAX_TRANSFORMS);
    KVANT_RETURN_IF(
        !memory->workspace_bytes,
        kvant_cuda_report_error(KVANT_ERR_CUDA, "allocating the workspace of attention"));
    KVANT_FORWARD(
        kvant_cuda_report_error(kvant_cuda_memory_new(&workspace, memory->workspace_bytes),
                                "allocating the workspace of attention"));
    memory->workspace = workspace;
    return KVANT_OK;
}

kvant_status kvant_cuda_layers_create(kvant_cache *cache)
{
    KVANT_FORWARD(check_scheme(cache));
    KVANT_FORWARD(check_device(cache));
    cuda_memory *memory = cache->memory = kvant_alloc(1, sizeof *memory);
    if (memory)
        memory->layers = kvant_alloc(cache->params.n_layers, sizeof *memory->layers);
    if (!memory || !memory->layers)
        return kvant_fail(NULL, KVANT_ERR_MEMORY, "cache: out of memory for its layers");
    memory->n_layers = cache->params.n_layers;
    memory->stream = cache->params.stream;
    KVANT_FORWARD(create_workspace(cache, memory));
    KVANT_FORWARD(create_pages(cache));
    for (uint32_t layer = 0; layer < cache->params.n_layers; layer++)
        KVANT_FORWARD(create_layer(cache, layer));
    return KVANT_OK;
}

void kvant_cuda_layers_destroy(kvant_cache *cache)
{
    cuda_memory *memory = cache->memory;
    if (!memory)
        return;
    kvant_cuda_steps_destroy(cache);
    kvant_cuda_exact_destroy(memory);
    for (uint32_t i = 0; memory->layers && i < 2 * cache->params.n_layers; i++) {
        cuda_part *part = &memory->layers[i / 2].parts[i % 2];
        if (part->owns_codecs) {
            kvant_cuda_codec_free(&part->codec);
            kvant_cuda_codec_free(&part->open_codec);
        }
        kvant_cuda_transforms_destroy(part);
        kvant_cuda_memory_free(part->feedback);
        kvant_cuda_memory_free(part->centroids);
        kvant_cuda_memory_free(part->matrix);
        kvant_cuda_memory_free(part->statistics);
    }
    void *device[] = { memory->pages,      memory->arguments,  memory->workspace,
                       memory->tables.at,  memory->queries.at, memory->gathered.at,
                       memory->rotated.at, memory->scratch.at, memory->matrix.at };
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        kvant_cuda_memory_free(device[i]);
    kvant_cuda_host_free(memory->refused);
    kvant_cuda_host_free(memory->seen[0].at);
    kvant_cuda_host_free(memory->seen[1].at);
    kvant_cuda_host_free(memory->queries_read.at);
    kvant_free(memory->transform_values);
    kvant_free(memory->staging);
    kvant_free(memory->layers);
    kvant_free(memory);
}
