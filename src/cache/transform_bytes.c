/* transform_bytes.c - see transform_bytes.h. */
#include "transform_bytes.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/fnv.h"
#include "../base/half.h"
#include "center.h"
#include "learn.h"

kvant_status kvant_damaged(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_FORMAT, "exported block: %s", what);
}

kvant_status kvant_no_transform(void)
{
    return kvant_fail(NULL, KVANT_ERR_FULL,
                      "the tensor has no free transform id: clear blocks of it");
}

uint64_t kvant_tensor_scheme(const kvant_tensor *tensor)
{
    uint32_t numbers[3] = { tensor->n_kv_heads, tensor->head_dim,
                            kvant_tensor_codec_info(tensor)->role };
    uint64_t hash = kvant_fnv1a(KVANT_FNV_START, numbers, sizeof numbers);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const uint64_t fingerprint = tensor->codecs[head]->info.fingerprint;
        hash = kvant_fnv1a(hash, &fingerprint, sizeof fingerprint);
    }
    return hash;
}

uint32_t kvant_transform_kind(const kvant_tensor *tensor, uint32_t transform_id)
{
    const kvant_tensor_transform *transform = &tensor->transforms[transform_id];
    if (transform->key_transform)
        return transform->key_transform->centers ? KVANT_BYTES_CENTERS : KVANT_BYTES_MATRICES;
    return transform->learned ? KVANT_BYTES_AFFINE : KVANT_BYTES_NOTHING;
}

/* Sizes */

/* A RoPE. After this header come head_dim / 2 frequencies, of which RoPE uses the first
 * n_dims / 2. */
typedef struct rope_header {
    uint32_t n_dims, interleaved;
} rope_header;
_Static_assert(sizeof(rope_header) == 8, "format.md");

static size_t key_transform_bytes(const kvant_tensor *tensor)
{
    return kvant_key_transform_halves(tensor) * sizeof(uint16_t);
}

static size_t affine_bytes(const kvant_tensor *tensor, uint32_t kind)
{
    const size_t number = kind == KVANT_BYTES_HALVES ? sizeof(uint16_t) : sizeof(float);
    return kind ? 2 * kvant_tensor_width(tensor) * number : 0;
}

size_t kvant_rope_bytes(const kvant_tensor *tensor)
{
    return sizeof(rope_header) + tensor->head_dim / 2 * sizeof(float);
}

/* Centres of blocks: the RoPE, then the centres at position 0 of all kv heads. */
static size_t centers_bytes(const kvant_tensor *tensor)
{
    return (kvant_rope_bytes(tensor) + kvant_tensor_width(tensor) * sizeof(float) + 7) / 8 * 8;
}

size_t kvant_transform_bytes(const kvant_tensor *tensor, uint32_t kind)
{
    return affine_bytes(tensor, kind) +
           (kvant_bytes_have_matrices(kind) ? (key_transform_bytes(tensor) + 7) / 8 * 8 : 0) +
           (kind == KVANT_BYTES_CENTERS ? centers_bytes(tensor) : 0);
}

/* The offset of the centres of blocks: after all coefficients of a transform. */
static size_t centers_at(const kvant_tensor *tensor)
{
    return kvant_transform_bytes(tensor, KVANT_BYTES_MATRICES);
}

/* Writing */

kvant_rope kvant_centers_rope(const kvant_centers *centers, float *frequencies)
{
    return kvant_rope_of_pairs(centers->n_dims, centers->interleaved, centers->pairs, centers->n,
                               frequencies);
}

void kvant_rope_export(const kvant_rope *rope, uint8_t *to)
{
    const rope_header header = { rope->n_dims, rope->interleaved };
    memcpy(to, &header, sizeof header);
    memcpy(to + sizeof header, rope->frequencies, rope->n_dims / 2 * sizeof(float));
}

/* The bytes behind the n_dims / 2 frequencies of the rope are zeros on entry. */
static void write_centers(const kvant_tensor *tensor, const kvant_rope *rope, const float *start,
                          uint8_t *to)
{
    kvant_rope_export(rope, to);
    memcpy(to + kvant_rope_bytes(tensor), start, kvant_tensor_width(tensor) * sizeof(float));
}

void kvant_transform_bytes_of(const kvant_tensor *tensor, const kvant_matrix_numbers *numbers,
                              uint8_t *to)
{
    const size_t width = kvant_tensor_width(tensor),
                 affine = affine_bytes(tensor, KVANT_BYTES_AFFINE);
    const uint32_t kind = numbers->start ? KVANT_BYTES_CENTERS : KVANT_BYTES_MATRICES;
    const float one = 1;
    memset(to, 0, kvant_transform_bytes(tensor, kind));
    for (size_t i = 0; i < width; i++)
        memcpy(to + (width + i) * sizeof one, &one, sizeof one); /* with matrices nobody reads it */
    if (numbers->center)
        memcpy(to, numbers->center, width * sizeof(float));
    memcpy(to + affine, numbers->triangles, key_transform_bytes(tensor));
    if (numbers->start)
        write_centers(tensor, numbers->rope, numbers->start, to + centers_at(tensor));
}

static void export_centers(const kvant_tensor *tensor, const kvant_centers *centers, uint8_t *to)
{
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    const kvant_rope rope = kvant_centers_rope(centers, frequencies);
    write_centers(tensor, &rope, centers->start, to);
}

