/* kernels_c.c - the kernels in portable C, the reference for every level. */
#include <math.h>

#include "../base/half.h"
#include "code_at.h"

void kvant_unpack_group_c(const kvant_layout *layout, const void *page, const float *values,
                          float offset, uint32_t group, float *tile)
{
    uint32_t tiles = kvant_layout_group_tiles(layout, group);
    size_t stride = layout->role == KVANT_ROLE_K ? KVANT_PAGE_TOKENS : layout->padded_dim;
    for (uint32_t ct = 0; ct < layout->column_tiles; ct++)
        for (uint32_t field = 0; field < 4; field++)
            for (uint32_t lane = 0; lane < 32; lane++)
                for (uint32_t rt = 0; rt < tiles; rt++)
                    for (uint32_t odd = 0; odd < 2; odd++) {
                        uint32_t column = 16 * ct + 2 * (lane % 4) + 8 * (field / 2) + odd;
                        uint32_t position =
                            64 * group + 8 * tiles * (field % 2) + tiles * (lane / 4) + rt;
                        uint32_t code =
                            kvant_code_at(layout, page, group, ct, tiles * lane + rt, field, odd);
                        if (layout->role == KVANT_ROLE_V)
                            column = kvant_token_position(column);
                        tile[column * stride + position] =
                            values ? values[code] : (float)code + offset;
                    }
}

KVANT_UNPACK_FN(kvant_unpack_c)
{
    for (uint32_t group = 0; 4 * group < layout->row_tiles; group++)
        kvant_unpack_group_c(layout, page, values, offset, group, tile);
}

KVANT_MATMUL_FN(kvant_matmul_c)
{
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t l = 0; l < k; l++) {
            float factor = a[i * lda + l];
            for (uint32_t j = 0; j < n; j++)
                c[i * ldc + j] += factor * b[l * ldb + j];
        }
}

KVANT_EXP_SUM_FN(kvant_exp_sum_c)
{
    float sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        float e = x[i] - shift < -87.0f ? 0.0f : expf(x[i] - shift);
        x[i] = e;
        sum += e;
    }
    return sum;
}

KVANT_MASK_SCORES_FN(kvant_mask_scores_c)
{
    float lanes[4] = { -INFINITY, -INFINITY, -INFINITY, -INFINITY };
    for (uint32_t i = 0; mask && i < KVANT_PAGE_TOKENS; i++)
        scores[i] = mask[i] == -INFINITY ? -INFINITY : scores[i] + slope * mask[i];
    for (uint32_t i = 0; i < KVANT_PAGE_TOKENS; i += 4)
        for (uint32_t j = 0; j < 4; j++)
            lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
    float even = lanes[0] > lanes[2] ? lanes[0] : lanes[2],
          odd = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
    return even > odd ? even : odd;
}

KVANT_HALF_FN(kvant_half_to_float_c)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] = kvant_half_to_float(half[i]);
}

KVANT_KEY_HALVES_FN(kvant_key_halves_c)
{
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        for (uint32_t j = 0; j < dim; j++)
            tile[(size_t)j * KVANT_PAGE_TOKENS + kvant_token_position(t)] =
                kvant_half_to_float(half[(size_t)t * dim + j]);
}

KVANT_SCALE_COLUMNS_FN(kvant_scale_columns_c)
{
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < n; j++)
            tile[(size_t)i * n + j] = tile[(size_t)i * n + j] * scale[j] + zero[j];
}

KVANT_SCALE_ROWS_FN(kvant_scale_rows_c)
{
    for (uint32_t i = 0; i < m; i++)
        for (uint32_t j = 0; j < n; j++)
            tile[(size_t)i * n + j] = tile[(size_t)i * n + j] * scale[i] + zero[i];
}
