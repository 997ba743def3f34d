/* order.c - see order.h. format.md, "Transform", has the permutations. */
#include "order.h"

#include "../base/alloc.h"

/* Channel i of the halves, in pairs: the even channels come first. */
static uint32_t even_then_odd(uint32_t head_dim, uint32_t i)
{
    const uint32_t evens = (head_dim + 1) / 2;
    return i < evens ? 2 * i : 2 * (i - evens) + 1;
}

/* A chunk of four takes a channel of each quarter: forwards from the first and the last quarter,
 * backwards from the second and the third. So the indices of every chunk have the same sum. When
 * head_dim is a multiple of 8, no chunk has both channels of a pair, whether the two channels are
 * stored side by side or half a row apart. */
static uint32_t dealt(uint32_t head_dim, uint32_t i)
{
    const uint32_t n = head_dim / 4, chunk = i / 4;
    const uint32_t from[] = { chunk, 2 * n - 1 - chunk, 3 * n - 1 - chunk, 3 * n + chunk };
    return chunk < n ? from[i % 4] : i;
}

void kvant_order_channels(kvant_order order, uint32_t head_dim, uint16_t *from)
{
    for (uint32_t i = 0; i < head_dim; i++)
        if (order == KVANT_ORDER_PAIRS)
            from[even_then_odd(head_dim, i)] = (uint16_t)i;
        else
            from[i] = (uint16_t)(order == KVANT_ORDER_HALVES  ? even_then_odd(head_dim, i)
                                 : order == KVANT_ORDER_DEALT ? dealt(head_dim, i)
                                                              : i);
}

/* W^-T of a permutation W is W, so kvant_transform_set_matrix gets one matrix twice. Products with
 * W are exact, because each sum has one term that is not zero. */
static kvant_status permute(kvant_transform *transform, kvant_order order)
{
    const size_t d = transform->head_dim;
    uint16_t from[KVANT_MAX_HEAD_DIM];
    double *w = kvant_alloc(d * d, sizeof *w);
    KVANT_RETURN_IF(!w, KVANT_ERR_MEMORY);
    kvant_order_channels(order, transform->head_dim, from);
    for (size_t i = 0; i < d; i++)
        w[from[i] * d + i] = 1;
    const kvant_status status = kvant_transform_set_matrix(transform, w, w);
    kvant_free(w);
    return status;
}

kvant_status kvant_codec_set_order(kvant_codec *codec, const kvant_common *common,
                                   const kvant_error *error)
{
    if (common->order == KVANT_OPTION_ABSENT || common->order == KVANT_ORDER_STORED)
        return KVANT_OK;
    if (common->transform != KVANT_OPTION_ABSENT && common->transform != KVANT_WEIGHTING_NONE)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "order= and transform= exclude each other, because both are a matrix "
                          "on keys: leave one of them out");
    if (codec->info.role != KVANT_ROLE_K)
        return KVANT_OK;
    codec->shown.order = common->order;
    return permute(&codec->transform, (kvant_order)common->order);
}
