/* cuda_versions.c - centres, scales and matrices of transforms on a GPU, and the arguments that
 * kernels get for queries. The tensor decides which transforms exist and which one rows get
 * (versions.h). */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"
#include "weights.h"

/* The kinds of coefficients of a transform. Coefficients of a kind lie together, so that attention
 * finds the centres of all transforms. */
enum { CENTER, SCALE, ATTENTION_SCALE, TURNED_CENTER, KINDS };

static float *numbers_at(const cuda_part *part, int kind, uint32_t version)
{
    return part->numbers + 2 * part->tensor->n_kv_heads * part->n_weights +
           ((size_t)kind * KVANT_MAX_VERSIONS + version) * kvant_tensor_width(part->tensor);
}

const float *kvant_cuda_centers(const cuda_part *part, bool turned)
{
    return numbers_at(part, turned ? TURNED_CENTER : CENTER, 0);
}

static const float *weights_of(const cuda_part *part, bool inverse)
{
    const float *first = part->numbers + (inverse ? part->tensor->n_kv_heads * part->n_weights : 0);
    return part->n_weights ? first : NULL;
}

/* The W of transform=file or diagonal is for keys and replaces the scale of norm=
 * (codec/site.c). */
kvant_status kvant_cuda_versions_create(cuda_part *part)
{
    const kvant_tensor *tensor = part->tensor;
    void *memory;
    part->n_weights = kvant_cuda_tables_of(part, 0).n_weights;
    const size_t n = tensor->n_kv_heads * part->n_weights,
                 of_versions = KINDS * KVANT_MAX_VERSIONS * kvant_tensor_width(tensor),
                 bytes = (2 * n + of_versions) * sizeof(float);
    KVANT_FORWARD(
        kvant_cuda_said(kvant_cuda_memory_new(&memory, bytes), "memory for centres and scales"));
    part->numbers = memory;
    for (uint32_t head = 0; n && head < tensor->n_kv_heads; head++) {
        const kvant_cuda_tables tables = kvant_cuda_tables_of(part, head);
        const size_t at = head * part->n_weights, size = part->n_weights * sizeof(float);
        KVANT_FORWARD(kvant_cuda_said(
            kvant_cuda_memory_copy(part->numbers + at, tables.weights, size, part->memory->stream),
            "weights"));
        KVANT_FORWARD(
            kvant_cuda_said(kvant_cuda_memory_copy(part->numbers + n + at, tables.inverse_weights,
                                                   size, part->memory->stream),
                            "weights"));
    }
    return KVANT_OK;
}

/* Transforms */

/* Computes R W (c / s) of a transform and stores it after the transform's other coefficients. */
static void transform_center(const kvant_tensor *tensor, uint32_t version, float *numbers)
{
    const size_t d = tensor->head_dim, width = kvant_tensor_width(tensor);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        float x[KVANT_MAX_HEAD_DIM];
        for (size_t j = 0; j < d; j++)
            x[j] = numbers[head * d + j] /
                   (tensor->versions[version].weights ? 1 : numbers[width + head * d + j]);
        kvant_transform_forward(kvant_version_transform(tensor, version, head), kernels, NULL, x,
                                numbers + 3 * width + head * d);
    }
}

/* Copies a kv head's matrices to the device: R W and R W^-T. */
static kvant_status upload_head(const cuda_part *part, uint32_t version, uint32_t head)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim, bytes = size * sizeof(float);
    kvant_transform transform = tensor->codecs[head]->transform;
    float *at = part->matrices[version] + head * size;
    KVANT_FORWARD(kvant_version_weigh(tensor, version, head, &transform));
    kvant_status status =
        kvant_cuda_memory_copy(at, transform.weights, bytes, part->memory->stream);
    if (status == KVANT_OK)
        status = kvant_cuda_memory_copy(at + tensor->n_kv_heads * size, transform.weights + size,
                                        bytes, part->memory->stream);
    kvant_free(transform.weights);
    return status;
}

static void free_full(cuda_part *part)
{
    if (!part->made)
        return;
    kvant_cuda_codec_free(&part->full);
    kvant_cuda_codec_free(&part->full_open);
    kvant_free(part->made->transform.weights);
    kvant_free(part->made);
    part->made = NULL;
}

