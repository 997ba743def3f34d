/* learn.c - learning on the mock device (host.h). */
#include <stdlib.h>

#include "../../../src/base/half.h"
#include "../../../src/math/parts.h"
#include "../learn_reference.h"
#include "internal.h"
#include "learn/sums.h"

kvant_status host_learn(const kvant_cuda_learn_args *args, kvant_cuda_stream stream)
{
    if (!args->rows || !args->workspace || !args->triangles || !args->centers || !args->start ||
        (uintptr_t)args->workspace % 16 || args->workspace_bytes < kvant_cuda_learn_bytes(args))
        return KVANT_ERR_ARGUMENT;
    ANSWER(learn, args, stream);
    learn_reference(args);
    return KVANT_OK;
}

/* The place of a head's channel in its part; n: another part has it. */
static uint32_t place_in(uint32_t d, uint32_t n, uint32_t part, uint32_t channel)
{
    uint32_t i = 0;
    while (i < n && kvant_part_channel(d, n, part, i) != channel)
        i++;
    return i;
}

/* Rotates the rows of W^T and of W^-1 of a part. */
static void expand_part(const kvant_transform *rotation, const uint16_t *triangle, uint32_t n,
                        uint32_t part, float *forward, float *backward)
{
    const uint32_t d = rotation->head_dim;
    double *inverse = malloc((size_t)n * n * sizeof *inverse), reciprocals[LEARN_MOST];
    float row[MOST];
    learn_invert(triangle, (int)n, inverse, (int)n, reciprocals);
    for (uint32_t i = 0; i < n; i++) {
        const size_t at = (size_t)kvant_part_channel(d, n, part, i) * d;
        for (uint32_t channel = 0; channel < d; channel++) {
            const uint32_t j = place_in(d, n, part, channel);
            row[channel] = j < i    ? learn_number(triangle, (int)n, (int)i, (int)j)
                           : j == i ? learn_of_half(triangle[n + i])
                                    : 0;
        }
        kvant_transform_forward(rotation, host_kernels(), NULL, row, forward + at);
        for (uint32_t channel = 0; channel < d; channel++) {
            const uint32_t j = place_in(d, n, part, channel);
            row[channel] = j >= i && j < n ? (float)inverse[j * n + i] : 0;
        }
        kvant_transform_forward(rotation, host_kernels(), NULL, row, backward + at);
    }
    free(inverse);
}

static void expand(const kvant_cuda_expand_args *args)
{
    const uint32_t d = args->codec->params.head_dim, n = kvant_key_transform_part(d);
    kvant_transform rotation = host_source(args->codec)->transform;
    rotation.key_transform = NULL;
    rotation.triangles = NULL;
    for (uint32_t head = 0; head < args->n_kv_heads; head++) {
        const size_t size = (size_t)d * d;
        float *forward = args->key_transform + head * size;
        for (uint32_t part = 0; part < d / n; part++)
            expand_part(&rotation, args->triangles + (head * (d / n) + part) * LEARN_TRIANGLE(n), n,
                        part, forward, args->inverse_key_transform + head * size);
        for (uint32_t j = 0; j < d && args->center; j++) {
            double all = 0;
            for (uint32_t i = 0; i < d; i++)
                all += (double)forward[i * d + j] * args->center[head * d + i];
            args->key_center[head * d + j] = (float)all;
        }
    }
}

kvant_status host_expand(const kvant_cuda_expand_args *args, kvant_cuda_stream stream)
{
    if (!args->codec || !args->triangles || !args->key_transform || !args->inverse_key_transform ||
        (args->center && !args->key_center))
        return KVANT_ERR_ARGUMENT;
    ANSWER(expand, args, stream);
    expand(args);
    return KVANT_OK;
}
