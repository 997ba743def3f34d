/* transform.c - see transform.h. format.md, "Transform", has the arithmetic. A full W of a
 * calibration is multiplied with R once, so rows and queries pass through one matrix. Rows pass
 * through triangles and then through R, because that takes fewer steps and no memory. */
#include "transform.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/random.h"
#include "../math/rotation.h"

static uint32_t largest_block(uint32_t head_dim, uint32_t max)
{
    uint32_t block = 1;
    while (block * 2 <= max && head_dim % (block * 2) == 0)
        block *= 2;
    return block;
}

static bool is_power_of_two(uint32_t n)
{
    return n && (n & (n - 1)) == 0;
}

static kvant_status set_block(kvant_transform *transform, int32_t wanted, uint32_t max_block,
                              const kvant_error *error)
{
    uint32_t asked = wanted == KVANT_OPTION_ABSENT ? 0 : (uint32_t)wanted;
    if (asked && transform->rotate != KVANT_ROTATE_HADAMARD)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "block=%u needs rotate=hadamard: add it to the spec", (unsigned)asked);
    if (asked && (!is_power_of_two(asked) || transform->head_dim % asked != 0))
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "block=%u is not a power of two that divides head_dim %u: use at most %u",
                          (unsigned)asked, (unsigned)transform->head_dim,
                          (unsigned)largest_block(transform->head_dim, KVANT_MAX_HEAD_DIM));
    if (transform->rotate == KVANT_ROTATE_HADAMARD)
        transform->block = asked ? asked : largest_block(transform->head_dim, max_block);
    return KVANT_OK;
}

static kvant_status set_rotation(kvant_transform *transform, const kvant_common *common,
                                 const kvant_transform_defaults *defaults, const kvant_error *error)
{
    bool signs = common->signs == KVANT_OPTION_ABSENT ? defaults->random_signs : common->signs != 0;
    transform->rotate =
        common->rotate == KVANT_OPTION_ABSENT ? defaults->rotate : (kvant_rotate)common->rotate;
    transform->random_signs = signs && transform->rotate == KVANT_ROTATE_HADAMARD;
    return set_block(transform, common->block, defaults->max_block, error);
}

static void fill_signs(kvant_transform *transform, uint64_t seed)
{
    uint64_t word = 0;
    for (uint32_t i = 0; i < transform->head_dim; i++) {
        if (i % 64 == 0)
            word = kvant_splitmix64(&seed);
        transform->signs[i] = transform->random_signs && (word >> i % 64 & 1) ? -1.0f : 1.0f;
    }
}

kvant_status kvant_transform_create(kvant_transform *transform, const kvant_common *common,
                                    const kvant_transform_defaults *defaults, uint32_t head_dim,
                                    uint64_t seed, const kvant_error *error)
{
    *transform = (kvant_transform){ .head_dim = head_dim };
    KVANT_FORWARD(set_rotation(transform, common, defaults, error));
    if (transform->rotate == KVANT_ROTATE_HADAMARD) {
        transform->signs = kvant_alloc(head_dim, sizeof(float));
        KVANT_RETURN_IF(!transform->signs, KVANT_ERR_MEMORY);
        fill_signs(transform, seed);
    }
    if (transform->rotate != KVANT_ROTATE_DENSE)
        return KVANT_OK;
    transform->matrix = kvant_alloc((size_t)head_dim * head_dim, sizeof(float));
    KVANT_RETURN_IF(!transform->matrix, KVANT_ERR_MEMORY);
    return kvant_random_rotation(head_dim, seed, transform->matrix);
}

void kvant_transform_destroy(kvant_transform *transform)
{
    kvant_free(transform->signs);
    kvant_free(transform->matrix);
    kvant_free(transform->key_transform);
    transform->signs = transform->matrix = transform->key_transform = NULL;
}

size_t kvant_transform_matrix_floats(uint32_t n)
{
    return is_power_of_two(n) ? n : (size_t)n * n;
}

kvant_status kvant_transform_init_inner(kvant_transform *transform, uint32_t n, uint64_t seed,
                                        float *matrix)
{
    *transform = (kvant_transform){ .rotate = KVANT_ROTATE_DENSE, .head_dim = n, .matrix = matrix };
    if (!is_power_of_two(n))
        return kvant_random_rotation(n, seed, matrix);
    *transform = (kvant_transform){ .rotate = KVANT_ROTATE_HADAMARD,
                                    .head_dim = n,
                                    .block = n,
                                    .random_signs = true,
                                    .signs = matrix };
    fill_signs(transform, seed);
    return KVANT_OK;
}