/* Makes the codec with a W of ones. Kernels then leave the rotation to W, and W to their caller. */
static kvant_status make_full(cuda_part *part)
{
    const uint32_t d = part->tensor->head_dim;
    double *ones = kvant_alloc((size_t)d * d, sizeof *ones);
    part->made = kvant_alloc(1, sizeof *part->made);
    kvant_status status = ones && part->made ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t i = 0; i < d && status == KVANT_OK; i++)
        ones[i * d + i] = 1;
    if (status == KVANT_OK) {
        *part->made = *part->tensor->codecs[0];
        part->made->transform.weights = NULL;
        part->made->transform.diagonal = false;
        status = kvant_transform_weigh(&part->made->transform, ones, ones);
        kvant_codec_complete_view(part->made);
    }
    kvant_free(ones);
    return status;
}

/* Makes `full`, or shares the one of an earlier layer with the same spec, because it depends on the
 * spec alone. */
static kvant_status create_full(cuda_part *part)
{
    const cuda_memory *memory = part->memory;
    for (const cuda_layer *l = memory->layers; l < memory->layers + memory->n_layers && !part->full;
         l++) {
        const cuda_part *other = &l->parts[part->role];
        part->full = other->codec == part->codec ? other->full : NULL;
        part->full_open = other->codec == part->codec ? other->full_open : NULL;
    }
    if (part->full)
        return KVANT_OK;
    kvant_status status = make_full(part);
    if (status == KVANT_OK)
        status = kvant_cuda_codec_from(part->made, &part->full, NULL, 0);
    if (status == KVANT_OK)
        status = kvant_cuda_codec_create_open(part->full, &part->full_open);
    if (status != KVANT_OK)
        free_full(part);
    return status;
}

static kvant_status upload_matrices(cuda_part *part, uint32_t version)
{
    const size_t d = part->tensor->head_dim, heads = part->tensor->n_kv_heads;
    void *memory = part->matrices[version];
    if (!part->tensor->versions[version].weights)
        return KVANT_OK;
    if (!memory)
        KVANT_FORWARD(kvant_cuda_memory_new(&memory, 2 * heads * d * d * sizeof(float)));
    part->matrices[version] = memory;
    for (uint32_t head = 0; head < heads; head++)
        KVANT_FORWARD(upload_head(part, version, head));
    return part->full ? KVANT_OK : create_full(part);
}

static void upload_transform(cuda_part *part, uint32_t version)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t d = tensor->head_dim, width = kvant_tensor_width(tensor);
    const bool diagonal = part->n_weights == d,
               scaled = kvant_version_affine(tensor, version, 0).scale != NULL;
    float *numbers = part->memory->version;
    memcpy(numbers, tensor->versions[version].center, 2 * width * sizeof *numbers);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const float *inverse = kvant_cuda_tables_of(part, head).inverse_weights;
        for (size_t j = 0; j < d; j++)
            numbers[2 * width + head * d + j] =
                (scaled ? numbers[width + head * d + j] : 1) * (diagonal ? inverse[j] : 1);
    }
    kvant_cuda_note(part->memory, kvant_version_prepare(part->tensor, version), "matrices");
    memset(numbers + TURNED_CENTER * width, 0, width * sizeof *numbers);
    if (kvant_version_affine(tensor, version, 0).center)
        transform_center(tensor, version, numbers);
    for (int kind = 0; kind < KINDS; kind++)
        kvant_cuda_note(part->memory,
                        kvant_cuda_memory_copy(numbers_at(part, kind, version),
                                               numbers + (size_t)kind * width,
                                               width * sizeof *numbers, part->memory->stream),
                        "centres and scales");
    kvant_cuda_note(part->memory, upload_matrices(part, version), "matrices");
    part->stamps[version] = tensor->versions[version].stamp;
}

