/* cuda_transforms.c - centres, scales and matrices of transforms on a GPU, and the arguments that
 * kernels get for queries. The tensor decides which transforms exist and which one rows get
 * (transforms.h). */
#include <string.h>

#include <kvant/cuda_kernels.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"
#include "key_transform.h"

/* The kinds of coefficients of a transform. Coefficients of a kind lie together, so that attention
 * finds the centres of all transforms. */
enum { CENTER, SCALE, ATTENTION_SCALE, TURNED_CENTER, KINDS };

static float *numbers_at(const cuda_part *part, int kind, uint32_t transform_id)
{
    return part->numbers + 2 * part->tensor->n_kv_heads * part->key_transform_size +
           ((size_t)kind * KVANT_MAX_TRANSFORMS + transform_id) * kvant_tensor_width(part->tensor);
}

const float *kvant_cuda_centers(const cuda_part *part, bool rotated)
{
    return numbers_at(part, rotated ? TURNED_CENTER : CENTER, 0);
}

static const float *weights_of(const cuda_part *part, bool inverse)
{
    const float *first =
        part->numbers + (inverse ? part->tensor->n_kv_heads * part->key_transform_size : 0);
    return part->key_transform_size ? first : NULL;
}

/* The W of transform=file or diagonal is for keys and replaces the scale of norm=
 * (codec/calibrated.c). */
kvant_status kvant_cuda_transforms_create(cuda_part *part)
{
    const kvant_tensor *tensor = part->tensor;
    void *memory;
    part->key_transform_size = kvant_cuda_tables_of(part, 0).key_transform_size;
    const size_t n = tensor->n_kv_heads * part->key_transform_size,
                 of_versions = KINDS * KVANT_MAX_TRANSFORMS * kvant_tensor_width(tensor),
                 bytes = (2 * n + of_versions) * sizeof(float);
    KVANT_FORWARD(kvant_cuda_report_error(kvant_cuda_memory_new(&memory, bytes),
                                          "allocating centres and scales"));
    part->numbers = memory;
    for (uint32_t head = 0; n && head < tensor->n_kv_heads; head++) {
        const kvant_cuda_tables tables = kvant_cuda_tables_of(part, head);
        const size_t at = head * part->key_transform_size,
                     size = part->key_transform_size * sizeof(float);
        KVANT_FORWARD(
            kvant_cuda_report_error(kvant_cuda_memory_copy(part->numbers + at, tables.key_transform,
                                                           size, part->memory->stream),
                                    "copying key transforms"));
        KVANT_FORWARD(kvant_cuda_report_error(kvant_cuda_memory_copy(part->numbers + n + at,
                                                                     tables.inverse_key_transform,
                                                                     size, part->memory->stream),
                                              "copying key transforms"));
    }
    return KVANT_OK;
}

/* Transforms */

/* Computes R W (c / s) of a transform and stores it after the transform's other coefficients. */
static void transform_center(const kvant_tensor *tensor, uint32_t transform_id, float *numbers)
{
    const size_t d = tensor->head_dim, width = kvant_tensor_width(tensor);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        float x[KVANT_MAX_HEAD_DIM];
        for (size_t j = 0; j < d; j++)
            x[j] = numbers[head * d + j] / (tensor->transforms[transform_id].key_transform
                                                ? 1
                                                : numbers[width + head * d + j]);
        kvant_transform_forward(kvant_tensor_head_transform(tensor, transform_id, head), kernels,
                                NULL, x, numbers + 3 * width + head * d);
    }
}

/* Whether matrices are kept in their compact form. Kernels do not know a dense rotation. */
static bool is_compact(const cuda_part *part)
{
    return part->tensor->codecs[0]->transform.rotate != KVANT_ROTATE_DENSE;
}

/* Copies a kv head's matrices to the device: R W and R W^-T. */
static kvant_status upload_head(const cuda_part *part, uint32_t transform_id, uint32_t head)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim, bytes = size * sizeof(float);
    kvant_transform transform = tensor->codecs[head]->transform;
    float *at = (float *)part->matrices[transform_id] + head * size;
    KVANT_FORWARD(kvant_transforms_set_matrix(tensor, transform_id, head, &transform));
    kvant_status status =
        kvant_cuda_memory_copy(at, transform.key_transform, bytes, part->memory->stream);
    if (status == KVANT_OK)
        status =
            kvant_cuda_memory_copy(at + tensor->n_kv_heads * size, transform.key_transform + size,
                                   bytes, part->memory->stream);
    kvant_free(transform.key_transform);
    return status;
}

