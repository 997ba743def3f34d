/* transform.h - the linear half of a codec: y = R W ((x - c) / s), and the inverse. Knows nothing
 * of codes.
 *
 * R is orthonormal. W is the identity; keys may have a diagonal or symmetric W that weighs
 * directions (calibrated.h), or a permutation of channels (order.h). Queries take R W^-T, which
 * preserves inner products. */
#pragma once

#include <string.h>

#include <kvant/codec.h>

#include "../kernels/kernels.h"
#include "common.h"
#include "view.h"

typedef struct kvant_transform {
    kvant_rotate rotate;
    uint32_t head_dim;
    uint32_t block; /* Hadamard block, 0 without one */
    bool random_signs;
    float *signs;  /* +1 or -1, Hadamard only */
    float *matrix; /* R, head_dim x head_dim row-major, dense only */
    bool diagonal; /* what weights holds */
    /* A diagonal W has its factors here, and then their inverses. A full W has (R W)^T and then
     * (R W^-1)^T. A W with triangles has (R W)^T alone if R is dense, or NULL. */
    float *key_transform;
    const uint16_t *triangles; /* or NULL: W^T of parts, one after another (triangle.h) */
    uint32_t part;             /* of triangles: channels */
    float gain; /* with weights or triangles: no vector becomes longer than gain times its length */
} kvant_transform;

/* The rotation of a family when the spec names none. block 0: the largest Hadamard block that fits,
 * up to max_block. */
typedef struct kvant_transform_defaults {
    kvant_rotate rotate;
    uint32_t max_block;
    bool random_signs;
} kvant_transform_defaults;

/* Hadamard blocks without signs, as in the papers that rotate blocks; or none, unless the spec asks
 * for them. */
#define KVANT_TRANSFORM_BLOCKS(rotate) ((kvant_transform_defaults){ rotate, 128, false })

/* A random rotation: a Hadamard matrix of full size with random signs exists for powers of two,
 * other head_dims get a dense matrix. */
static inline kvant_transform_defaults kvant_transform_random(uint32_t head_dim)
{
    return (kvant_transform_defaults){ (head_dim & (head_dim - 1)) == 0 ? KVANT_ROTATE_HADAMARD
                                                                        : KVANT_ROTATE_DENSE,
                                       KVANT_MAX_HEAD_DIM, true };
}

/* Builds the transform that rotate, block and signs ask for. It owns its matrix. */
kvant_status kvant_transform_create(kvant_transform *transform, const kvant_common *common,
                                    const kvant_transform_defaults *defaults, uint32_t head_dim,
                                    uint64_t seed, const kvant_error *error);

/* Whether R depends on the seed. */
static inline bool kvant_transform_is_random(const kvant_transform *transform)
{
    return transform->rotate == KVANT_ROTATE_DENSE || transform->random_signs;
}

void kvant_transform_destroy(kvant_transform *transform);

/* A rotation inside a quantiser: with random signs by a Hadamard matrix of full size when n is a
 * power of two, dense otherwise. The matrix, or the signs, lie in memory of the caller's,
 * kvant_transform_matrix_floats(n) floats; nothing to destroy. */
kvant_status kvant_transform_init_inner(kvant_transform *transform, uint32_t n, uint64_t seed,
                                        float *matrix);
size_t kvant_transform_matrix_floats(uint32_t n);

/* Puts an orthonormal B (head_dim x head_dim, row-major) before the rotation, R becoming R B, or
 * behind it, B R. R is dense from then on. KVANT_ERR_MEMORY, and nothing changed. */
kvant_status kvant_transform_compose(kvant_transform *transform, const float *b, bool before);

/* Puts W before the rotation, once per transform. `kvant_transform_set_matrix` takes a full W. The
 * columns of w are the rows of W, and the rows of inverse are the rows of W^-1. Both are head_dim x
 * head_dim and are rounded to binary32. `kvant_transform_set_diagonal` takes the factors of a
 * diagonal W, above 0. KVANT_ERR_MEMORY. */
kvant_status kvant_transform_set_matrix(kvant_transform *transform, const double *w,
                                        const double *inverse);
kvant_status kvant_transform_set_diagonal(kvant_transform *transform, const float *factors);

/* Computes (R W)^T, head_dim x head_dim, of a transform with triangles of one part. Its numbers
 * have the bits that kvant_transform_set_matrix rounds to. */
void kvant_transform_expand(const kvant_transform *transform, float *key_transform);

/* A bound of the gain of W, n x n. */
float kvant_transform_gain_of(const double *w, size_t n);

/* `kvant_part_gather` copies the channels of a part next to each other, and the function after it
 * puts them back. The halves of a part lie head_dim / 2 apart, so a part has both channels of each
 * pair that RoPE rotates. This holds for models that store pairs side by side and for models that
 * store them half a row apart. */
static inline void kvant_part_gather(uint32_t head_dim, uint32_t n, uint32_t part, const float *x,
                                     float *out)
{
    memcpy(out, x + part * (n / 2), n / 2 * sizeof *x);
    memcpy(out + n / 2, x + head_dim / 2 + part * (n / 2), (n - n / 2) * sizeof *x);
}

static inline void kvant_part_scatter(uint32_t head_dim, uint32_t n, uint32_t part, const float *x,
                                      float *out)
{
    memcpy(out + part * (n / 2), x, n / 2 * sizeof *x);
    memcpy(out + head_dim / 2 + part * (n / 2), x + n / 2, (n - n / 2) * sizeof *x);
}

/* By how much the transform makes a vector longer, at most. */
float kvant_transform_gain(const kvant_transform *transform);

/* Computes (x - c) / s into z and returns z, or returns x when there is neither centre nor scale. x
 * and z may be equal. */
const float *kvant_transform_normalise(const kvant_transform *transform, const kvant_affine *affine,
                                       const float *x, float *z);

/* y = R W ((x - c) / s). No affine: NULL. The vectors x and y may be equal, except with a dense
 * rotation or a full W, where they must not overlap. */
void kvant_transform_forward(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine, const float *x, float *y);

/* Whether W mixes channels. */
static inline bool kvant_transform_is_full(const kvant_transform *transform)
{
    return transform->triangles || (transform->key_transform && !transform->diagonal);
}

/* y = R W x for n vectors, one after another, of a full W. x and y may not overlap. */
void kvant_transform_apply_rows(const kvant_transform *transform, const kvant_kernels *kernels,
                                uint32_t n, const float *x, float *y);

/* The transform as plain data, without centre and scale. */
kvant_transform_view kvant_transform_get_view(const kvant_transform *transform);

/* y = R W^-1 x for n queries, one after another, the same rules. */
void kvant_transform_dual(const kvant_transform *transform, const kvant_kernels *kernels,
                          uint32_t n, const float *x, float *y);

/* The numbers that kvant_transform_dual transforms together: 16 vectors of head_dim 128. A call
 * with a multiple of these is the fastest. */
#define KVANT_TRANSFORM_TOGETHER (4u * KVANT_MAX_HEAD_DIM)

/* y = W x, or W^-T x, without R, of a transform with triangles, for n vectors. */
void kvant_transform_apply_matrix(const kvant_transform *transform, const kvant_kernels *kernels,
                                  bool dual, uint32_t n, const float *x, float *y);

/* x = c + s o W^-1 R^T y, the same rules. */
void kvant_transform_inverse(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine, const float *y, float *x);