/* Columns of R B are R times columns of B; rows of B R are R^T times rows of B. */
kvant_status kvant_transform_compose(kvant_transform *transform, const float *b, bool before)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    size_t d = transform->head_dim;
    float *matrix = kvant_alloc(d * d, sizeof *matrix), in[KVANT_MAX_HEAD_DIM],
          out[KVANT_MAX_HEAD_DIM];
    KVANT_RETURN_IF(!matrix, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < d; i++) {
        for (size_t j = 0; j < d; j++)
            in[j] = before ? b[j * d + i] : b[i * d + j];
        if (before)
            kvant_transform_forward(transform, kernels, NULL, in, out);
        else
            kvant_transform_inverse(transform, kernels, NULL, in, out);
        for (size_t j = 0; j < d; j++)
            matrix[before ? j * d + i : i * d + j] = out[j];
    }
    kvant_free(transform->matrix);
    transform->matrix = matrix;
    transform->rotate = KVANT_ROTATE_DENSE;
    return KVANT_OK;
}

const float *kvant_transform_normalise(const kvant_transform *transform, const kvant_affine *affine,
                                       const float *x, float *z)
{
    if (!affine || (!affine->center && !affine->scale))
        return x;
    for (uint32_t i = 0; i < transform->head_dim; i++)
        z[i] = affine->center ? x[i] - affine->center[i] : x[i];
    for (uint32_t i = 0; affine->scale && i < transform->head_dim; i++)
        z[i] /= affine->scale[i];
    return z;
}

/* y = R x; x and y may be equal unless R is dense. */
static void rotate(const kvant_transform *transform, const kvant_kernels *kernels, const float *x,
                   float *y)
{
    uint32_t d = transform->head_dim;
    if (transform->rotate == KVANT_ROTATE_DENSE) {
        for (uint32_t i = 0; i < d; i++)
            y[i] = kernels->dot(transform->matrix + (size_t)i * d, x, d);
    } else if (transform->rotate == KVANT_ROTATE_HADAMARD) {
        for (uint32_t i = 0; i < d; i++)
            y[i] = x[i] * transform->signs[i];
        kernels->hadamard(y, d, transform->block);
    } else if (x != y) {
        memcpy(y, x, d * sizeof *y);
    }
}

/* x = R^T y, the same rules. */
static void unrotate(const kvant_transform *transform, const kvant_kernels *kernels, const float *y,
                     float *x)
{
    uint32_t d = transform->head_dim;
    if (transform->rotate == KVANT_ROTATE_DENSE) {
        kernels->combine_rows(transform->matrix, y, d, d, 1, x);
        return;
    }
    if (x != y)
        memcpy(x, y, d * sizeof *x);
    if (transform->rotate == KVANT_ROTATE_HADAMARD) {
        kernels->hadamard(x, d, transform->block);
        for (uint32_t i = 0; i < d; i++)
            x[i] *= transform->signs[i];
    }
}

/* A bound of the gain of w, n x n. No eigenvalue of W^T W exceeds the largest sum of magnitudes of
 * a row times the largest sum of magnitudes of a column. */
float kvant_transform_gain_of(const double *w, size_t n)
{
    double row = 0, column = 0;
    for (size_t i = 0; i < n; i++) {
        double in_row = 0, in_column = 0;
        for (size_t j = 0; j < n; j++) {
            in_row += fabs(w[i * n + j]);
            in_column += fabs(w[j * n + i]);
        }
        row = fmax(row, in_row);
        column = fmax(column, in_column);
    }
    return (float)sqrt(row * column);
}

/* The columns of R W are R times the columns of W. */
kvant_status kvant_transform_set_matrix(kvant_transform *transform, const double *w,
                                        const double *inverse)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    size_t d = transform->head_dim;
    float *key_transform = kvant_alloc(2 * d * d, sizeof *key_transform), row[KVANT_MAX_HEAD_DIM];
    KVANT_RETURN_IF(!key_transform, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < 2 * d; i++) {
        for (size_t j = 0; j < d; j++)
            row[j] = (float)(i < d ? w[i * d + j] : inverse[(i - d) * d + j]);
        rotate(transform, kernels, row, key_transform + i * d);
    }
    transform->gain = kvant_transform_gain_of(w, d);
    transform->key_transform = key_transform;
    return KVANT_OK;
}