cuda_version kvant_cuda_version(cuda_part *part, uint32_t version)
{
    const kvant_tensor *tensor = part->tensor;
    const kvant_affine used = kvant_version_affine(tensor, version, 0);
    const bool diagonal = part->n_weights == tensor->head_dim;
    if (part->stamps[version] != tensor->versions[version].stamp)
        upload_transform(part, version);
    cuda_version v = { .center = used.center ? numbers_at(part, CENTER, version) : NULL,
                       .scale = used.scale ? numbers_at(part, SCALE, version) : NULL,
                       .attention_scale = used.scale || diagonal
                                              ? numbers_at(part, ATTENTION_SCALE, version)
                                              : NULL,
                       .turned_center =
                           used.center ? numbers_at(part, TURNED_CENTER, version) : NULL,
                       .weights = weights_of(part, false),
                       .inverse_weights = weights_of(part, true),
                       .codec = part->codec,
                       .open_codec = part->open_codec,
                       .full = part->n_weights > tensor->head_dim,
                       .turns = kvant_cuda_turns(part, version) };
    if (tensor->versions[version].weights && part->full) { /* otherwise an error was recorded */
        v.weights = part->matrices[version];
        v.inverse_weights = v.weights + kvant_tensor_width(tensor) * tensor->head_dim;
        v.codec = part->full;
        v.open_codec = part->full_open;
        v.full = true;
    }
    return v;
}

/* Queries */

/* Copies R diag(s) of a kv head to the device. Row i is the image of channel i's unit vector. */
static kvant_status upload_queries(const cuda_part *part, uint32_t version, uint32_t head,
                                   float *to)
{
    const kvant_tensor *tensor = part->tensor;
    const uint32_t d = tensor->head_dim;
    const size_t size = (size_t)d * d;
    const kvant_affine affine = kvant_version_affine(tensor, version, head);
    float *rows = kvant_alloc(size, sizeof *rows), unit[KVANT_MAX_HEAD_DIM] = { 0 };
    kvant_status status = rows ? KVANT_OK : KVANT_ERR_MEMORY;
    for (uint32_t i = 0; i < d && status == KVANT_OK; i++) {
        unit[i] = 1;
        status = kvant_codec_transform_query(tensor->codecs[head], &affine, unit, rows + i * d);
        unit[i] = 0;
    }
    if (status == KVANT_OK)
        status = kvant_cuda_memory_copy(to, rows, size * sizeof *rows, part->memory->stream);
    kvant_free(rows);
    return status;
}

/* Makes a matrix for the queries of a transform without W, for calls that also have other
 * transforms. */
static kvant_status make_queries(cuda_part *part, uint32_t version)
{
    kvant_tensor *tensor = part->tensor;
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim,
                 bytes = tensor->n_kv_heads * size * sizeof(float);
    void *memory = part->queries[version];
    if (!memory) {
        KVANT_FORWARD(kvant_cuda_memory_new(&memory, bytes));
        tensor->device_bytes += bytes;
    }
    part->queries[version] = memory;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        KVANT_FORWARD(upload_queries(part, version, head, part->queries[version] + head * size));
    part->query_stamps[version] = tensor->versions[version].stamp;
    return KVANT_OK;
}

kvant_status kvant_cuda_make_queries(cuda_part *part, uint32_t version)
{
    const bool file = part->n_weights > part->tensor->head_dim;
    if (!file && !part->full)
        KVANT_FORWARD(kvant_cuda_said(create_full(part), "a codec of queries"));
    if (kvant_cuda_version(part, version).full ||
        part->query_stamps[version] == part->tensor->versions[version].stamp)
        return KVANT_OK;
    return kvant_cuda_said(make_queries(part, version), "matrices of queries");
}

const float *kvant_cuda_query_matrix(cuda_part *part, uint32_t version)
{
    const cuda_version v = kvant_cuda_version(part, version);
    return v.full ? v.inverse_weights : part->queries[version];
}

void kvant_cuda_versions_destroy(cuda_part *part)
{
    free_full(part);
    for (uint32_t version = 0; version < KVANT_MAX_VERSIONS; version++) {
        kvant_cuda_memory_free(part->matrices[version]);
        kvant_cuda_memory_free(part->queries[version]);
    }
    kvant_cuda_memory_free(part->numbers);
}