/* Makes the compact form. Kernels may read it before the preceding kernel has ended, so the call
 * waits. */
static kvant_status upload_compact(const cuda_part *part, uint32_t transform_id)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t bytes = kvant_key_transform_halves(tensor) * sizeof(uint16_t);
    const kvant_cuda_compact_args args = { .size = sizeof args,
                                           .head_dim = tensor->head_dim,
                                           .n_kv_heads = tensor->n_kv_heads,
                                           .triangles = part->memory->matrix.at,
                                           .compact = part->matrices[transform_id] };
    const void *triangles = tensor->transforms[transform_id].key_transform->triangles;
    uint16_t first;
    KVANT_FORWARD(
        kvant_cuda_memory_copy(part->memory->matrix.at, triangles, bytes, part->memory->stream));
    KVANT_FORWARD(kvant_cuda_compact(&args, part->memory->stream));
    return kvant_cuda_memory_read(&first, args.compact, sizeof first, part->memory->stream);
}

static size_t matrix_bytes(const cuda_part *part)
{
    const kvant_tensor *tensor = part->tensor;
    return is_compact(part) ? kvant_cuda_compact_bytes(tensor->head_dim, tensor->n_kv_heads)
                            : 2 * kvant_tensor_width(tensor) * tensor->head_dim * sizeof(float);
}

static void free_full(cuda_part *part)
{
    if (!part->made)
        return;
    kvant_cuda_codec_free(&part->full);
    kvant_cuda_codec_free(&part->full_open);
    kvant_free(part->made->transform.key_transform);
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
        part->made->transform.key_transform = NULL;
        part->made->transform.diagonal = false;
        status = kvant_transform_set_matrix(&part->made->transform, ones, ones);
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

static kvant_status upload_matrices(cuda_part *part, uint32_t transform_id)
{
    const kvant_tensor *tensor = part->tensor;
    void **memory = &part->matrices[transform_id];
    if (!tensor->transforms[transform_id].key_transform)
        return KVANT_OK;
    if (!*memory)
        KVANT_FORWARD(kvant_cuda_memory_new(memory, matrix_bytes(part)));
    if (is_compact(part)) {
        KVANT_FORWARD(kvant_cuda_grow(&part->memory->matrix,
                                      kvant_tensor_width(tensor) * tensor->head_dim * sizeof(float),
                                      "allocating a matrix"));
        KVANT_FORWARD(upload_compact(part, transform_id));
    }
    for (uint32_t head = 0; head < tensor->n_kv_heads && !is_compact(part); head++)
        KVANT_FORWARD(upload_head(part, transform_id, head));
    return part->full ? KVANT_OK : create_full(part);
}

static void upload_transform(cuda_part *part, uint32_t transform_id)
{
    const kvant_tensor *tensor = part->tensor;
    const size_t d = tensor->head_dim, width = kvant_tensor_width(tensor);
    const bool diagonal = part->key_transform_size == d,
               scaled = kvant_tensor_transform_affine(tensor, transform_id, 0).scale != NULL;
    float *numbers = part->memory->transform_values;
    memcpy(numbers, tensor->transforms[transform_id].center, 2 * width * sizeof *numbers);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const float *inverse = kvant_cuda_tables_of(part, head).inverse_key_transform;
        for (size_t j = 0; j < d; j++)
            numbers[2 * width + head * d + j] =
                (scaled ? numbers[width + head * d + j] : 1) * (diagonal ? inverse[j] : 1);
    }
    kvant_cuda_record_error(part->memory, kvant_transforms_prepare(part->tensor, transform_id),
                            "matrices");
    memset(numbers + TURNED_CENTER * width, 0, width * sizeof *numbers);
    if (kvant_tensor_transform_affine(tensor, transform_id, 0).center)
        transform_center(tensor, transform_id, numbers);
    for (int kind = 0; kind < KINDS; kind++)
        kvant_cuda_record_error(part->memory,
                                kvant_cuda_memory_copy(numbers_at(part, kind, transform_id),
                                                       numbers + (size_t)kind * width,
                                                       width * sizeof *numbers,
                                                       part->memory->stream),
                                "centres and scales");
    kvant_cuda_record_error(part->memory, upload_matrices(part, transform_id), "matrices");
    part->generations[transform_id] = tensor->transforms[transform_id].generation;
}

