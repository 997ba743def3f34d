/* qjl.c - see qjl.h.
 *
 * There are two projections: TurboQuant's (Algorithm 2), a matrix S of independent normal numbers,
 * and OCTOPUS's (section 3.6), an orthonormal R'. Both estimate |r| sqrt(pi / (2 d)) P^T sign(P r)
 * with P = S / sqrt(d) or P = R'. Rows of P have length 1 on average, so one formula serves
 * both. */
#include "qjl.h"

#include <math.h>

#include "../../base/half.h"
#include "../../base/random.h"
#include "../../math/rotation.h"
#include "../../math/sums.h"

#define SQRT_HALF_PI 1.2533141373155003f /* sqrt(pi / 2) */

const char *const kvant_sketch_names[] = { "hadamard", "gaussian", NULL };

kvant_status kvant_qjl_resolve(int32_t qjl, int32_t *option, int32_t *scale, kvant_sketch *sketch,
                               const kvant_error *error)
{
    if (*option != KVANT_OPTION_ABSENT && !qjl)
        return kvant_fail(error, KVANT_ERR_SPEC, "sketch=%s needs qjl: add it to the spec",
                          kvant_sketch_names[*option]);
    if (qjl && *scale == KVANT_SCALE_UNBIASED)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "scale=unbiased and qjl exclude each other, because the sketch removes "
                          "the bias of scale=norm: leave one of them out");
    if (*scale == KVANT_OPTION_ABSENT)
        *scale = qjl ? KVANT_SCALE_NORM : KVANT_SCALE_UNBIASED;
    if (qjl && *option == KVANT_OPTION_ABSENT)
        *option = 0;
    *sketch = !qjl           ? KVANT_SKETCH_NONE
              : *option == 1 ? KVANT_SKETCH_GAUSSIAN
                             : KVANT_SKETCH_HADAMARD;
    return KVANT_OK;
}

size_t kvant_qjl_matrix_floats(kvant_sketch sketch, uint32_t head_dim)
{
    if (sketch == KVANT_SKETCH_GAUSSIAN)
        return (size_t)head_dim * head_dim;
    return sketch == KVANT_SKETCH_HADAMARD ? kvant_transform_matrix_floats(head_dim) : 0;
}

kvant_status kvant_qjl_init(kvant_qjl *qjl, kvant_sketch sketch, uint32_t head_dim, uint64_t seed,
                            float *matrix)
{
    uint64_t own = kvant_derived_seed(seed, 1);
    *qjl = (kvant_qjl){ .sketch = sketch, .inverse_sqrt_dim = (float)(1 / sqrt((double)head_dim)) };
    if (sketch == KVANT_SKETCH_GAUSSIAN) {
        qjl->projection = (kvant_transform){ .rotate = KVANT_ROTATE_DENSE,
                                             .head_dim = head_dim,
                                             .matrix = matrix };
        kvant_random_normals((size_t)head_dim * head_dim, 1 / sqrt((double)head_dim), own, matrix);
        return KVANT_OK;
    }
    return kvant_transform_init_inner(&qjl->projection, head_dim, own, matrix);
}

void kvant_qjl_set_page(kvant_qjl *qjl, kvant_codec *codec, uint32_t bits, size_t code_bytes,
                        size_t metadata_bytes)
{
    kvant_layout_init(&qjl->signs, codec->info.role, codec->info.head_dim, 1);
    qjl->codes_offset = (code_bytes + 15) / 16 * 16;
    kvant_codec_set_page(codec, bits + 1, qjl->codes_offset + qjl->signs.code_bytes,
                         metadata_bytes + KVANT_PAGE_TOKENS * sizeof(uint16_t));
    qjl->norms_offset = codec->info.metadata_offset + metadata_bytes;
}

void kvant_qjl_set_view(const kvant_qjl *qjl, kvant_codec *codec)
{
    kvant_general_view *view = &codec->view.general;
    view->sketched = 1;
    view->sketch_codes = (uint32_t)qjl->codes_offset;
    view->sketch_norms = (uint32_t)qjl->norms_offset;
    view->projection = kvant_codec_rotation_position(codec, &qjl->projection);
    view->inverse_sqrt_dim = qjl->inverse_sqrt_dim;
}

static float residual_norm(const kvant_qjl *qjl, const float *residual)
{
    return sqrtf(kvant_dot_ordered(residual, residual, qjl->projection.head_dim)) *
           qjl->inverse_sqrt_dim;
}

bool kvant_qjl_fits(const kvant_qjl *qjl, const float *residual)
{
    return residual_norm(qjl, residual) <= KVANT_HALF_MAX;
}

void kvant_qjl_encode(const kvant_qjl *qjl, const kvant_kernels *kernels, const float *residual,
                      uint32_t token, void *page)
{
    float projected[KVANT_MAX_HEAD_DIM];
    uint8_t signs[KVANT_MAX_HEAD_DIM] = { 0 };
    kvant_transform_forward(&qjl->projection, kernels, NULL, residual, projected);
    for (uint32_t j = 0; j < qjl->projection.head_dim; j++)
        signs[j] = projected[j] < 0;
    kvant_layout_put(&qjl->signs, (uint8_t *)page + qjl->codes_offset, token, signs);
    ((uint16_t *)((uint8_t *)page + qjl->norms_offset))[token] =
        kvant_half_from_float(residual_norm(qjl, residual));
}

void kvant_qjl_add(const kvant_qjl *qjl, const kvant_kernels *kernels, const void *page,
                   uint32_t token, float *y)
{
    uint8_t signs[KVANT_MAX_HEAD_DIM];
    float estimate[KVANT_MAX_HEAD_DIM];
    uint16_t norm = ((const uint16_t *)((const uint8_t *)page + qjl->norms_offset))[token];
    float scale = kvant_half_to_float(norm) * SQRT_HALF_PI;
    kvant_layout_get(&qjl->signs, (const uint8_t *)page + qjl->codes_offset, token, signs);
    for (uint32_t j = 0; j < qjl->projection.head_dim; j++)
        estimate[j] = signs[j] ? -1.0f : 1.0f;
    float sum[KVANT_MAX_HEAD_DIM];
    kvant_transform_inverse(&qjl->projection, kernels, NULL, estimate, sum);
    for (uint32_t j = 0; j < qjl->projection.head_dim; j++)
        y[j] += scale * sum[j];
}