void kvant_transform_expand(const kvant_transform *transform, float *key_transform)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const uint32_t d = transform->head_dim;
    for (uint32_t i = 0; i < d; i++, key_transform += d) {
        float row[KVANT_MAX_HEAD_DIM];
        kernels->triangle_row(transform->triangles, d, i, row);
        for (uint32_t j = i + 1; j < d; j++)
            row[j] = 0;
        rotate(transform, kernels, row, key_transform);
    }
}

kvant_status kvant_transform_set_diagonal(kvant_transform *transform, const float *factors)
{
    size_t d = transform->head_dim;
    float *key_transform = kvant_alloc(2 * d, sizeof *key_transform);
    KVANT_RETURN_IF(!key_transform, KVANT_ERR_MEMORY);
    for (size_t i = 0; i < d; i++) {
        key_transform[i] = factors[i];
        key_transform[d + i] = 1 / factors[i];
        transform->gain = factors[i] > transform->gain ? factors[i] : transform->gain;
    }
    transform->key_transform = key_transform;
    transform->diagonal = true;
    return KVANT_OK;
}

float kvant_transform_gain(const kvant_transform *transform)
{
    return transform->gain > 1 ? transform->gain : 1;
}

/* Transforms one part of a vector in place. */
typedef void apply_part(const kvant_transform *t, const kvant_kernels *kernels, uint32_t part,
                        uint32_t n, float *x);

static void by_parts(const kvant_transform *t, const kvant_kernels *kernels, apply_part *stretch,
                     uint32_t n, const float *x, float *y)
{
    const uint32_t d = t->head_dim, part = t->part;
    float of_part[KVANT_TRANSFORM_TOGETHER];
    for (uint32_t p = 0; p < d / part; p++) {
        for (uint32_t i = 0; i < n; i++)
            kvant_part_gather(d, part, p, x + (size_t)i * d, of_part + (size_t)i * part);
        stretch(t, kernels, p, n, of_part);
        for (uint32_t i = 0; i < n; i++)
            kvant_part_scatter(d, part, p, of_part + (size_t)i * part, y + (size_t)i * d);
    }
}

static const uint16_t *triangle_of(const kvant_transform *t, uint32_t part)
{
    return t->triangles + part * kvant_triangle_size(t->part);
}

static void multiply_part(const kvant_transform *t, const kvant_kernels *kernels, uint32_t part,
                          uint32_t n, float *x)
{
    kernels->multiply_upper(triangle_of(t, part), t->part, n, x);
}

static void solve_part(const kvant_transform *t, const kvant_kernels *kernels, uint32_t part,
                       uint32_t n, float *x)
{
    kernels->solve_upper(triangle_of(t, part), t->part, n, x);
}

static void solve_dual(const kvant_transform *t, const kvant_kernels *kernels, uint32_t part,
                       uint32_t n, float *x)
{
    kernels->solve_lower(triangle_of(t, part), t->part, n, x);
}

/* With one part nothing has to be gathered or put back. */
void kvant_transform_apply_matrix(const kvant_transform *transform, const kvant_kernels *kernels,
                                  bool dual, uint32_t n, const float *x, float *y)
{
    const size_t d = transform->head_dim;
    const uint32_t most = KVANT_TRANSFORM_TOGETHER / transform->part;
    apply_part *const stretch = dual ? solve_dual : multiply_part;
    if (transform->part == d) {
        memcpy(y, x, n * d * sizeof *y);
        stretch(transform, kernels, 0, n, y);
        return;
    }
    for (uint32_t i = 0; i < n; i += most)
        by_parts(transform, kernels, stretch, n - i < most ? n - i : most, x + i * d, y + i * d);
}

/* y = R W x for a diagonal W, whose factors lie in `key_transform`. */
static void apply_diagonal(const kvant_transform *transform, const kvant_kernels *kernels,
                           const float *key_transform, const float *x, float *y)
{
    float z[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < transform->head_dim; i++)
        z[i] = x[i] * key_transform[i];
    rotate(transform, kernels, z, y);
}