void kvant_transform_export(const kvant_tensor *tensor, uint32_t transform_id, uint8_t *to)
{
    const kvant_tensor_transform *transform = &tensor->transforms[transform_id];
    const uint32_t kind = kvant_transform_kind(tensor, transform_id);
    const size_t affine = affine_bytes(tensor, kind);
    memcpy(to, transform->center, affine);
    memset(to + affine, 0, kvant_transform_bytes(tensor, kind) - affine);
    if (kvant_bytes_have_matrices(kind))
        memcpy(to + affine, transform->key_transform->triangles, key_transform_bytes(tensor));
    if (kind == KVANT_BYTES_CENTERS)
        export_centers(tensor, transform->key_transform->centers, to + centers_at(tensor));
}

/* Reading */

kvant_status kvant_transform_accepts(const kvant_tensor *tensor, uint32_t kind)
{
    if (kind == KVANT_BYTES_CENTERS && tensor->device)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "exported block: it has its own centre, which only tensors in the "
                          "computer's memory support");
    if (kvant_bytes_have_matrices(kind) && !tensor->learning)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "exported block: it has matrices of transform=first, which only tensors "
                          "in the computer's memory support");
    return KVANT_OK;
}

static kvant_status check_numbers(const float *center, const float *scale, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(center[i]) || !isfinite(scale[i]) || !(scale[i] > 0))
            return kvant_damaged("its centre or scale is not finite, or its scale not above 0");
    return KVANT_OK;
}

kvant_status kvant_rope_import(const kvant_tensor *tensor, const uint8_t *data, kvant_rope *rope,
                               float *frequencies)
{
    rope_header header;
    memcpy(&header, data, sizeof header);
    memcpy(frequencies, data + sizeof header, tensor->head_dim / 2 * sizeof(float));
    *rope = (kvant_rope){ .n_dims = header.n_dims,
                          .interleaved = header.interleaved,
                          .frequencies = frequencies };
    return header.interleaved > 1 || kvant_rope_check(rope, tensor->head_dim) != KVANT_OK
               ? kvant_damaged("a number of its RoPE is out of range")
               : KVANT_OK;
}

/* Reads centres of blocks that export_centers wrote. */
static kvant_status import_centers(const kvant_tensor *tensor, const uint8_t *data,
                                   kvant_centers **centers)
{
    kvant_rope rope;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    KVANT_FORWARD(kvant_rope_import(tensor, data, &rope, frequencies));
    const kvant_status status = kvant_centers_create(tensor, &rope, centers);
    if (status != KVANT_OK)
        return status == KVANT_ERR_MEMORY
                   ? status
                   : kvant_damaged("its RoPE rotates a channel without a pair");
    memcpy((*centers)->start, data + kvant_rope_bytes(tensor),
           kvant_tensor_width(tensor) * sizeof(float));
    for (size_t i = 0; i < kvant_tensor_width(tensor); i++)
        if (!isfinite((*centers)->start[i]))
            return kvant_damaged("the centre of its blocks is not finite");
    return KVANT_OK;
}

/* Reads matrices and centres of blocks. The caller frees *triangles and *centers, also after an
 * error. */
static kvant_status import_key_transform(const kvant_tensor *tensor, const uint8_t *data,
                                         uint32_t kind, uint16_t **triangles,
                                         kvant_centers **centers)
{
    if (!kvant_bytes_have_matrices(kind))
        return KVANT_OK;
    *triangles = kvant_alloc(1, key_transform_bytes(tensor));
    KVANT_RETURN_IF(!*triangles, KVANT_ERR_MEMORY);
    memcpy(*triangles, data + affine_bytes(tensor, kind), key_transform_bytes(tensor));
    return kind == KVANT_BYTES_CENTERS ? import_centers(tensor, data + centers_at(tensor), centers)
                                       : KVANT_OK;
}

/* Copies centre and scale, which may have any alignment, to the candidate. */
static void import_affine(const kvant_tensor *tensor, const uint8_t *data, uint32_t kind, float *to)
{
    const size_t bytes = affine_bytes(tensor, kind);
    if (kind != KVANT_BYTES_HALVES)
        memcpy(to, data, bytes);
    for (size_t i = 0; i < bytes / sizeof(uint16_t) && kind == KVANT_BYTES_HALVES; i++) {
        uint16_t half;
        memcpy(&half, data + i * sizeof half, sizeof half);
        to[i] = kvant_half_to_float(half);
    }
}

kvant_status kvant_transform_import(kvant_tensor *tensor, const uint8_t *data, uint32_t kind,
                                    uint32_t n_threads, uint32_t *transform_id)
{
    kvant_tensor_transform *read = &tensor->transforms[KVANT_CANDIDATE];
    uint16_t *triangles = NULL;
    kvant_centers *centers = NULL;
    *transform_id = 0;
    if (!kind)
        return KVANT_OK;
    import_affine(tensor, data, kind, read->center);
    KVANT_FORWARD(check_numbers(read->center, read->scale, kvant_tensor_width(tensor)));
    const kvant_status fit = import_key_transform(tensor, data, kind, &triangles, &centers);
    const kvant_transform_values numbers = { read->center, read->scale, triangles,
                                             centers,      true,        n_threads };
    const kvant_status status =
        fit == KVANT_OK ? kvant_transforms_find(tensor, &numbers, transform_id) : KVANT_OK;
    kvant_free(triangles);
    kvant_free(centers);
    KVANT_FORWARD(fit);
    return status == KVANT_ERR_FULL ? kvant_no_transform()
           : status == KVANT_ERR_FORMAT
               ? kvant_damaged("the inverse of a matrix is not accurate enough")
               : status;
}