cuda_transform kvant_cuda_transform(cuda_part *part, uint32_t transform_id)
{
    const kvant_tensor *tensor = part->tensor;
    const kvant_affine used = kvant_tensor_transform_affine(tensor, transform_id, 0);
    const bool diagonal = part->key_transform_size == tensor->head_dim;
    if (part->generations[transform_id] != tensor->transforms[transform_id].generation)
        upload_transform(part, transform_id);
    cuda_transform v = { .center = used.center ? numbers_at(part, CENTER, transform_id) : NULL,
                         .scale = used.scale ? numbers_at(part, SCALE, transform_id) : NULL,
                         .attention_scale = used.scale || diagonal
                                                ? numbers_at(part, ATTENTION_SCALE, transform_id)
                                                : NULL,
                         .rotated_center =
                             used.center ? numbers_at(part, TURNED_CENTER, transform_id) : NULL,
                         .key_transform = weights_of(part, false),
                         .inverse_key_transform = weights_of(part, true),
                         .codec = part->codec,
                         .open_codec = part->open_codec,
                         .full = part->key_transform_size > tensor->head_dim,
                         .rotates = kvant_cuda_rotates(part, transform_id) };
    if (tensor->transforms[transform_id].key_transform &&
        part->full) { /* otherwise an error was recorded */
        v.compact = is_compact(part) ? part->matrices[transform_id] : NULL;
        v.key_transform = v.compact ? NULL : part->matrices[transform_id];
        v.inverse_key_transform =
            v.compact ? NULL : v.key_transform + kvant_tensor_width(tensor) * tensor->head_dim;
        v.codec = part->full;
        v.open_codec = part->full_open;
        v.full = true;
    }
    return v;
}

const float *kvant_cuda_inverse_matrix(cuda_part *part, const cuda_transform *transform)
{
    cuda_memory *memory = part->memory;
    const kvant_cuda_expand_args args = { .size = sizeof args,
                                          .codec = transform->codec,
                                          .n_kv_heads = part->tensor->n_kv_heads,
                                          .compact = transform->compact,
                                          .inverse_key_transform = memory->matrix.at };
    if (!transform->compact)
        return transform->inverse_key_transform;
    kvant_cuda_record_error(memory, kvant_cuda_expand(&args, memory->stream), "matrices");
    return memory->matrix.at;
}

/* Queries */

/* Copies R diag(s) of a kv head to the device. Row i is the image of channel i's unit vector. */
static kvant_status upload_queries(const cuda_part *part, uint32_t transform_id, uint32_t head,
                                   float *to)
{
    const kvant_tensor *tensor = part->tensor;
    const uint32_t d = tensor->head_dim;
    const size_t size = (size_t)d * d;
    const kvant_affine affine = kvant_tensor_transform_affine(tensor, transform_id, head);
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
static kvant_status make_queries(cuda_part *part, uint32_t transform_id)
{
    kvant_tensor *tensor = part->tensor;
    const size_t size = (size_t)tensor->head_dim * tensor->head_dim,
                 bytes = tensor->n_kv_heads * size * sizeof(float);
    void *memory = part->queries[transform_id];
    if (!memory) {
        KVANT_FORWARD(kvant_cuda_memory_new(&memory, bytes));
        tensor->device_bytes += bytes;
    }
    part->queries[transform_id] = memory;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        KVANT_FORWARD(
            upload_queries(part, transform_id, head, part->queries[transform_id] + head * size));
    part->query_generations[transform_id] = tensor->transforms[transform_id].generation;
    return KVANT_OK;
}

kvant_status kvant_cuda_make_query_matrix(cuda_part *part, uint32_t transform_id)
{
    const bool file = part->key_transform_size > part->tensor->head_dim;
    if (!file && !part->full)
        KVANT_FORWARD(kvant_cuda_report_error(create_full(part), "creating the codec of queries"));
    if (kvant_cuda_transform(part, transform_id).full ||
        part->query_generations[transform_id] == part->tensor->transforms[transform_id].generation)
        return KVANT_OK;
    return kvant_cuda_report_error(make_queries(part, transform_id), "copying matrices of queries");
}

const void *kvant_cuda_query_matrix(cuda_part *part, uint32_t transform_id, bool *compact)
{
    const cuda_transform v = kvant_cuda_transform(part, transform_id);
    *compact = v.compact;
    return v.compact ? v.compact : v.full ? v.inverse_key_transform : part->queries[transform_id];
}

void kvant_cuda_transforms_destroy(cuda_part *part)
{
    free_full(part);
    for (uint32_t transform_id = 0; transform_id < KVANT_MAX_TRANSFORMS; transform_id++) {
        kvant_cuda_memory_free(part->matrices[transform_id]);
        kvant_cuda_memory_free(part->queries[transform_id]);
    }
    kvant_cuda_memory_free(part->numbers);
}