/* The numbers of W^-T, which follow the numbers of W. */
static const float *inverse_key_transform(const kvant_transform *transform)
{
    size_t d = transform->head_dim;
    return transform->key_transform + d * (transform->diagonal ? 1 : d);
}

kvant_transform_view kvant_transform_get_view(const kvant_transform *transform)
{
    const bool hadamard = transform->rotate == KVANT_ROTATE_HADAMARD;
    return (kvant_transform_view){
        .rotate = transform->rotate,
        .block = hadamard ? transform->block : 0,
        .signs = hadamard ? transform->signs : NULL,
        .matrix = transform->rotate == KVANT_ROTATE_DENSE ? transform->matrix : NULL,
        .key_transform = transform->key_transform,
        .inverse_key_transform = transform->key_transform && !transform->triangles
                                     ? inverse_key_transform(transform)
                                     : NULL,
        .diagonal = transform->diagonal
    };
}

/* Rotates several vectors in place. */
static void rotate_all(const kvant_transform *transform, const kvant_kernels *kernels, uint32_t n,
                       float *y)
{
    const size_t d = transform->head_dim;
    float z[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < n; i++, y += d)
        rotate(transform, kernels,
               transform->rotate == KVANT_ROTATE_DENSE ? memcpy(z, y, d * sizeof *z) : y, y);
}

void kvant_transform_apply_rows(const kvant_transform *transform, const kvant_kernels *kernels,
                                uint32_t n, const float *x, float *y)
{
    if (transform->key_transform) {
        kernels->combine_rows(transform->key_transform, x, transform->head_dim, transform->head_dim,
                              n, y);
    } else {
        kvant_transform_apply_matrix(transform, kernels, false, n, x, y);
        rotate_all(transform, kernels, n, y);
    }
}

void kvant_transform_forward(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine, const float *x, float *y)
{
    float z[KVANT_MAX_HEAD_DIM];
    const float *source = kvant_transform_normalise(transform, affine, x, z);
    if (kvant_transform_is_full(transform))
        kvant_transform_apply_rows(transform, kernels, 1, source, y);
    else if (transform->key_transform)
        apply_diagonal(transform, kernels, transform->key_transform, source, y);
    else
        rotate(transform, kernels, source, y);
}

void kvant_transform_dual(const kvant_transform *transform, const kvant_kernels *kernels,
                          uint32_t n, const float *x, float *y)
{
    const uint32_t d = transform->head_dim;
    if (transform->triangles) {
        kvant_transform_apply_matrix(transform, kernels, true, n, x, y);
        rotate_all(transform, kernels, n, y);
        return;
    }
    if (kvant_transform_is_full(transform)) {
        kernels->combine_rows(inverse_key_transform(transform), x, d, d, n, y);
        return;
    }
    for (const float *end = x + (size_t)n * d; x < end; x += d, y += d)
        if (transform->key_transform)
            apply_diagonal(transform, kernels, inverse_key_transform(transform), x, y);
        else
            rotate(transform, kernels, x, y);
}

/* x = W^-1 R^T y */
static void apply_inverse(const kvant_transform *transform, const kvant_kernels *kernels,
                          const float *y, float *x)
{
    const float *key_transform = inverse_key_transform(transform);
    uint32_t d = transform->head_dim;
    if (transform->diagonal) {
        unrotate(transform, kernels, y, x);
        for (uint32_t i = 0; i < d; i++)
            x[i] *= key_transform[i];
        return;
    }
    for (uint32_t i = 0; i < d; i++)
        x[i] = kernels->dot(key_transform + (size_t)i * d, y, d);
}

void kvant_transform_inverse(const kvant_transform *transform, const kvant_kernels *kernels,
                             const kvant_affine *affine, const float *y, float *x)
{
    if (transform->triangles) {
        float z[KVANT_MAX_HEAD_DIM];
        unrotate(transform, kernels, y, z);
        by_parts(transform, kernels, solve_part, 1, z, x);
    } else if (transform->key_transform) {
        apply_inverse(transform, kernels, y, x);
    } else {
        unrotate(transform, kernels, y, x);
    }
    for (uint32_t i = 0; affine && affine->scale && i < transform->head_dim; i++)
        x[i] *= affine->scale[i];
    for (uint32_t i = 0; affine && affine->center && i < transform->head_dim; i++)
        x[i] += affine->center[i];
}
