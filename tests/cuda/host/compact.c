/* compact.c - the compact form of matrices, and matrices made from it, on the mock device (host.h).
 * It leaves inverses out, and solves against the triangles. */
#include <string.h>

#include "../../../src/math/compact.h"
#include "internal.h"

static size_t triangle_halves(uint32_t head_dim)
{
    const uint32_t n = kvant_key_transform_part(head_dim);
    return head_dim / n * kvant_triangle_size(n);
}

kvant_transform host_compact_transform(const kvant_cuda_codec *codec, const void *compact,
                                       uint32_t head)
{
    kvant_transform t = host_transform(codec, NULL, 0);
    t.key_transform = NULL;
    t.part = kvant_key_transform_part(t.head_dim);
    t.triangles = (const uint16_t *)compact + head * triangle_halves(t.head_dim);
    return t;
}

void host_copy_compact(void *to, const void *compact, const kvant_cuda_codec *codec,
                       uint32_t n_kv_heads)
{
    memcpy(to, compact,
           n_kv_heads * triangle_halves(host_transform(codec, NULL, 0).head_dim) *
               sizeof(uint16_t));
}

kvant_status host_compact(const kvant_cuda_compact_args *args, kvant_cuda_stream stream)
{
    const kvant_cuda_compact_layer one = { args->triangles, args->compact },
                                   *layers = args->n_layers > 0 ? args->layers : &one;
    ANSWER(compact, args, stream);
    if (!layers || args->head_dim % 8)
        return KVANT_ERR_ARGUMENT;
    for (uint32_t i = 0; i == 0 || i < args->n_layers; i++) {
        if (!layers[i].triangles || !layers[i].compact || layers[i].compact == layers[i].triangles)
            return KVANT_ERR_ARGUMENT;
        host_writes(stream, layers[i].compact);
        memcpy(layers[i].compact, layers[i].triangles,
               args->n_kv_heads * triangle_halves(args->head_dim) * sizeof(uint16_t));
    }
    return KVANT_OK;
}

/* Makes R W of all kv heads, or R W^-T. */
static void expand_matrix(const kvant_cuda_codec *codec, uint32_t n_kv_heads, const void *compact,
                          bool inverse, float *to)
{
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        const kvant_transform t = host_compact_transform(codec, compact, head);
        const size_t d = t.head_dim;
        for (size_t i = 0; i < d; i++) {
            float unit[MOST] = { 0 };
            unit[i] = 1;
            (inverse ? kvant_transform_dual : kvant_transform_apply_rows)(
                &t, host_kernels(), 1, unit, to + (head * d + i) * d);
        }
    }
}

kvant_status host_expand(const kvant_cuda_expand_args *args, kvant_cuda_stream stream)
{
    ANSWER(expand, args, stream);
    if (!args->codec || !args->compact || !args->n_kv_heads)
        return KVANT_ERR_ARGUMENT;
    host_reads(stream, args->compact);
    host_writes(stream, args->key_transform);
    host_writes(stream, args->inverse_key_transform);
    if (args->key_transform)
        expand_matrix(args->codec, args->n_kv_heads, args->compact, false, args->key_transform);
    if (args->inverse_key_transform)
        expand_matrix(args->codec, args->n_kv_heads, args->compact, true,
                      args->inverse_key_transform);
    return KVANT_OK;
}

static void place_centers(const kvant_cuda_center_layer *layer, const kvant_cuda_codec *codec,
                          uint32_t n_kv_heads, kvant_cuda_stream stream)
{
    const size_t d = host_transform(codec, NULL, 0).head_dim,
                 bytes = n_kv_heads * d * sizeof(float);
    for (int i = 0; i < 2; i++)
        if (layer->centers[i])
            memcpy(layer->centers[i], layer->center, bytes);
    if (layer->starts)
        memcpy(layer->starts, layer->start, bytes);
    if (!layer->key_center)
        return;
    host_reads(stream, layer->compact);
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        const kvant_transform t = host_compact_transform(codec, layer->compact, head);
        kvant_transform_apply_rows(&t, host_kernels(), 1, layer->center + head * d,
                                   layer->key_center + head * d);
    }
}

kvant_status host_place_centers(const kvant_cuda_place_centers_args *args, kvant_cuda_stream stream)
{
    const kvant_cuda_center_layer *layers = args->n_layers > 0 ? args->layers : &args->one;
    ANSWER(place_centers, args, stream);
    if (!args->codec || !args->n_kv_heads || !layers)
        return KVANT_ERR_ARGUMENT;
    for (uint32_t i = 0; i == 0 || i < args->n_layers; i++)
        place_centers(&layers[i], args->codec, args->n_kv_heads, stream);
    return KVANT_OK;
}
